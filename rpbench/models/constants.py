"""Tensors that depend on sizes only: made once, cached, and read by every thread and stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch

_made: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # storage address -> constant


@contextmanager
def constant(device: torch.device) -> Iterator[None]:
    """Make tensors inside that any later forward may read, on any stream, with or without gradients.

    Inference mode is off, because autograd refuses to save an inference tensor. The tensors are finished when the block
    ends, because a reader on another stream would not wait for them.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
    if device.type not in ("cpu", "meta"):
        torch.accelerator.current_stream(device).synchronize()


def noted(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, registered as a constant while it exists."""
    _made[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a constant or a view of one."""
    return tensor.untyped_storage().data_ptr() in _made


def constants() -> list[torch.Tensor]:
    """All constants that still exist."""
    return list(_made.values())
