"""The names that runs log."""

from rpbench.tracking.metrics import HISTORY, MEMORY, STEP, SUMMARY, TIMELINE

NAMES = {*HISTORY, *SUMMARY, STEP, TIMELINE, "status", "reason", "evidence"}


def is_logged(name: str) -> bool:
    """Whether runs log a metric of that name."""
    return name in NAMES or name.startswith(MEMORY)
