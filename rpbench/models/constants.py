"""Tensors that depend on sizes alone: made once, kept, and read by every thread and every stream."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def constant(device: torch.device) -> Iterator[None]:
    """Make tensors here that any later forward may read, on whatever stream, with or without gradients.

    Outside inference mode, because autograd refuses to save an inference tensor; and finished before the block
    ends, because a reader on another CUDA stream would not wait for the stream they were made on.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
