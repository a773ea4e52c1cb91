"""Usages of verbs for their help and errors, from `usages.yaml`."""

from pathlib import Path
from typing import Any

from rpbench.yaml_file import read_keys

# What `list` shows -> the folder of `conf/` that it is in; schedules are registered.
_GROUPS = ("schedule", "model", "cluster", "experiment", "gpu", "ssd", "workload", "cost", "backend", "optimizer")
LISTS = {f"{group}s": group for group in (*_GROUPS, "mode", "tracker")} | {"software": "software"}


def usages() -> dict[str, dict[str, Any]]:
    """Per verb what it does (`says`), the words it takes, and its own `keys`."""
    return read_keys(Path(__file__).with_suffix(".yaml"))


def usage(verb: str) -> str:
    """A verb with its words, in one line."""
    return f"{verb} {usages()[verb]['takes']}"
