"""Constant costs: every device's part of the model takes the same given time."""

from typing import Any

from rpbench.cost.table import LONGEST, OF_HEAD, OF_LAYERS, LayerTimes, Number


def constant_times(
    num_layers: int,
    num_devices: int,
    *,
    forward_ms: Number,
    input_grad_ms: Number,
    weight_grad_ms: Number,
    recompute_ms: Number = 0,
    hop_ms: Number = 0,
    head_share: Number = 0,
    overlap_gain: Number = 0,
) -> LayerTimes:
    """Layer times from those of one microbatch on one device, which has 1 / `num_devices` of the layers.

    A chunk takes 1/v of the given times on a device that holds v chunks. Forward, input and weight gradient of the head
    take `head_share` of them besides. Raises ValueError if a time is negative, infinite or not a number, or forward
    takes none.
    """
    names = ("forward_ms", "input_grad_ms", "weight_grad_ms", "recompute_ms", "hop_ms")
    given = (forward_ms, input_grad_ms, weight_grad_ms, recompute_ms, hop_ms)
    for name, time in zip(names, given, strict=True):
        if not 0 <= time <= LONGEST:
            way = f"give milliseconds, such as 1.5, at most {LONGEST:g}"
            raise ValueError(f"cost.{name}={time}: a time is finite and not negative; {way}")
    if not 0 <= head_share <= LONGEST:
        raise ValueError(f"cost.head_share={head_share}: the head's work in shares of a device's, such as 0.5, or 0")
    if not forward_ms + input_grad_ms + weight_grad_ms > 0:
        raise ValueError(
            "cost.forward_ms, cost.input_grad_ms and cost.weight_grad_ms are all 0: some work is needed; "
            "give at least cost.forward_ms"
        )

    def per_layer(time: Number) -> list[Number]:
        return [time * num_devices / num_layers if time else 0] * num_layers  # 0 / 1 would make fractions floats

    backward_ms = input_grad_ms + weight_grad_ms
    each = (forward_ms, recompute_ms, backward_ms, input_grad_ms, weight_grad_ms)
    times: dict[str, Any] = {name: per_layer(time) for name, time in zip(OF_LAYERS, each, strict=True)}
    if head_share:
        of_head = (forward_ms, backward_ms, input_grad_ms, weight_grad_ms)
        times |= {name: head_share * time for name, time in zip(OF_HEAD, of_head, strict=True)}
    return LayerTimes(**times, hop=hop_ms, units_per_second=1000, overlap_gain=overlap_gain)


def unit_times(num_layers: int) -> LayerTimes:
    """F = I = W = 1 for every layer (a chunk holds one), hops and recomputation 0."""
    ones = [1.0] * num_layers
    return LayerTimes(ones, [0.0] * num_layers, [2.0] * num_layers, input_grad=ones, weight_grad=ones)
