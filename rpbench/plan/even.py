"""The even partition: as many layers in every stage, give or take one."""

from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.plan.problem import Problem


def plan_even(problem: Problem) -> Partition:
    """Equal stages, whatever they cost.

    Where stages are bound to devices, each holds `default_chunks` of them, or fewer where nobody asked for that
    many and some would be empty. Where the directions are cut apart, the head is a stage of its own, every
    device gets `default_chunks` backward stages, and there are as many forward stages as make a forward stage
    about as long as a backward stage. With a published partition beside it and no number of chunks asked for,
    the numbers of stages are the published ones.

    Raises:
        ValueError: if there are fewer layers than stages bound to devices.
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
    """Stages of a schedule that binds them to devices: as many as asked for, or at most one a layer.

    Raises:
        ValueError: if there are fewer layers than stages; `method` asks.
    """
    layers, ranks, chunks = problem.num_layers, problem.num_ranks, problem.default_chunks
    if problem.options.get("replicas") and layers >= problem.num_bound_stages:
        return problem.num_bound_stages
    if problem.chunks_per_rank is None and problem.entry.chunks is None:
        chunks = max(1, min(chunks, layers // ranks))
    if layers < ranks * chunks:
        raise ValueError(
            f"partition={method}: {layers} layers make no {ranks * chunks} stages ({ranks} devices x {chunks}), some "
            "would be empty; take fewer devices or chunks_per_device, or write the partition out, as in "
            "partition=1-1-0"
        )
    return ranks * chunks
