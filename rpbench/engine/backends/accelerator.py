"""The accelerator of this machine: its kind and name, its errors, and all that is special to one kind.

Everything else in the engine uses `torch.accelerator`, `torch.Stream` and `torch.Event`, and asks for no kind.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def kind() -> str:
    """torch's name of the accelerator: cuda (ROCm as well), xpu, npu, ...; RuntimeError where there is none."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        raise RuntimeError("torch finds no accelerator on this machine")
    return found.type


def place(number: int) -> torch.device:
    return torch.device(kind(), number)


def name(number: int) -> str:
    """The name its maker gave it; its place where torch does not know."""
    module = getattr(torch, kind(), None)
    ask = getattr(module, "get_device_name", None)
    return str(place(number)) if ask is None else str(ask(number))


_OF_LIBRARIES = (
    *("CUDA error", "CUBLAS_STATUS", "cuDNN error", "HIP error", "HIPBLAS_STATUS", "MIOpen"),
    *("UR_RESULT_ERROR", "level_zero", "NPU error", "ACL error"),
)


def is_its_error(error: BaseException) -> bool:
    """Whether an accelerator has no memory, is lost, or its driver or a library of its maker has an error.

    torch has types for the first three; errors of libraries are recognised by their text.
    """
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_LIBRARIES)


def workspace_bytes(number: int) -> int:
    """Free the libraries' workspaces, one for each stream, of an accelerator where nothing runs; their bytes."""
    before = torch.accelerator.memory_allocated(number)
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a build for the processor has none
    if kind() == "cuda" and forget is not None:  # of cuBLAS or hipBLAS: up to 32 MiB for each thread and stream
        forget()
    return int(before - torch.accelerator.memory_allocated(number))


def choose_kernels(*, repeatable: bool) -> None:
    """Ask torch for full float32 products, and if `repeatable` for kernels that give the same bits every time.

    Other kernels are refused: with a warning alone, torch takes a faster backward of attention. Allocated memory is not
    filled first, which torch would do in both cases.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of a module
    torch.use_deterministic_algorithms(repeatable)
    match kind():
        case "cuda":  # NVIDIA, and AMD under ROCm
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first handle is made
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
        case "xpu":  # Intel
            torch.backends.mkldnn.allow_tf32 = False  # type: ignore[assignment]  # a property of a module
        case "npu":  # Ascend
            for part in ("matmul", "conv"):
                own = getattr(torch.npu, part, None)  # type: ignore[attr-defined]  # torch_npu brings it
                if own is not None:
                    own.allow_hf32 = False


@contextmanager
def summed_in_16_bits(allowed: bool) -> Iterator[None]:
    """Inside, products in fp16 may or may not be summed in fp16, where the accelerator can."""
    here, own = torch.accelerator.current_accelerator(), torch.backends.cuda.matmul
    if here is None or here.type != "cuda":
        yield
        return
    before, own.allow_fp16_accumulation = own.allow_fp16_accumulation, allowed
    try:
        yield
    finally:
        own.allow_fp16_accumulation = before
