"""Pieces: times of a part of a microbatch, for schedules that order parts of those a run asks for."""

from dataclasses import replace

from rpbench.cost.table import LayerTimes, Number


def of_piece(times: LayerTimes, pieces: int) -> LayerTimes:
    """Given times of a whole microbatch as those of a piece, which does its part of the work.

    A hop keeps its time: given times do not say what of it is latency. Nor do optimizer steps change.
    """
    if pieces == 1:
        return times

    def part(time: Number) -> Number:
        return time / pieces if time else time  # 0 / 2 would make fractions floats

    return replace(
        times,
        forward=list(map(part, times.forward)),
        recompute=list(map(part, times.recompute)),
        backward=list(map(part, times.backward)),
        head_forward=part(times.head_forward),
        head_backward=part(times.head_backward),
        input_grad=list(map(part, times.input_grad)),
        weight_grad=list(map(part, times.weight_grad)),
        head_input_grad=part(times.head_input_grad),
        head_weight_grad=part(times.head_weight_grad),
    )
