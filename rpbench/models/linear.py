"""Linear maps, single or one per expert, with an optional low-rank adapter beside the weight; rows grouped by expert.

A token visits k experts, so T tokens make T * k rows. They are sorted by expert and written into a buffer in which
every expert owns a block. Two layouts of that buffer give the same results:

    ragged   block e as long as its rows need (a multiple of 8), for a grouped matrix product
    padded   every block as long as that of the fullest expert, for a batched matrix product

Every row has its own place, so forward and backward copy rows and never add to shared ones: gradients do not depend on
the order of threads.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

ALIGNMENT = 8  # rows: grouped kernels want blocks to start at 16 bytes, in a 16-bit type


class Layout(ABC):
    """The place of each of the T * k rows in a buffer of `num_rows` rows, grouped by expert."""

    def __init__(self, chosen: torch.Tensor, num_experts: int) -> None:
        """Place the rows of `chosen`, (T, k): the experts of each token."""
        self.num_experts = num_experts
        self.chosen_per_token = chosen.shape[1]
        flat = chosen.flatten()
        ordered, order = flat.sort(stable=True)
        experts = torch.arange(num_experts + 1, device=flat.device)
        begins = torch.searchsorted(ordered, experts)  # (E + 1,)
        self.starts, self.num_rows = self._blocks(begins.diff(), len(flat))
        rank = torch.arange(len(flat), device=flat.device) - begins[ordered]
        self.places = torch.empty_like(flat).index_copy_(0, order, self.starts[ordered] + rank)  # (T * k,)

    @abstractmethod
    def _blocks(self, counts: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, int]:
        """First row of every expert's block, (E,), and the number of rows, from the number of rows of each expert."""

    @abstractmethod
    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """rows (R, I) -> (R, O): block e times weight[e].T, where `weight` is (E, O, I)."""

    @abstractmethod
    def spread(self, bias: torch.Tensor) -> torch.Tensor:
        """bias (E, O) -> (R, O): each row is its expert's bias."""

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, H) -> (R, H): every token once for each of its experts, zeros in unused rows."""
        copies = x.unsqueeze(1).expand(-1, self.chosen_per_token, -1).reshape(-1, x.shape[1])
        return x.new_zeros(self.num_rows, x.shape[1]).index_copy(0, self.places, copies)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (R, H) -> (T, k, H): the outputs of each token's experts, in the order chosen."""
        return rows.index_select(0, self.places).unflatten(0, (-1, self.chosen_per_token))


class Ragged(Layout):
    """Blocks of just enough rows; the buffer's size does not depend on the routing, so the host never waits."""

    def _blocks(self, counts: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, int]:
        # At least one aligned piece each: grouped kernels leave the gradient of an empty expert unset.
        lengths = (counts.clamp(min=1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        num_rows = (num_chosen + self.num_experts * ALIGNMENT + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        ends = lengths.cumsum(0)
        self.ends = ends.index_fill(0, torch.tensor([self.num_experts - 1], device=ends.device), num_rows)
        self.ends = self.ends.to(torch.int32)  # the last block takes the slack, so that every row is computed
        return ends - lengths, num_rows

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=self.ends)

    def spread(self, bias: torch.Tensor) -> torch.Tensor:
        experts = torch.bucketize(torch.arange(self.num_rows, device=bias.device), self.ends, right=True)
        # A product, because the gradient of an indexed read adds rows in no fixed order.
        return torch.nn.functional.one_hot(experts, self.num_experts).to(bias.dtype) @ bias


class Padded(Layout):
    """Blocks of one length, which the host reads back from the device."""

    def _blocks(self, counts: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, int]:
        self.length = max(int(counts.max()), 1)
        starts = torch.arange(self.num_experts, device=counts.device) * self.length
        return starts, self.num_experts * self.length

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        blocks = rows.unflatten(0, (self.num_experts, self.length))
        return torch.bmm(blocks, weight.transpose(1, 2)).flatten(0, 1)

    def spread(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.unsqueeze(1).expand(-1, self.length, -1).flatten(0, 1)


def group(chosen: torch.Tensor, num_experts: int, widths: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """The layout for rows of `dtype` and linear maps between `widths`: ragged where a grouped product exists."""
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    layout = Ragged if aligned and has_grouped_product(chosen.device, dtype) else Padded
    return layout(chosen, num_experts)


@lru_cache(maxsize=64)
def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product on this device in this type; it is tried once."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            rows = torch.zeros(16, 16, dtype=dtype, device=device, requires_grad=True)
            weight = torch.zeros(2, 16, 16, dtype=dtype, device=device, requires_grad=True)
            ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
            product = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
            torch.autograd.grad(product, (rows, weight), torch.zeros_like(product))
    except RuntimeError:  # also from a kind of device without such a kernel
        return False
    return True


LORA_ALPHA = 16.0  # an adapter's output is multiplied by alpha / rank; as in the published benchmark

Make = Callable[..., torch.Tensor]


class _Making(threading.local):
    by: Make | None = None  # computes the linear maps of the calling thread; None for torch's


_making = _Making()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., inputs) -> x @ weight.T + bias, (..., outputs), computed by the function given to `made_by`, if any."""
    weights = (weight,) if bias is None else (weight, bias)
    return functional.linear(x, *weights) if _making.by is None else _making.by(x, *weights)


@contextmanager
def made_by(make: Make) -> Iterator[None]:
    """Inside, `make(x, weight)` or `make(x, weight, bias)` computes the linear maps of the calling thread."""
    before, _making.by = _making.by, make
    try:
        yield
    finally:
        _making.by = before


class Adapter(nn.Module):
    """Two thin matrices whose product is added to a frozen weight (Hu et al., "LoRA", ICLR'22, section 4.1)."""

    def __init__(self, inputs: int, outputs: int, rank: int, experts: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = LORA_ALPHA / rank
        self.lora_a = nn.Parameter(torch.empty(*experts, rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(*experts, outputs, rank))


class Linear(nn.Module):
    """x (..., inputs) -> x @ weight.T + bias, (..., outputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapter: Adapter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight, self.bias)
        if self.adapter is None:
            return y
        thin = linear(x, self.adapter.lora_a)
        return y + self.adapter.scale * linear(thin, self.adapter.lora_b)


class ExpertLinear(nn.Module):
    """One linear map per expert, applied to rows that a `Layout` has grouped by expert."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, outputs)) if bias else None
        self.adapter: Adapter | None = None

    def forward(self, rows: torch.Tensor, layout: Layout) -> torch.Tensor:
        y = layout.linear(rows, self.weight)
        if self.bias is not None:
            y = y + layout.spread(self.bias)
        if self.adapter is None:
            return y
        thin = layout.linear(rows, self.adapter.lora_a)
        return y + self.adapter.scale * layout.linear(thin, self.adapter.lora_b)


def add_adapters(layer: nn.Module, rank: int) -> nn.Module:
    """The same layer, frozen, with a trainable adapter of rank `rank` beside each linear map; its values are unset."""
    layer.requires_grad_(False)
    for module in list(layer.modules()):
        if isinstance(module, Linear | ExpertLinear):
            *experts, outputs, inputs = module.weight.shape
            with module.weight.device:
                module.adapter = Adapter(inputs, outputs, rank, tuple(experts)).to(module.weight.dtype)
    return layer
