"""Provenance of a number: code, versions, machine."""

import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def boot() -> str:
    """The id of the machine's boot; empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def began(pid: int) -> str:
    """When a process started, in ticks since the boot; empty if there is none, or it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else rest[18]
    except OSError:
        return "unknown" if _lives(pid) else ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        pass
    return True


ROOT = Path(__file__).parents[2]
CALIBRATED = b"# python -m rpbench calibrate"  # the beginning of a cluster file that was measured on a machine

_CODE = ("rpbench/**/*.py", "rpbench/**/*.yaml", "baselines/**/*.py", "analysis/published/*.csv")
_PACKAGES = ("rpbench", "numpy", "numba", "torch", "hydra-core", "omegaconf")
_NUMERIC = ("python", "numpy", "numba", "torch")  # whose arithmetic and compilers every number depends on
# Variables that change the results of torch and numpy ...
_ARITHMETIC = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "NUMBA_DISABLE_JIT",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
# ... and those that change their speed.
_PACE = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@cache
def code_version() -> str:
    """Hash of every source file that a run depends on."""
    return _digest_of(path for pattern in _CODE for path in ROOT.glob(pattern))


@cache
def conf_version() -> str:
    """Hash of every file of `conf/`, without clusters that `calibrate` wrote."""
    return _digest_of(path for path in ROOT.glob("conf/**/*.yaml") if not path.read_bytes().startswith(CALIBRATED))


@cache
def calibrated_version() -> str:
    """Hash of the clusters that `calibrate` wrote, which `conf_version` leaves out."""
    return _digest_of(path for path in ROOT.glob("conf/**/*.yaml") if path.read_bytes().startswith(CALIBRATED))


def _digest_of(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def git_commit() -> str | None:
    """The commit of the working tree, with `+` if files have changed since; None outside a repository."""
    try:
        if not (ROOT / ".git").exists():  # installed: a repository around it is not this project's
            return None
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of installed packages that can change a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def surroundings(*, measured: bool) -> dict[str, Any]:
    """Versions and variables that can change a result; for measurements the machine too."""
    variables = (*_ARITHMETIC, *(_PACE if measured else ()))
    found: dict[str, Any] = {
        "versions": {name: version for name, version in versions().items() if name in _NUMERIC},
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
    }
    return found | ({"hardware": hardware(), "usable_cores": usable_cores()} if measured else {})


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def hardware() -> dict[str, str | int]:
    """This machine, without anything that names a person or a host."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": _memory_bytes(),
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


@cache
def host_word() -> str:
    """A digest of this host's name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
