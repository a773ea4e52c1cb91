"""RoundPipe: the released planner's stages dealt in rotation, call after call, as the simulator times them.

A step is `num_calls` calls of `num_microbatches` each. Asynchronous steps follow each other without a barrier: the
step takes the interval between calls once the pipeline is warm, or the time of the host's optimizer if that is
longer. A synchronous step fills and drains, and the optimizer stands behind it.

    upload    a visit takes at least as long as the transfers that run beside it: weights (and gradients, when
              they accumulate) of the next stage up, gradients down, boundary tensors both ways, at the rate of
              the link or of a device's share of the host's memory
    experts   one interpreter runs the loop over experts of all devices, forward and recomputation; its time is
              neither divided among them nor hidden

Source: arXiv 2604.27085; planner, dispatch and transfers as in its released library.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from rpbench import registry
from rpbench.cost.analytic import analytic_times
from rpbench.cost.basis import Basis
from rpbench.cost.model import BYTES_PER_VALUE, Model
from rpbench.cost.operators import boundary_bytes
from rpbench.cost.sizes import model_bytes
from rpbench.cost.table import CostTable, LayerTimes, Work
from rpbench.ir.action import Kind
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Shape
from rpbench.plan.greedy import MEMORY_SHARE, plan_released
from rpbench.predict.case import Case, Terms
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import step_ends

# Calls simulated back to back before those that are timed.
WARM_CALLS = 2


def asynchronous_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step whose optimizer runs on the host beside the next step."""
    plan = planned(case)
    graph = _graph(plan, case.num_devices, case.settings.chunks.num, WARM_CALLS + case.timed_calls, True)
    pipeline = case.settings.num_calls * _interval(graph, _costs(case, basis, plan), case.timed_calls)
    experts = expert_loop_s(case, basis)
    waiting = max(0.0, optimizer_s(case, basis) - pipeline - experts)
    return {"pipeline": pipeline, "expert loop": experts, "waiting for the optimizer": waiting}


def synchronous_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step that ends with the optimizer."""
    plan = planned(case)
    num = case.settings.chunks.num
    graph = _graph(plan, case.num_devices, num * case.settings.num_calls, 1, False, num)
    timeline = simulate_graph(graph, _costs(case, basis, plan))
    return {
        "pipeline": float(max(timeline.end)),
        "expert loop": expert_loop_s(case, basis),
        "optimizer": optimizer_s(case, basis),
    }


def planned(case: Case) -> Partition:
    """The released planner's partition for a case, from the declared constants."""
    times = analytic_times(case.model, case.chunk_tokens, case.basis)
    memory = case.basis.get("device_memory_bytes", float("inf"))
    # The planner reads gibibytes as gigabytes.
    limit = None if memory == float("inf") else int(MEMORY_SHARE * memory / 2**30 * 1e9)
    sizes = model_bytes(case.model, max(1, round(case.chunk_tokens)))
    return plan_released(times, case.num_devices, sizes=sizes, memory_limit_bytes=limit)


def expert_loop_s(case: Case, basis: Basis) -> float:
    """Seconds the interpreter loops over experts in one step; 0 without experts."""
    if case.model.experts_total == 1:
        return 0.0
    passes = 2 * case.model.experts_total * case.model.num_layers  # forward and recomputation
    return basis["expert_pass_s"] * passes * case.settings.chunks.num * case.settings.num_calls


def optimizer_s(case: Case, basis: Basis) -> float:
    """Seconds the host takes for one optimizer step: gradients to fp32, Adam, weights back to 16 bits."""
    if "host_bytes_per_s" not in basis.values:
        return 0.0
    return basis["optimizer_bytes"] * case.model.trainable_parameters / basis["host_bytes_per_s"]


# --- the simulated pipeline ----------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _graph(
    plan: Partition,
    num_devices: int,
    num_microbatches: int,
    num_steps: int,
    asynchronous: bool,
    call: int | None = None,
) -> Graph:
    shape = Shape(num_devices, len(plan.forward), num_microbatches, len(plan.backward), num_steps=num_steps, fused=True)
    schedule = registry.entry("roundpipe").build(shape, round_size=call or num_microbatches, asynchronous=asynchronous)
    graph = build_graph(schedule.with_partition(plan))
    return _with_short_ones(graph, call or num_microbatches)


