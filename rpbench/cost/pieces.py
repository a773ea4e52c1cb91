"""Given times of a microbatch, turned into those of smaller ones or of sequences of unequal lengths."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rpbench.cost.table import OF_HEAD, OF_LAYERS, LayerTimes, Number
from rpbench.workload.architecture import Architecture


def combined(function: Callable[..., Number], *each: LayerTimes) -> LayerTimes:
    """The first of some layer times, with every time of a layer or the head replaced by `function` of those of all."""
    found: dict[str, Any] = {
        name: [function(*values) for values in zip(*(getattr(own, name) for own in each), strict=True)]
        for name in OF_LAYERS
    }
    return replace(each[0], **found, **{name: function(*(getattr(own, name) for own in each)) for name in OF_HEAD})


def of_piece(times: LayerTimes, pieces: int) -> LayerTimes:
    """The times of one of a microbatch's equal pieces, from those of the whole microbatch.

    A hop keeps its time: given times do not say how much of it is latency. Optimizer steps do not change either.
    """
    # 0 / 2 would make fractions floats
    return times if pieces == 1 else combined(lambda time: time / pieces if time else time, times)


def of_segments(whole: LayerTimes, each: LayerTimes, number: int) -> LayerTimes:
    """The times of microbatches that run in equal segments, from `each`, those of one: kernels of fewer tokens."""
    return combined(lambda _, own: number * own, whole, each)


def of_lengths(times: LayerTimes, model: Architecture | None, lengths: Sequence[int], num_tokens: float) -> LayerTimes:
    """The times of a microbatch of sequences of these lengths, from those of a microbatch of `num_tokens` tokens.

    Matrix products and the head scale with tokens. Attention scales with the keys that each query sees; its fraction of
    a layer's forward is its fraction of the FLOPs. The input gradient has twice its FLOPs, the weight gradient none. A
    hop keeps its time, as in `of_piece`. Without a `model` its attention is unknown, and everything scales with tokens.
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
    if times.input_grad:  # the two halves still add up to the whole
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
        **{name: getattr(times, name) * tokens for name in OF_HEAD},
    )


def between(short: LayerTimes, whole: LayerTimes, one: LayerTimes, other: LayerTimes) -> LayerTimes:
    """Times of a microbatch on the line through two measured ones: fixed costs of kernels count as well as FLOPs.

    Args:
        short, whole: measured times of two microbatches.
        one, other: `of_lengths` of `whole` for the microbatch in question, and for that of `short`.
    """

    def on_line(high: Number, low: Number, now: Number, then: Number) -> Number:
        return low + (high - low) * (now - then) / (high - then) if high > then else now

    return combined(on_line, whole, short, one, other)


@lru_cache(maxsize=4096)
def _flops(model: Architecture, length: int) -> tuple[float, float]:
    """FLOPs of one layer's forward for a sequence: of products, and of attention."""
    whole = replace(model, seq_len=length).layer_forward_flops(length, "causal")
    products = 2 * length * model.layer_matrix_weights(None, "causal")
    return products, whole - products


def mean_times(each: Sequence[LayerTimes]) -> LayerTimes:
    """The mean times of several microbatches."""
    found = combined(lambda *values: sum(values) / len(values), *each)
    hop = sum(own.hop for own in each) / len(each)
    return replace(found, hop=hop, uncut_along=found.uncut)  # no length is that of all sequences
