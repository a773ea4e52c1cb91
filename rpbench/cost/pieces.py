"""Pieces: given times of a microbatch as those of others, smaller ones or such of unequal lengths."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rpbench.cost.table import LayerTimes, Number
from rpbench.workload.architecture import Architecture


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


def of_lengths(times: LayerTimes, model: Architecture | None, lengths: Sequence[int], num_tokens: float) -> LayerTimes:
    """Given times of a microbatch of `num_tokens` tokens as those of one of sequences of these lengths.

    Products and the head take time by tokens. Attention takes it by the keys that each query sees; its part of a
    layer's forward is its part of the FLOPs, twice as many of the input gradient, and none of the weight gradient. A
    hop keeps its time, as in `of_piece`.

    Args:
        model: None: nothing is known of its attention, and all goes by tokens.
    """
    tokens = sum(lengths) / num_tokens
    both = inputs = tokens
    if model is not None:
        products, attention = (flops * num_tokens / model.seq_len for flops in _flops(model, model.seq_len))
        own = sum(_flops(model, length)[1] for length in lengths)
        both = (products * tokens + own) / (products + attention)
        inputs = (products * tokens + 2 * own) / (products + 2 * attention)

    def scaled(values: Sequence[Number], factor: float) -> list[Number]:
        return [value * factor for value in values]

    backward = scaled(times.backward, both)
    if times.input_grad:  # so that both halves together stay what the whole is
        halves = zip(times.backward, times.input_grad, times.weight_grad, strict=True)
        backward = [
            whole * (first * inputs + second * tokens) / (first + second) if first + second else whole * both
            for whole, first, second in halves
        ]
    return replace(
        times,
        forward=scaled(times.forward, both),
        recompute=scaled(times.recompute, both),
        backward=backward,
        input_grad=scaled(times.input_grad, inputs),
        weight_grad=scaled(times.weight_grad, tokens),
        **{name: getattr(times, name) * tokens for name in _OF_HEAD},
    )


def between(short: LayerTimes, whole: LayerTimes, one: LayerTimes, other: LayerTimes) -> LayerTimes:
    """Times of a microbatch on the line through two that were measured: what a kernel takes besides its FLOPs counts.

    Args:
        short, whole: as they were measured.
        one, other: those of `whole` by `of_lengths`: of the microbatch that is asked for, and of `short`.
    """

    def on_line(low: Number, high: Number, now: Number, then: Number) -> Number:
        return low + (high - low) * (now - then) / (high - then) if high > then else now

    found: dict[str, Any] = {
        name: on_line(*(getattr(of, name) for of in (short, whole, one, other))) for name in _OF_HEAD
    }
    for name in _OF_LAYERS:
        found[name] = [
            on_line(*each) for each in zip(*(getattr(of, name) for of in (short, whole, one, other)), strict=True)
        ]
    return replace(whole, **found)


_OF_LAYERS = ("forward", "recompute", "backward", "input_grad", "weight_grad")
_OF_HEAD = ("head_forward", "head_backward", "head_input_grad", "head_weight_grad")


@lru_cache(maxsize=4096)
def _flops(model: Architecture, length: int) -> tuple[float, float]:
    """FLOPs of one layer's forward for a sequence: of products, and of attention."""
    whole = replace(model, seq_len=length).layer_forward_flops(length, "causal")
    products = 2 * length * model.layer_matrix_weights(None, "causal")
    return products, whole - products


def mean_times(each: Sequence[LayerTimes]) -> LayerTimes:
    """The mean of several microbatches' times, for who looks at all of them at once."""
    number = len(each)

    def mean(values: Sequence[Number]) -> Number:
        return sum(values) / number

    found: dict[str, Any] = {
        name: list(map(mean, zip(*(getattr(own, name) for own in each), strict=True))) for name in _OF_LAYERS
    }
    found |= {name: mean([getattr(own, name) for own in each]) for name in (*_OF_HEAD, "hop")}
    return replace(each[0], **found)
