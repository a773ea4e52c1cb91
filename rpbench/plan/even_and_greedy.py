"""Partitions by a rule, without a search: even, and greedy.

    even      as many layers in every stage, give or take one
    greedy    the released RoundPipe planner, and its counterpart for stages that are bound to devices

Both greedy planners fill stages up to a time budget. The released one takes any number of stages and compares budgets;
a bound schedule has a given number of stages and takes the smallest budget that allows it.

Source: planner of the released RoundPipe library (arXiv 2604.27085), from a description of what it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.cost.table import LayerTimes, Number
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.plan.problem import Problem


def plan_even(problem: Problem) -> Partition:
    """Stages with equal numbers of layers.

    If stages are bound to devices, each device holds `default_chunks` stages, or fewer if that number was not asked for
    and some would be empty. If the directions are cut apart, the head is a stage of its own, every device gets
    `default_chunks` backward stages, and the number of forward stages makes them about as long as backward stages. If a
    partition is published and no number of chunks was asked for, the numbers of stages are the published ones. Raises
    ValueError if there are fewer layers than stages bound to devices.
    """
    layers, published = problem.num_layers, problem.published
    if not problem.entry.separate_cuts:
        return symmetric(split_evenly(layers, num_bound_stages(problem, "even")))
    if published and published.fused and problem.chunks_per_rank is None:
        num_forward, num_backward = len(published.forward), len(published.backward) - 1
    else:
        num_backward = min(layers, problem.num_ranks * problem.default_chunks)
        backward = sum(problem.times.recompute) + sum(problem.times.backward)
        share = sum(problem.times.forward) / backward if backward > 0 else 1
        num_forward = max(1, min(layers, round(num_backward * share)))
    forward, backward_cut = split_evenly(layers, num_forward), split_evenly(layers, max(1, num_backward))
    return Partition(forward, (*backward_cut, 0), fused=True)


def num_bound_stages(problem: Problem, method: str) -> int:
    """The number of bound stages asked for, or at most one a layer; ValueError naming the method for too few layers."""
    layers, ranks, chunks = problem.num_layers, problem.num_ranks, problem.default_chunks
    if problem.options.get("replicas") and layers >= problem.num_bound_stages:
        return problem.num_bound_stages
    if problem.chunks_per_rank is None and problem.entry.chunks is None:
        chunks = max(1, min(chunks, layers // ranks))
    stages = ranks * chunks
    if layers < stages:
        written = "-".join("1" * layers + "0" * (stages - layers))
        raise ValueError(
            f"partition={method}: {layers} layers make no {stages} stages ({ranks} devices x {chunks}), some would be "
            f"empty; take fewer devices or chunks_per_device, or write the partition out, as in partition={written}"
        )
    return stages


UPPER_THRESHOLD = 1.1  # budgets range from the longest layer to this multiple of it
MEMORY_SHARE = 0.6  # fraction of a device's memory for the stage that runs and the stage that is prefetched, half each
# The planner's limit on an idle 24 GB card: 0.6 x 24, read as gigabytes though measured in gibibytes.
LIMIT_24GB_CARD_BYTES = 14_400_000_000
EMBEDDING_SHARE = 1e-6  # the embedding is a layer of its own and takes a time just above zero
TOLERANCE = 1e-12  # relative difference of equal budgets, which are sums of the same layers in another order


def plan_greedy(problem: Problem) -> Partition:
    """The partition of the released planner, or its counterpart for a bound schedule."""
    if not problem.entry.separate_cuts:
        totals, head, num_stages = layer_totals(problem.times), problem.head_time, problem.num_bound_stages
        return symmetric(fill_stages(totals, head, num_stages, problem.stage_speeds(num_stages)))
    memory = problem.memory
    limit = None if memory is None else int(MEMORY_SHARE * memory.limit_bytes)
    return plan_released(
        problem.times, problem.num_ranks, sizes=memory.sizes if memory else None, memory_limit_bytes=limit
    )


# --- stages bound to devices -------------------------------------------------------------------------------


def layer_totals(times: LayerTimes) -> list[Number]:
    """Time of each layer: forward, recomputation and backward."""
    return [sum(layer) for layer in zip(times.forward, times.recompute, times.backward, strict=True)]


def head_total(times: LayerTimes) -> Number:
    """Time of the head, both ways."""
    return times.head_forward + times.head_backward


def fill_stages(
    layers: Sequence[Number], head: Number, num_stages: int, speeds: Sequence[Number] = ()
) -> tuple[int, ...]:
    """Layers of each stage under the smallest budget that needs no more than `num_stages` stages.

    Stages are filled from the last, which holds the head, to the first, so the first gets the remainder. A stage also
    ends when just one layer is left for each stage left. Stages on fast devices take more within the budget.
    """
    speeds = speeds or (1,) * num_stages
    ends = [0, *accumulate(layers)]
    budgets = {ends[stop] - ends[start] for start in range(len(layers)) for stop in range(start + 1, len(layers) + 1)}
    budgets |= {head + ends[-1] - ends[start] for start in range(len(layers) + 1)}
    ordered = sorted({budget / speed if speed != 1 else budget for budget in budgets for speed in set(speeds)})
    low, high = 0, len(ordered) - 1  # the largest holds everything
    while low < high:
        middle = (low + high) // 2
        if _fill(layers, head, speeds, ordered[middle]) is None:
            low = middle + 1
        else:
            high = middle
    counts = _fill(layers, head, speeds, ordered[low])
    assert counts is not None
    return counts


def _fill(layers: Sequence[Number], head: Number, speeds: Sequence[Number], budget: Number) -> tuple[int, ...] | None:
    num_stages = len(speeds)
    rooms = [budget * speed * (1 + TOLERANCE) for speed in reversed(speeds)]  # from the last stage downwards
    counts, filled = [0], head
    if head > rooms[0]:
        return None
    for layer in range(len(layers) - 1, -1, -1):
        holds_something = counts[-1] > 0 or (len(counts) == 1 and head > 0)
        needed_below = holds_something and layer + 1 == num_stages - len(counts)
        if needed_below or filled + layers[layer] > rooms[len(counts) - 1]:
            if len(counts) == num_stages or layers[layer] > rooms[len(counts)]:
                return None
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += layers[layer]
    return (0,) * (num_stages - len(counts)) + tuple(reversed(counts))


# --- the released planner -----------------------------------------------------------------------------------


def plan_released(
    times: LayerTimes, num_ranks: int, *, sizes: ModelBytes | None = None, memory_limit_bytes: int | None = None
) -> Partition:
    """The partition of the released planner: least (number of stages, at least p) x (budget of a stage).

    It plans num_layers + 2 layers: embedding, decoder layers, head. Budgets are the sums of adjacent layers' forward or
    backward times between the longest layer and 1.1 times that. For each, the fused stage takes layers from the head
    downwards, forward stages are filled from the end and backward stages from the start. The embedding stays in a
    forward stage, as a partition needs one.

    Args:
        memory_limit_bytes: M, for the stage that runs and the stage that is prefetched; a stage takes at most M/2. If a
            layer needs more, M is twice that layer. None for no limit.
    """
    layers = _plannable_layers(times, sizes, memory_limit_bytes)
    longest = max(max(layers.forward), max(layers.backward))
    best: tuple[Number, Partition] | None = None
    for budget in _budgets(layers, longest):
        partition = _pack(layers, budget)
        cost = max(len(partition.forward) + len(partition.backward), num_ranks) * budget
        if best is None or cost < best[0]:
            best = cost, partition
    assert best is not None  # the longest layer itself is a budget
    return best[1]


@dataclass(frozen=True)
class _Layers:
    """Times and sizes of embedding, decoder layers and head, in model order."""

    forward: list[Number]
    backward: list[Number]  # recomputation included
    forward_bytes: list[int]
    backward_bytes: list[int]
    cap_bytes: float


def _plannable_layers(times: LayerTimes, sizes: ModelBytes | None, limit_bytes: int | None) -> _Layers:
    backward = [again + back for again, back in zip(times.recompute, times.backward, strict=True)]
    embedding = EMBEDDING_SHARE * min((time for time in (*times.forward, *backward) if time > 0), default=0)
    num = times.num_layers + 2
    forward_bytes, backward_bytes, cap = [0] * num, [0] * num, float("inf")
    if sizes is not None and limit_bytes is not None:
        layers = (sizes.embedding, *sizes.layers, sizes.head)
        forward_bytes = [layer.weights for layer in layers]
        backward_bytes = [layer.weights + layer.gradients for layer in layers]
        cap = max(limit_bytes / 2, *forward_bytes, *backward_bytes)
    return _Layers(
        [embedding, *times.forward, times.head_forward],
        [embedding, *backward, times.head_forward + times.head_backward],
        forward_bytes,
        backward_bytes,
        cap,
    )


def _budgets(layers: _Layers, longest: Number) -> list[Number]:
    """Sums of adjacent layers' times between the longest layer's and 1.1 times that, ascending."""
    found = set()
    for series in (layers.forward, layers.backward):
        for start in range(len(series)):
            for window in accumulate(series[start:]):
                if window > UPPER_THRESHOLD * longest:
                    break
                if window >= longest:
                    found.add(window)
    return sorted(found)


def _pack(layers: _Layers, budget: Number) -> Partition:
    num = len(layers.forward)

    def fill(order: range, times: Sequence[Number], sizes: Sequence[int]) -> list[list[int]]:
        stages: list[list[int]] = [[]]
        time, size = 0, 0
        for layer in order:
            time, size = time + times[layer], size + sizes[layer]
            if stages[-1] and (time > budget * (1 + TOLERANCE) or size > layers.cap_bytes):
                stages.append([])
                time, size = times[layer], sizes[layer]
            stages[-1].append(layer)
        return stages

    fused = fill(range(num - 1, 0, -1), layers.backward, layers.backward_bytes)[0]
    below = min(fused)  # layers under the fused stage
    forward = fill(range(below - 1, -1, -1), layers.forward, layers.forward_bytes)[::-1]
    backward = fill(range(below), layers.backward, layers.backward_bytes)
    decoder = range(1, num - 1)
    return Partition(
        tuple(sum(layer in decoder for layer in stage) for stage in forward),
        tuple(sum(layer in decoder for layer in stage) for stage in (*backward, fused)),
        fused=True,
    )