def _with_short_ones(graph: Graph, num_microbatches: int) -> Graph:
    """The last microbatch of every call, which is shorter, has costs of its own: see `_costs`."""
    index = graph.columns.index[graph.order]
    short = (index >= 0) & (index % num_microbatches == num_microbatches - 1)
    known = [what for members in graph.slots for what in members]
    stages = {kind: max(stage for other, stage in known if other is kind) + 1 for kind, _ in known}
    others = tuple(tuple((kind, stage + stages[kind]) for kind, stage in members) for members in graph.slots)
    slot = (graph.slot + len(graph.slots) * short).astype(graph.slot.dtype)
    return replace(graph, slot=slot, slots=graph.slots + others)


def _interval(graph: Graph, costs: CostTable, num_calls: int) -> float:
    ends = step_ends(graph, simulate_graph(graph, costs))
    return float(ends[-1] - ends[-1 - num_calls]) / num_calls


def _costs(case: Case, basis: Basis, plan: Partition) -> CostTable:
    """Times of every stage for a whole microbatch, and behind them for the last one of a call."""
    chunks, tokens = case.settings.chunks, case.model.seq_len
    whole = paced(analytic_times(case.model, chunks.size * tokens, basis), plan, case, basis)
    last = analytic_times(case.model, chunks.last * tokens, basis).table(plan, recompute_ahead=True)
    work = {kind: whole.work[kind] + last.work[kind] for kind in (Kind.F, Kind.B, Kind.FB)}
    return replace(whole, work=work)


def paced(times: LayerTimes, plan: Partition, case: Case, basis: Basis) -> CostTable:
    """Times of every stage, none shorter than the transfers that run beside it."""
    table = times.table(plan, recompute_ahead=True)
    rate = link_share(case, basis)
    if rate == float("inf"):
        return table
    model, num = case.model, case.settings.chunks.num
    boundary = num * boundary_bytes(model, case.chunk_tokens)
    again = case.settings.num_calls > 1  # gradients are brought back to accumulate further
    work = dict(table.work)
    forward = [weights + boundary for weights in weights_of(model, plan.forward, backward=False)]
    work[Kind.F] = _stretched(table.work[Kind.F], forward, rate, num)
    weights = weights_of(model, plan.backward, backward=True)
    gradients = weights_of(model, plan.backward, backward=True, trained=True)
    backward = [
        max(up + gradient * again + 2 * boundary, gradient + boundary)
        for up, gradient in zip(weights, gradients, strict=True)
    ]
    for kind in (Kind.B, Kind.FB):
        work[kind] = _stretched(table.work[kind], backward, rate, num)
    return CostTable(work, table.hop, table.recompute_ahead, table.fused_ahead, table.units_per_second)


def link_share(case: Case, basis: Basis) -> float:
    """Bytes per second, one way, that a device gets of its link while all others copy as well."""
    host = basis.get("host_bytes_per_s", float("inf")) / case.num_devices
    return min(basis.get("copy_bytes_per_s", float("inf")), host)


def weights_of(model: Model, counts: Sequence[int], *, backward: bool, trained: bool = False) -> list[float]:
    """16-bit bytes of every stage's weights, ends of the model included.

    Args:
        counts: layers of each stage.
        backward: whether the last stage holds the head.
        trained: only what gets a gradient.
    """
    frozen = model.lora_rank is not None
    layer = model.trainable_layer_parameters if trained else model.layer_parameters
    if frozen and not trained:
        layer += model.trainable_layer_parameters
    parameters = [count * layer for count in counts]
    if not (trained and frozen):
        parameters[0] += model.embedding_parameters
        parameters[-1] += model.head_parameters * backward
    return [float(BYTES_PER_VALUE * each) for each in parameters]


def _stretched(works: Sequence[Work], moved: Sequence[float], rate: float, num: int) -> tuple[Work, ...]:
    paced_works = []
    for work, size in zip(works, moved, strict=True):
        lacking = size / rate / num - work.pre - work.main
        paced_works.append(work._replace(main=work.main + max(0.0, lacking)))
    return tuple(paced_works)
