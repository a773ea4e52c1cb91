"""Allocator: glibc settings that keep the pages of large tensors, for measurements in real time.

By default glibc returns a large block to the system when it is freed, and every operation faults its output in again,
page by page. glibc reads the settings when a process starts, so the command line restarts itself before a measured run.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

from rpbench.places import CONF, places, split_dirs
from rpbench.whole_file import read_text

VARIABLE = "GLIBC_TUNABLES"
TUNABLES = (
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=268435456"
)
REAL_TIME = frozenset({"cpu", "device", "duel", "torch_duel", "gpu_duel"})  # a backend, and modes
# `backend: cpu` or `mode: duel` of a defaults list (with "override /" before it) or of a sweep; the head of a section
# has no value.
_CHOICE = re.compile(r"^[ \t]*(?:- override /)?(?:backend|mode):[ \t]*([^\s#][^\n#]*)", re.MULTILINE)


def is_tuned(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started with settings for glibc's malloc, ours or the user's."""
    return "glibc.malloc." in environment.get(VARIABLE, "")


def restart_tuned(arguments: Sequence[str]) -> None:
    """Restart this command with the settings if it measures in real time and has none, ours or the user's."""
    if not measures(arguments) or is_tuned() or platform.libc_ver()[0] != "glibc":
        return
    others = os.environ.get(VARIABLE)
    environment = os.environ | {VARIABLE: f"{others}:{TUNABLES}" if others else TUNABLES}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def measures(arguments: Sequence[str]) -> bool:
    """Whether a command runs anything in real time, judged by its text: composing takes longer than a restart."""
    arguments, folders = split_dirs(arguments)
    if arguments and arguments[0] == "calibrate":
        return not any(item.startswith("device=") and item != "device=cpu" for item in arguments)
    chosen = dict(argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    if "backend" in chosen or "mode" in chosen:
        return _is_real(chosen.get("backend", "")) or _is_real(chosen.get("mode", ""))
    names = re.findall(r"\w+", chosen.get("experiment", ""))
    homes = [CONF, *map(Path, folders)]
    with suppress(OSError, ValueError):  # the command itself reports what cannot be read later
        homes += places() if names else ()
    for home, name in product(homes, names):
        with suppress(OSError, ValueError):
            if any(map(_is_real, _CHOICE.findall(read_text(home / "experiment" / f"{name}.yaml")))):
                return True
    return False


def _is_real(choice: str) -> bool:
    return not REAL_TIME.isdisjoint(re.findall(r"\w+", choice))
