"""Allocator: glibc settings under which large tensors keep their pages, for measurements in real time.

By default glibc gives a large block back to the system when it is freed, so that every operation faults its output
in again, page by page. The settings are read when a process starts: the command line therefore starts itself once
more, as the same process, before a run that is measured.
"""

import os
import platform
import sys
from collections.abc import Mapping, Sequence

VARIABLE = "GLIBC_TUNABLES"
TUNABLES = (
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=268435456"
)


def is_tuned(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started with settings of glibc's malloc, ours or the user's."""
    return "glibc.malloc." in environment.get(VARIABLE, "")


def restart_tuned(arguments: Sequence[str]) -> None:
    """Start this command again with the settings, if it measures in real time and does not have them yet.

    Does not return if it does. Settings of the user's own are left alone.
    """
    if "backend=cpu" not in arguments or is_tuned() or platform.libc_ver()[0] != "glibc":
        return
    others = os.environ.get(VARIABLE)
    environment = os.environ | {VARIABLE: f"{others}:{TUNABLES}" if others else TUNABLES}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
