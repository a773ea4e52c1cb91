"""Requirement: what an optional system needs, and how to say that it is not there."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

LEAST = {"deepspeed": "0.19", "roundpipe": "0.1.1"}  # versions that the adapters were written for


def why_missing(package: str, *, needs_cuda: bool = False) -> str | None:
    """Why a package cannot be used on this machine; None if it can."""
    if find_spec(package) is None:
        return f"{package} is not installed: pip install '{package}>={LEAST[package]}'"
    if needs_cuda and not torch.cuda.is_available():
        return f"{package} needs a CUDA device, and torch sees none"
    return None


def require(package: str, *, needs_cuda: bool = False) -> ModuleType:
    """The package.

    Raises:
        ValueError: if it cannot be used here.
    """
    reason = why_missing(package, needs_cuda=needs_cuda)
    if reason is not None:
        raise ValueError(f"system={package}: {reason}")
    return import_module(package)
