"""Processes of this host, as what they leave behind names them: a number, and when it was given."""

import os
from pathlib import Path


def boot() -> str:
    """A word for the time since the machine was started; empty where that is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def began(pid: int) -> str:
    """When a process started, in ticks since the boot; empty if there is none, or it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return "" if text.rpartition(")")[2].split()[0] == "Z" else text.rpartition(")")[2].split()[19]
    except OSError:
        return "" if not _lives(pid) else "unknown"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
