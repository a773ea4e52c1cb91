"""`list`: what can be chosen, a line each."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rpbench import registry
from rpbench.harness.config import CONF

FOLDERS: Mapping[str, str] = {
    "models": "model",
    "clusters": "cluster",
    "experiments": "experiment",
    "gpus": "gpu",
}


def listed(what: str) -> Iterator[dict[str, str]]:
    """Name and one line about each option of schedules, models, clusters, experiments or gpus."""
    if what == "schedules":
        for name, entry in registry.entries().items():
            yield {"name": name, "says": entry.source}
        return
    for path in sorted((CONF / FOLDERS[what]).glob("*.yaml")):
        yield {"name": path.stem, "says": first_comment(path)}


def first_comment(path: Path) -> str:
    """The first line of a file's first comment that says something, without its mark."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and line.strip("# ") and not line.strip("# ").startswith("@"):
            return line.strip("# ")
    return ""
