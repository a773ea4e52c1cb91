"""Tensors that depend on sizes alone: made once, kept, and read by every thread and every stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch

_made: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # storage address -> a constant that is in use


@contextmanager
def constant(device: torch.device) -> Iterator[None]:
    """Make tensors here that any later forward may read, on whatever stream, with or without gradients.

    Outside inference mode, because autograd refuses to save an inference tensor; and finished before the block
    ends, because a reader on another stream would not wait for the stream they were made on.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
    if device.type not in ("cpu", "meta"):
        torch.accelerator.current_stream(device).synchronize()


def noted(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, registered as a constant as long as it exists."""
    _made[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a constant or a view of one."""
    return tensor.untyped_storage().data_ptr() in _made


def constants() -> list[torch.Tensor]:
    """All constants that still exist."""
    return list(_made.values())
