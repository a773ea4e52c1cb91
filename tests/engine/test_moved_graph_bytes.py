"""Whole activations that move: their bytes by hand, those the simulator charges, and what devices hold meanwhile."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from spared import slow
from torch import nn
from training_cases import TINY, uneven_costs, workload_of

from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.transfers import moved_bytes
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.state.device_memory import OutOfDeviceMemory
from rpbench.engine.training import Settings, Training
from rpbench.engine.workload import Workload
from rpbench.ir.analysis import Analysis, peak_resident
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.models.data import Batch
from rpbench.models.linear import Linear
from rpbench.registry import entry

B, S, H, I = 2, 3, 4, 10  # sequences, tokens, widths outside and inside  # noqa: E741
F64 = 8  # bytes
LAYER = F64 * B * S * (H + I)  # its input, and what the second matrix reads, which is also what relu keeps of itself
TOKENS = 8 * B * S  # what the embedding keeps


class Rows(nn.Module):
    """Tokens -> rows of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, H, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


class TwoMatrices(nn.Module):
    """x -> relu(x up) down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(H, I).double(), Linear(I, H).double()
        for part in (self.up, self.down):
            nn.init.normal_(part.weight, std=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Total(nn.Module):
    """x, labels -> a number that depends on all of x; it keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return x.sum() + self.weight


class Tokens:
    """Microbatches of their own memory."""

    def microbatch(self, step: int, microbatch: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + microbatch)
        return Batch(*(torch.randint(5, (B, S), generator=generator) for _ in range(2)))


def complete(name: str, p: int, m: int, v: int = 1, **options) -> Schedule:
    return entry(name).build(Shape(p, p * v, m), **options).with_partition(symmetric((1,) * (p * v)))


def mlp(schedule: Schedule) -> Workload:
    torch.manual_seed(3)
    layers = [TwoMatrices() for _ in range(schedule.shape.num_stages)]
    return Workload([Rows(), *layers, Total()], Tokens(), schedule.shape.num_microbatches)


def run(schedule: Schedule, workload: Workload, limit: int | None = None) -> Training:
    training = Training(workload, schedule, Settings(recompute="none", device_memory_bytes=limit))
    costs = uneven_costs(schedule)
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return training


# --- bytes -----------------------------------------------------------------------------------------------------


def test_the_bytes_of_bpipe_are_those_counted_by_hand():
    """6 ranks: K = 4. Rank 0 has 6 in flight and keeps 2 of every 6, rank 1 has 5 and keeps 2 of every 5."""
    schedule = complete("bpipe", 6, 12)
    moves = {0: 8 * (LAYER + TOKENS), 1: 6 * LAYER}  # 2-5 and 8-11; 2-4 and 7-9
    found = run(schedule, mlp(schedule)).traffic.moved_bytes
    assert found == {(device, lane): size for device, size in moves.items() for lane in ("d2h", "h2d")}


def test_the_bytes_of_pipe_offload_are_those_counted_by_hand():
    """All of 2 ranks, 1 stage each: as the module's drawing has it, microbatches 1 and 2 of the first rank move."""
    schedule = complete("pipe_offload", 2, 4, least_gap=2)
    found = run(schedule, mlp(schedule)).traffic.moved_bytes
    assert found == {(0, lane): 2 * (LAYER + TOKENS) for lane in ("d2h", "h2d")}


def saved_by(workload: Workload, modules: range) -> int:
    """Bytes that autograd saves of a microbatch in some modules, in a plain run: what a second one adds to the first.

    What both have in common, weights and constants, cancels.
    """
    totals, held, storages = [], [], {}

    def pack(tensor):
        held.append(tensor.detach())
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for microbatch in range(2):
        tokens, labels = workload.batch(microbatch)
        x, graphs = tokens, []
        for module in range(modules.stop):
            if module == modules.start and module:
                x = x.detach().requires_grad_()
            layer = workload.modules[module]
            inputs = (x, labels) if module == workload.head else (x,)
            if module in modules:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
                    x = layer(*inputs)
            else:
                x = layer(*inputs)
        graphs.append(x)
        held.append(x)
        totals.append(sum(storages.values()))
    return totals[1] - totals[0]


def of_gpt(name: str, p: int, m: int, v: int = 1, **options) -> Schedule:
    layers = 2 * p * v
    return entry(name).build(Shape(p, p * v, m), **options).with_partition(symmetric(split_evenly(layers, p * v)))


def num_stored(schedule: Schedule, device: int) -> Counter[int]:
    """Stage -> how often a device stores its activations."""
    return Counter(action.stage for action in schedule.lanes[device].get("d2h", ()) if action.kind.name == "STORE")


