"""Mobius's partition: the cut whose modelled step is shortest, for stages that stream through the devices in rotation.

    rotation            the stages of a cut: their times and bytes, with the rates of shared links
    rotation_program    the modelled step of cuts, and the search for the best one, with its proof

Source: Feng et al., "Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", ASPLOS'23, from descriptions of
its program: computing and upload times, device memory, prefetch as far as memory allows. The equations are ours.
"""

from dataclasses import replace

from rpbench.cost.footprint.sizes import OPTIMIZER_BYTES
from rpbench.ir.action import Action, Kind
from rpbench.ir.checks.residency import prefetch_depth
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Weights
from rpbench.plan.problem import Problem
from rpbench.plan.rotation import Rotation, share_links
from rpbench.plan.rotation_program import Program, solve


def plan_mobius(problem: Problem) -> tuple[Partition, Program]:
    """The cut with the shortest modelled step over all numbers of stages, or that of `chunks_per_device`.

    Raises ValueError if the schedule streams no weights in rotation, nothing is known of its links, there are fewer
    layers than stages, or no cut fits into memory.
    """
    rotation, numbers = pose_rotation(problem)
    program = solve(rotation, numbers)
    if not program.counts:
        raise ValueError(_nothing_fits(problem, rotation, numbers))
    return symmetric(program.counts), program


def pose_rotation(problem: Problem) -> tuple[Rotation, tuple[int, ...]]:
    """The rotation of a problem, and the numbers of stages to try; ValueError as of `plan_mobius`, but for memory."""
    _check_schedule(problem)
    numbers, traffic, times = _numbers(problem), problem.traffic, problem.times
    if traffic is None or traffic.cluster.link_bytes_per_s("h2d") is None:
        raise ValueError(
            "partition=mobius: the program weighs uploads against computation, and the cluster has no links or the "
            "model no bytes; take model=qwen3_1p7b cluster=8x_rtx4090, set cluster.host_to_device_bytes_per_s, or use "
            "partition=even, greedy or search"
        )
    if problem.times.speeds:
        raise ValueError(
            f"partition=mobius: devices of speeds {list(times.speeds)}; the program is of equal devices: use "
            "partition=greedy or search"
        )
    schedule = _finished(problem, problem.num_ranks)
    in_turn = sorted(range(problem.num_ranks), key=lambda device: schedule.compute(device)[0].stage)
    unit, sizes, optimizer = times.units_per_second, traffic.sizes, traffic.optimizer
    host = traffic.cluster.shared_host_bytes_per_s
    updates = optimizer.on_host / OPTIMIZER_BYTES / host * unit if optimizer and host else 0.0
    layers = zip(times.recompute, times.backward, strict=True)
    rotation = Rotation(
        problem.num_ranks,
        problem.num_microbatches,
        [float(time) for time in times.forward],
        [float(again + time) for again, time in layers],
        (float(times.head_forward), float(times.head_backward)),
        [float(time) * problem.keeps_last for time in times.recompute],
        sizes,
        share_links(traffic.cluster, in_turn, problem.num_microbatches, sizes.boundary, unit),
        updates,
        _prefetches(_finished(problem, 2 * problem.num_ranks)),
        problem.memory.limit_bytes if problem.memory else None,
        problem.num_steps > 1,
    )
    return rotation, numbers


def _numbers(problem: Problem) -> tuple[int, ...]:
    """Numbers of stages to try: from one per device to one per layer with the head in a stage of its own.

    If `chunks_per_device` is given there is one number. A rotation may end at any device.
    """
    layers, ranks = problem.num_layers, problem.num_ranks
    chunks = problem.chunks_per_rank or 1
    if ranks * chunks > layers + 1:
        raise ValueError(
            f"partition=mobius: {layers} layers make no {ranks * chunks} stages ({ranks} devices x {chunks}); a stage "
            "has a layer, only the last may hold the head alone; take fewer devices or chunks_per_device"
        )
    return (ranks * chunks,) if problem.chunks_per_rank else tuple(range(ranks, layers + 2))


def _check_schedule(problem: Problem) -> None:
    """Refuse schedules whose weights do not stream through the devices in rotation."""
    name = problem.entry.name
    way_out = "; use schedule=mobius, or partition=greedy or search"
    if problem.entry.separate_cuts:
        raise ValueError(
            f"partition=mobius: {name} cuts forward and backward apart, the program cuts both at once{way_out}"
        )
    try:
        schedule = problem.schedule(2 * problem.num_ranks, 2 * problem.num_ranks)
    except ValueError:  # it takes no two stages on a device
        schedule = None
    if schedule is None or schedule.weights is not Weights.STREAMED or not _rotates(schedule):
        raise ValueError(
            f"partition=mobius: the program is of stages that stream from the host and go round the devices, each for "
            f"all microbatches of a step; those of {name} do not{way_out}"
        )


def _rotates(schedule: Schedule) -> bool:
    """Whether every device runs its stages in turn for all microbatches of a step, forward and then back."""
    shape = schedule.shape
    for device in range(shape.num_ranks):
        row = schedule.compute(device)
        stages = range(row[0].stage, shape.num_stages, shape.num_ranks)
        wanted = [
            Action(kind, stage, microbatch)
            for microbatches in shape.batches
            for kind, order in ((Kind.F, stages), (Kind.B, reversed(stages)))
            for stage in order
            for microbatch in microbatches
        ]
        if list(row) != wanted:
            return False
    return True


def _finished(problem: Problem, num_stages: int) -> Schedule:
    """The schedule that runs, with equal stages."""
    order = problem.schedule(num_stages, num_stages)
    return problem.finished(order.with_partition(symmetric(split_evenly(problem.num_layers, num_stages))))


def _prefetches(schedule: Schedule) -> bool:
    """Whether the next stage's weights are loaded while a stage runs; ValueError if those of more stages are."""
    depth = prefetch_depth(schedule)
    if depth > 1:
        raise ValueError(
            f"partition=mobius: prefetch={depth}: the program has the weights of one stage come ahead; take prefetch=1 "
            "or 0, or use partition=search"
        )
    return bool(depth)


def _nothing_fits(problem: Problem, rotation: Rotation, numbers: tuple[int, ...]) -> str:
    """Why there is no cut, and what to change."""
    assert rotation.limit_bytes is not None
    ways = ["smaller microbatches"]
    if rotation.prefetches and solve(replace(rotation, prefetches=False), numbers, limit=100_000).counts:
        ways.insert(0, "prefetch=0, with which it fits")
    if problem.chunks_per_rank:
        ways.append("another chunks_per_device")
    stages = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    beside = "the weights of the next one" if rotation.prefetches else "boundary tensors"
    return (
        f"partition=mobius: no cut of {problem.num_layers} layers into {stages} stages fits into the "
        f"{rotation.limit_bytes / 1e9:.1f} GB of a device: a stage with its gradients and activations has to, beside "
        f"{beside}; take {', '.join(ways)}, or a cluster with more memory"
    )
