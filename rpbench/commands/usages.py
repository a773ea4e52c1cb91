"""Usages of verbs as their help and errors say them; what stands in `usages.yaml` is read where it is said."""

from pathlib import Path
from typing import Any

from rpbench.yaml_file import read_keys

# What `list` shows -> the folder of `conf/` that it is in; schedules are registered.
_GROUPS = ("schedule", "model", "cluster", "experiment", "gpu", "ssd", "workload", "cost", "backend", "optimizer")
LISTS = {f"{group}s": group for group in (*_GROUPS, "mode", "tracker")} | {"software": "software"}


def usages() -> dict[str, dict[str, Any]]:
    """What each verb does (`says`), the words that it takes, and its own `keys`."""
    return read_keys(Path(__file__).with_suffix(".yaml"))


def usage(verb: str) -> str:
    """A verb with its words, in one line."""
    return f"{verb} {usages()[verb]['takes']}"
