"""ZenFlow: the device steps the columns with the largest gradients at once; the host steps the rest, some steps late.

As in `zero_offload` masters and moments are on the host, and gradients go there. A device has masters and moments of
the fraction `topk` of the columns of each matrix, those whose gradients are largest in sum of absolute values, and of
all that is no matrix. It steps these as soon as a step's gradient is complete. The gradients of the other columns go to
the host, which adds up those of `update_interval` steps (S) and steps once, beside the next S steps. What it has made
comes to the device at the end of those. With 1 device, 2 stages, 1 microbatch a step and S = 2:

    compute   0F0 1F0 1B0 0B0 1STEP@1 0STEP@1 | 0F1 1F1 1B1 0B1 1STEP@2 0STEP@2 | ... | 0F3 1F3 1B3 0B3 1STEP@4 0STEP@4
    d2h                     1STORE:G 0STORE:G                 1STORE:G 0STORE:G
    host                                                                          1STEP_REST@2 0STEP_REST@2 ...
    h2d                                                                                           0LOAD:P@4 1LOAD:P@4

So important columns are never late, and the rest S to 2 S - 1 steps. `overlap=false` waits for the host at the end of
every S steps: 0 to S - 1. `num_warmup_steps` first ones are those of `zero_offload`. With `select_interval` columns are
chosen anew every so many steps: the device's moments begin at 0, and masters are made of the 16-bit weights.

With k = topk and P parameters, all devices together move 2 (1 - k) P bytes down a step (a shard of the sum each) and
2 P up every S steps, where `zero_offload` moves 2 P up every step. What its device waits for behind each backward, the
last gradient down, the host's steps and the weights up, is here the weights up alone, every S steps, while the host
takes no longer for (1 - k) P than the device for S steps. Beside its weights and gradients a device has 12 k bytes a
parameter, shared by all devices.

topk=1 is plain training, in shards (ZeRO-2); topk=0 leaves also to the host what is no matrix, and with S = 1 it is
`zero_offload`, delayed if it overlaps.

Source: ZenFlow in DeepSpeed (runtime/zenflow), after a description of that code; the boundaries that are waited for
before a choice and at the end of a run are ours (`rpbench.ir.policy`).
"""

from collections.abc import Iterator
from dataclasses import replace

from baselines.data_parallel.data_parallel import whole_microbatches
from rpbench.ir.action import Action, Kind
from rpbench.ir.policy import LateRest, Policy, boundaries, versions_stored
from rpbench.ir.schedule import Row, Schedule, Shape
from rpbench.passes.offload import shard
from rpbench.registry import schedule


def _lower(
    order: Schedule,
    *,
    prefetch: int,
    topk: float,
    update_interval: int,
    select_interval: int,
    overlap: bool,
    num_warmup_steps: int,
) -> Schedule:
    """The order with the steps of devices and host, and what moves between them."""
    rule, devices = _rule_of(order), range(order.shape.num_ranks)
    stepped = replace(order, rows=tuple({"compute": _compute(order, device)} for device in devices))
    if order.shape.num_ranks > 1:
        stepped = shard(stepped, parameters="step", gradients="visit")
    rows = []
    for device, lanes in enumerate(stepped.lanes):
        moved = {
            "h2d": tuple(
                Action(Kind.LOAD, stage, version=end.version, object="P")
                for end in boundaries(rule, order.shape.num_steps)
                if end.brings is not None
                for stage in range(order.shape.num_stages)
            ),
            "d2h": tuple(
                Action(Kind.STORE, stage, object="G")
                for _ in versions_stored(rule, order.shape.num_steps)
                for stage in reversed(range(order.shape.num_stages))
            ),
            "host": _host(rule, order.shape, device),
        }
        rows.append({**lanes, **{lane: row for lane, row in moved.items() if row}})
    return replace(stepped, rows=tuple(rows))


@schedule("zenflow", source="DeepSpeed, runtime/zenflow", looped=True, lower=_lower, whole_microbatches=True)
def zenflow(
    shape: Shape,
    *,
    topk: float = 0.1,
    update_interval: int = 4,
    select_interval: int = 0,
    overlap: bool = True,
    num_warmup_steps: int = 0,
) -> Schedule:
    """The order of data parallelism.

    Args:
        topk: the fraction of the columns that devices step, from 0 to 1.
        update_interval: steps of which the host adds up gradients before it steps.
        select_interval: steps between two choices of columns, a multiple of it; 0 for one choice.
        overlap: the host steps beside the next steps of the device.
        num_warmup_steps: first steps that the host makes of all columns, and that are waited for.

    Raises:
        ValueError: for other values, or if the devices cannot share the microbatches evenly.
    """
    rule = LateRest(topk, update_interval, select_interval, overlap, num_warmup_steps)
    return replace(whole_microbatches(shape, "zenflow", Policy.SELECTIVE), late_rest=rule)


def _rule_of(order: Schedule) -> LateRest:
    assert order.late_rest is not None
    return order.late_rest


def _own(shape: Shape, device: int) -> list[int]:
    """The stages whose steps stand on a device's lanes, last first; one STEP stands for the shards of all."""
    return [stage for stage in reversed(range(shape.num_stages)) if stage % shape.num_ranks == device]


def _compute(order: Schedule, device: int) -> Row:
    """The order with the device's steps, which begin behind the warm-up."""
    row, shape = order.compute(device), order.shape
    per_step, found = len(row) // shape.num_steps, list[Action]()
    for step in range(shape.num_steps):
        found += row[step * per_step : (step + 1) * per_step]
        if step >= _rule_of(order).num_warmup_steps:
            found += [Action(Kind.STEP, stage, version=step + 1) for stage in _own(shape, device)]
    return tuple(found)


def _host(rule: LateRest, shape: Shape, device: int) -> Row:
    """The host's steps: of all columns in the warm-up, then of the rest at the end of every window."""

    def steps() -> Iterator[Action]:
        for end in boundaries(rule, shape.num_steps):
            kind = Kind.STEP if end.version <= rule.num_warmup_steps else Kind.STEP_REST
            yield from (Action(kind, stage, version=end.version) for stage in _own(shape, device))

    return tuple(steps())
