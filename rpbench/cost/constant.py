"""Constant costs: every device's share of the model takes the same given time."""

from rpbench.cost.table import LONGEST, LayerTimes, Number


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
    """Layer times such that an even share of the layers on each device takes the given times for one microbatch.

    A chunk costs 1/v on a device that holds v chunks. Forward, input and weight gradient of the head take `head_share`
    of the given times, on top of them.

    Raises:
        ValueError: if a time is negative, infinite or not a number, or forward takes none.
    """
    given = {
        "forward_ms": forward_ms,
        "input_grad_ms": input_grad_ms,
        "weight_grad_ms": weight_grad_ms,
        "recompute_ms": recompute_ms,
        "hop_ms": hop_ms,
    }
    for name, time in given.items():
        if not 0 <= time <= LONGEST:
            raise ValueError(
                f"cost.{name}={time}: a time is finite and not negative; give milliseconds, such as 1.5, "
                f"at most {LONGEST:g}"
            )
    if not 0 <= head_share <= LONGEST:
        raise ValueError(f"cost.head_share={head_share}: the head's work in shares of a device's, such as 0.5, or 0")
    if not forward_ms + input_grad_ms + weight_grad_ms > 0:
        raise ValueError(
            "cost.forward_ms, cost.input_grad_ms and cost.weight_grad_ms are all 0: some work is needed; "
            "give at least cost.forward_ms"
        )

    def per_layer(time: Number) -> list[Number]:
        return [time * num_devices / num_layers if time else 0] * num_layers  # 0 / 1 would make fractions floats

    return LayerTimes(
        forward=per_layer(forward_ms),
        recompute=per_layer(recompute_ms),
        backward=per_layer(input_grad_ms + weight_grad_ms),
        input_grad=per_layer(input_grad_ms),
        weight_grad=per_layer(weight_grad_ms),
        head_forward=head_share * forward_ms if head_share else 0,
        head_backward=head_share * (input_grad_ms + weight_grad_ms) if head_share else 0,
        head_input_grad=head_share * input_grad_ms if head_share else 0,
        head_weight_grad=head_share * weight_grad_ms if head_share else 0,
        hop=hop_ms,
        units_per_second=1000,
        overlap_gain=overlap_gain,
    )


def unit_times(num_layers: int) -> LayerTimes:
    """F = I = W = 1 for every layer (one chunk holds one), no hops, no recomputation."""
    ones = [1.0] * num_layers
    return LayerTimes(ones, [0.0] * num_layers, [2.0] * num_layers, input_grad=ones, weight_grad=ones)