@pytest.mark.parametrize(
    "name, p, m, v, dtype",
    [
        ("bpipe", 4, 6, 1, torch.float64),
        ("pipe_offload", 2, 4, 2, torch.bfloat16),
        slow(("bpipe", 6, 7, 1, torch.bfloat16)),
    ],
)
def test_the_bytes_are_those_that_a_run_of_one_process_saves(name, p, m, v, dtype):
    schedule = of_gpt(name, p, m, v)
    workload = workload_of(schedule, TINY, dtype)
    training = run(schedule, workload)
    sizes = [saved_by(workload, modules) for modules in training.layout.forward]
    for device in range(p):
        expected = sum(number * sizes[stage] for stage, number in num_stored(schedule, device).items())
        for lane in ("d2h", "h2d"):
            assert training.traffic.moved_bytes[device, lane] == expected
    assert training.traffic.moved_bytes


def test_the_simulator_charges_a_formula_where_the_engine_counts_what_is_saved():
    """As many transfers of the same stages. For a token of a layer in bfloat16 the formula has 16 bits each of

        4H + 2Q + 2KV + 3I     inputs of norms and blocks; queries, keys, values and their mixture; gate, up, product

    and autograd saves more: inputs and outputs of both norms in 32 bits, and their scale, in place of two inputs in 16
    bits; the activated gate; a number a head for the softmax.
    """
    schedule = of_gpt("bpipe", 6, 7)
    workload = workload_of(schedule, TINY, torch.bfloat16)
    moved = run(schedule, workload).traffic.moved_bytes
    tokens, sizes = 2 * TINY.seq_len, model_bytes(replace(TINY, num_layers=12), 2 * TINY.seq_len)
    charged = moved_bytes(schedule, replace(sizes, keeps_activations=True))
    formula = 2 * tokens * (8 * TINY.hidden + 3 * TINY.inner)  # one layer; heads are as wide as it is
    saved = formula + tokens * (2 * (8 * TINY.hidden + 4) - 4 * TINY.hidden + 2 * TINY.inner + 4 * TINY.heads)
    for device, num_moves, beside in ((0, 4, 8 * tokens), (1, 3, 0)):  # 2-5; 2-4; indices of the embedding
        for lane, what in (("d2h", "STORE:A"), ("h2d", "LOAD:A")):
            assert charged[device][f"{lane} {what}"] == num_moves * 2 * formula
            assert moved[device, lane] == num_moves * (2 * saved + beside)


# --- memory ----------------------------------------------------------------------------------------------------


def weights_on(training: Training, device: int) -> int:
    return sum(training._bytes.staying()[device].values())


def most_held(name: str, p: int, m: int, v: int = 1, **options) -> tuple[float, ...]:
    """The most activations of a layer that each device holds at a time."""
    schedule = complete(name, p, m, v, **options)
    training = run(schedule, mlp(schedule), limit=10**9)
    return tuple((training.memory.peak_bytes[device] - weights_on(training, device)) / LAYER for device in range(p))


def test_no_device_of_bpipe_holds_more_than_its_paper_says():
    """8 ranks: ceil((8 + 2)/2) = 5 microbatches, the partner's among them, where the first rank of 1F1B has 8."""
    found = most_held("bpipe", 8, 16)
    with_tokens = 1 + TOKENS / LAYER
    assert found[0] == pytest.approx(5 * with_tokens)
    assert max(found) <= 5 * with_tokens
    assert found[7] > 3  # its own, and those of the first rank


@pytest.mark.parametrize("share, most", [(0.5, 11), slow((1.0, 3))])
@pytest.mark.slow
def test_devices_of_pipe_offload_hold_what_its_page_says(share, most):
    """8 ranks, 16 stages, 32 microbatches: of 23 chunks on the first device 11 with half on the host, 3 with all."""
    found = most_held("pipe_offload", 8, 32, 2, share=share)
    assert most <= found[0] <= most * (1 + TOKENS / LAYER)


@pytest.mark.parametrize(
    "name, plain, p, m, v, fits, needs",
    [("bpipe", "1f1b", 6, 12, 1, 4, 6), ("pipe_offload", "interleaved_1f1b", 4, 8, 2, 4, 11)],
)
def test_a_cap_that_holds_because_activations_leave(name, plain, p, m, v, fits, needs):
    """What moves fits under a cap for `fits` activations; what stays needs 3p - 1 or p of them on its first device."""
    schedule, stays = complete(name, p, m, v), complete(plain, p, m, v)
    training = Training(mlp(schedule), schedule, Settings(recompute="none"))
    weights = max(weights_on(training, device) for device in range(p))
    cap = weights + fits * (LAYER + TOKENS)
    assert max(peak_resident(Analysis(schedule))) == fits  # by a replay of the order
    assert needs * LAYER > fits * (LAYER + TOKENS)
    run(schedule, mlp(schedule), limit=cap)
    with pytest.raises(ActionFailed, match="OutOfDeviceMemory: device 0 holds") as seen:
        run(stays, mlp(stays), limit=cap)
    assert isinstance(seen.value.__cause__, OutOfDeviceMemory)
