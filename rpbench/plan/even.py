"""The even partition: as many layers in every stage, give or take one."""

from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.plan.problem import Problem


def plan_even(problem: Problem) -> Partition:
    """Equal stages, whatever they cost.

    Where stages are bound to devices, each holds `default_chunks` of them. Where the directions are cut apart, the
    head is a stage of its own, every device gets `default_chunks` backward stages, and there are as many forward
    stages as make a forward stage about as long as a backward stage. With a published partition beside it and no
    number of chunks asked for, the numbers of stages are the published ones.
    """
    layers, published = problem.num_layers, problem.published
    if not problem.entry.separate_cuts:
        return symmetric(split_evenly(layers, problem.num_ranks * problem.default_chunks))
    if published and published.fused and problem.chunks_per_rank is None:
        num_forward, num_backward = len(published.forward), len(published.backward) - 1
    else:
        num_backward = min(layers, problem.num_ranks * problem.default_chunks)
        backward = sum(problem.times.recompute) + sum(problem.times.backward)
        share = sum(problem.times.forward) / backward if backward > 0 else 1
        num_forward = max(1, min(layers, round(num_backward * share)))
    return Partition(split_evenly(layers, num_forward), (*split_evenly(layers, max(1, num_backward)), 0), fused=True)
