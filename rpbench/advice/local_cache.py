"""Local cache: configs of Hugging Face that were fetched earlier. Nothing is downloaded.

The cache's layout is that of huggingface_hub: `models--ORG--NAME/refs/main` holds a revision, and
`snapshots/REVISION/config.json` the file. Source: huggingface_hub's guide "Understand caching".
"""

import os
import re
from pathlib import Path

PREFIX = "models--"
NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")


def cache_folder() -> Path:
    """The folder of the cache, as the environment says it."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.path.expanduser("~")  # which, unlike Path.home, gives an answer to a user without one
    general = os.environ.get("XDG_CACHE_HOME") or Path(home) / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(general) / "huggingface") / "hub"


def cached_config(name: str) -> Path | None:
    """The `config.json` of a name such as `meta-llama/Llama-3.2-3B` in the cache; None if it was never fetched.

    The revision is that of the branch `main`; without one, the only revision that is there.
    """
    if not NAME.fullmatch(name) or ".." in name:
        return None
    folder = cache_folder() / (PREFIX + name.replace("/", "--"))
    main = folder / "refs" / "main"
    if main.is_file():
        found = [folder / "snapshots" / main.read_text(encoding="ascii", errors="replace").strip() / "config.json"]
    else:
        found = list((folder / "snapshots").glob("*/config.json"))
    return found[0] if len(found) == 1 and found[0].is_file() else None


def cached_name(path: Path) -> str | None:
    """The name, without its organisation, of a config that lies in such a cache; None if it does not."""
    folder = path.parent.parent.parent.name
    if path.parent.parent.name != "snapshots" or not folder.startswith(PREFIX):
        return None
    return folder.removeprefix(PREFIX).rsplit("--", 1)[-1]
