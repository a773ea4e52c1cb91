"""The names of metrics that runs log."""

from collections.abc import Iterable

from rpbench.tracking.metrics import HISTORY, MEMORY, STEP, SUMMARY, TIMELINE

WORDS = ("status", "reason", "evidence")


def logged_names(names: Iterable[str]) -> set[str]:
    """All that are known, and of some names those that begin like a metric of memory."""
    return {*HISTORY, *SUMMARY, *WORDS, STEP, TIMELINE, *(name for name in names if name.startswith(MEMORY))}
