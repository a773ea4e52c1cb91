"""Randomness: random numbers that depend on the module and the microbatch, not on who draws them when.

All threads share torch's generator of a device, so that what a layer draws from it depends on timing. Within `seeded`,
all random numbers come from a generator of its own. A recomputation with the same module and microbatch draws the same
numbers again, on any device and under any schedule.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rpbench.engine.workload import Workload

_TAKES_GENERATOR = frozenset(
    {
        torch.rand,
        torch.randn,
        torch.randint,
        torch.randperm,
        torch.normal,
        torch.bernoulli,
        torch.multinomial,
        torch.Tensor.bernoulli_,
        torch.Tensor.bernoulli,
        torch.Tensor.exponential_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
    }
)


def seeded(seed: int, module: int, microbatch: int, part: int = 0) -> "_Seeded":
    """A context whose random numbers depend on these alone; `part` is a segment of the microbatch's sequences."""
    names = f"{seed} {module} {microbatch}" + (f" {part}" if part else "")
    digest = hashlib.blake2b(names.encode(), digest_size=8).digest()
    return _Seeded(int.from_bytes(digest, "big") >> 1)


def drawing(workload: Workload, module: int, microbatch: int, part: int = 0) -> AbstractContextManager[object]:
    """The context in which a module runs a segment of a microbatch."""
    if not workload.draws_random:
        return nullcontext()
    return seeded(workload.seed, module, workload.absolute(microbatch), part)


class _Seeded(TorchFunctionMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is functional.dropout:
            return self._dropout(*args, **given)
        if func is functional.scaled_dot_product_attention and given.get("dropout_p"):
            raise ValueError(
                f"dropout_p={given['dropout_p']}: dropout inside the attention kernel draws numbers that cannot be "
                "drawn again; apply it to the output of the attention"
            )
        if func in _TAKES_GENERATOR and given.get("generator") is None:
            tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
            device = torch.device(given.get("device") or "cpu") if tensor is None else tensor.device
            given["generator"] = self._generator(device)
        return func(*args, **given)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        mask = torch.empty_like(input, requires_grad=False).bernoulli_(1 - p, generator=self._generator(input.device))
        mask.div_(1 - p) if p < 1 else mask.zero_()
        return input.mul_(mask) if inplace else input * mask

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]
