"""Where a number comes from: code, versions, machine."""

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]

_CODE = ("rpbench/**/*.py", "baselines/**/*.py", "analysis/published/*.csv")
_PACKAGES = ("rpbench", "numpy", "numba", "torch", "hydra-core", "omegaconf")


@cache
def code_version() -> str:
    """Hash of every source file a run depends on; it changes with the code, not with commits of prose."""
    digest = hashlib.sha256()
    for pattern in _CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.relative_to(ROOT).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def git_commit() -> str | None:
    """The commit of the working tree, with `+` when it has been changed since; None outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


@cache
def versions() -> dict[str, str]:
    """Python and the packages that can change a result; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def hardware() -> dict[str, str | int]:
    """The machine a record was made on, without anything that names a person or a host."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": _memory_bytes(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def now() -> str:
    """The present moment, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def digest(path: Path) -> str | None:
    """SHA-256 of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
