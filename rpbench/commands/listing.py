"""`list`: what can be chosen, a line each."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rpbench import registry
from rpbench.places import CONF, files_of

FOLDERS: Mapping[str, str] = {
    "models": "model",
    "clusters": "cluster",
    "experiments": "experiment",
    "gpus": "gpu",
}


def listed(what: str) -> Iterator[dict[str, str]]:
    """Name and one line about each option of schedules or a folder of `FOLDERS`; `path` of the user's."""
    if what == "schedules":
        for name, entry in registry.offered().items():
            found = registry.sources(entry)
            yield {"name": name, "says": entry.source} | ({"path": str(found[0])} if found else {})
        return
    for path in files_of(FOLDERS[what]):
        own = {} if path.is_relative_to(CONF) else {"path": str(path)}
        yield {"name": path.stem, "says": first_comment(path)} | own


def first_comment(path: Path) -> str:
    """The first line of a file's first comment that says something, without its mark."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and line.strip("# ") and not line.strip("# ").startswith("@"):
            return line.strip("# ")
    return ""
