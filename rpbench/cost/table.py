"""Times of every action of a schedule: per-layer times summed over the layers of each stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rpbench.ir.action import HEAD, Action, Kind, parts_of
from rpbench.ir.moved_objects import Payload
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import ScheduleError, Shape

Number = Any  # float, or Fraction where an exact result is wanted
# Bounds of times, in any unit, and of device speeds: sums of times must stay within what a float holds.
LONGEST = 1e15
LEAST_SPEED = 1e-6


class Work(NamedTuple):
    """The work of one action on its device, in the cost table's unit of time.

    `pre` (recomputation, or the forward half of a fused stage) stands directly before `main`. `first_gradient` is
    the time from the start of the action to the first layer's backward, which the artifact's metrics ask for;
    `num_records` counts the layer-level records the artifact would write for it.
    """

    main: Number
    pre: Number = 0
    first_gradient: Number = 0
    num_records: int = 0

    def over(self, divisor: Number) -> "Work":
        """The same work in less time: on a faster device, or for a part of a microbatch."""
        times = (self.main, self.pre, self.first_gradient)
        main, pre, first = (time / divisor if time else time for time in times)  # 0 / 2 would make fractions floats
        return Work(main, pre, first, self.num_records)


_NO_WORK = Work(0)

Members = tuple[tuple[Kind, int], ...]  # (kind, stage) of the plain actions that one action consists of


@dataclass(frozen=True)
class CostTable:
    """Times of the actions of one schedule.

    Args:
        work: per kind, the work of each stage (forward stages for F and R, backward stages otherwise).
        hop: time of one transfer between neighbouring stages on different devices.
        recompute_ahead: whether `pre` of a backward may begin before its gradient arrives.
        fused_ahead: whether `pre` of a fused stage may begin before its input arrives (see `published`).
        units_per_second: 1000 when times are milliseconds.
        overlap_gain: fraction of the shorter of two actions run together that is hidden behind the longer one.
        speeds: of the devices; times are those of speed 1. Empty where all are equal.
        transfer_time: time of a transfer over a link, in a schedule with transfers; None: `work` has it, or it is 0.
        each: the costs of every microbatch of a step, where they differ; actions of no microbatch, or of several, take
            the table's own, which are of the mean. Empty where all are alike.
        carry: transfers at the end of actions of a kind and stage, whose time comes on top of their work.
    """

    work: Mapping[Kind, tuple[Work, ...]]
    hop: Number = 0
    recompute_ahead: bool = False
    fused_ahead: bool = False
    units_per_second: int = 1
    overlap_gain: Number = 0
    speeds: tuple[Number, ...] = ()
    transfer_time: Callable[[Payload], Number | None] | None = None
    each: tuple["CostTable", ...] = ()
    carry: Mapping[tuple[Kind, int], tuple[Payload, ...]] = field(default_factory=dict)

    def at(self, microbatch: int | None) -> "CostTable":
        """The costs of a microbatch, counted through over all steps."""
        return self if microbatch is None or not self.each else self.each[microbatch % len(self.each)]

    def hop_between(self, producer: Action, consumer: Action) -> Number:
        """Time of a boundary tensor from one action to another on another device."""
        one, other = (None if each.kind is Kind.OVERLAP else each.microbatch for each in (consumer, producer))
        return self.at(other if one is None else one).hop

    def of(self, kind: Kind, stage: int) -> Work:
        """The work of an action; communication and bookkeeping take no time of their own.

        Raises:
            ScheduleError: if the time of an action is unknown.
        """
        if kind is Kind.STEP_REST:
            kind = Kind.STEP  # the schedule knows which part is stepped
        if kind in self.work:
            own = self.work[kind][stage]
            for carried in map(self.of_payload, self.carry.get((kind, stage), ())):
                own = own if carried is None else own._replace(main=own.main + carried.main)
            return own
        if kind in (Kind.I, Kind.W):
            raise ScheduleError(
                f"no time is known for {kind.name} of stage {stage}: these costs do not split backward; "
                "use cost=constant, cost=analytic or cost.split_backward=true, or a schedule with whole backwards"
            )
        if kind in HEAD:
            raise ScheduleError(
                f"no time is known for {kind.name} of share {stage}: these costs leave the head to the last stage; "
                "make the table with num_head_shards"
            )
        return _NO_WORK

    def of_payload(self, payload: Payload | None) -> Work | None:
        """Time on a link, whatever the speed of its device; None if its bytes do not decide."""
        time = None if payload is None or self.transfer_time is None else self.transfer_time(payload)
        return None if time is None else Work(time)

    def of_order(self, shape: Shape) -> "CostTable":
        """The table for a shape: where R recomputes the input of another stage, it is an action of its own."""
        if shape.keeps_every == 1 or Kind.R in self.work:
            return self
        work = {**self.work, Kind.R: tuple(Work(own.pre) for own in self.work[Kind.B])}
        return replace(self, work=work, each=tuple(own.of_order(shape) for own in self.each))

    def together(self, members: Members) -> Work:
        """The work of actions that run together; none of it runs ahead of its inputs."""
        return self._beside([self.of(kind, stage) for kind, stage in members], members)

    def _beside(self, works: Sequence[Work], members: Members) -> Work:
        if len(works) == 1:
            return works[0]
        times = [work.pre + work.main for work in works]
        backwards = [work for work, (kind, _) in zip(works, members, strict=True) if kind is not Kind.F]
        forward = sum(times) - sum(work.pre + work.main for work in backwards)
        first = forward + (backwards[0].first_gradient if backwards else 0)
        main = sum(times) - self.overlap_gain * (sum(times) - max(times))
        return Work(main, 0, min(first, main), sum(work.num_records for work in works))

    def of_action(self, action: Action, device: int, num_parts: int = 1) -> Work:
        """The work of an action of a schedule that cuts sequences into `num_parts`, on its device."""
        works = [self.at(part.microbatch).of(part.kind, part.stage) for part in parts_of(action)]
        return self.on(device, self._beside(works, members_of(action)), num_parts)

    def on(self, device: int, work: Work, num_parts: int = 1) -> Work:
        """A whole microbatch's work as that of one of its parts on a device."""
        if num_parts > 1:
            work = work.over(num_parts)
        return work.over(self.speeds[device]) if self.speeds else work


def members_of(action: Action) -> Members:
    """The (kind, stage) pairs that costs of an action are looked up by."""
    return tuple((part.kind, part.stage) for part in parts_of(action))


@dataclass(frozen=True)
class LayerTimes:
    """Times of one microbatch through each layer; the head and loss belong to the last stage.

    Args:
        forward, recompute, backward: per layer, in model order; `backward` excludes recomputation.
        head_forward, head_backward: norm, LM head and loss; never recomputed.
        input_grad, weight_grad, head_input_grad, head_weight_grad: the two halves of backward, where known.
        step, head_step: the optimizer's step for the weights of each layer and of the head; none where not known.
        rank_loss: for every forward and backward of a layer, its part of a rank's lost time a microbatch.
        beside: slowdown of layers that run while weights come over a link, as a fraction.
        shards, shards_along: for tensor-parallel layers, time of kernels times the devices over that of whole layers:
            forwards, backwards, head; along: with sequence parallelism too. Empty: the same.
        hop: one boundary tensor between two devices.
        overlap_gain, speeds: as in `CostTable`.

    Raises:
        ValueError: if a time is negative, infinite or not a number, a speed is not above 0, or a gain not a share.
    """

    forward: Sequence[Number]
    recompute: Sequence[Number]
    backward: Sequence[Number]
    head_forward: Number = 0
    head_backward: Number = 0
    input_grad: Sequence[Number] = ()
    weight_grad: Sequence[Number] = ()
    head_input_grad: Number = 0
    head_weight_grad: Number = 0
    hop: Number = 0
    units_per_second: int = 1
    overlap_gain: Number = 0
    speeds: tuple[Number, ...] = ()
    step: Sequence[Number] = ()
    head_step: Number = 0
    rank_loss: Number = 0
    beside: Number = 0
    shards: tuple[Number, ...] = ()
    shards_along: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_gain <= 1:
            raise ValueError(f"overlap_gain={self.overlap_gain}: a share, from 0 (none is hidden) to 1 (all is)")
        if not all(speed >= LEAST_SPEED for speed in self.speeds):
            raise ValueError(
                f"speeds={list(self.speeds)}: numbers of at least {LEAST_SPEED}; 1 is a device as it was timed"
            )
        for name, value in vars(self).items():
            for time in value if isinstance(value, Sequence) else (value,):
                if not 0 <= time <= LONGEST:
                    raise ValueError(f"{name}={time!r}: times are finite and not negative, at most {LONGEST:g}")

    @property
    def num_layers(self) -> int:
        return len(self.forward)

    def of_whole_microbatches(self, num_ranks: int, *, gathers: bool) -> "LayerTimes":
        """The times on devices that run all layers: each loses a rank's time once a microbatch.

        Args:
            gathers: whether the weights of layers come beside the computation of others.
        """
        less, more = self.rank_loss * (num_ranks - 1) / num_ranks, 1 + self.beside * gathers
        if not less and more == 1:
            return self

        def changed(times: Sequence[Number], less: Number = 0) -> Sequence[Number]:
            return [max(0, time - less) * more for time in times]

        return replace(
            self,
            forward=changed(self.forward, less),
            recompute=changed(self.recompute),
            backward=changed(self.backward, less),
            input_grad=changed(self.input_grad, less),
            weight_grad=changed(self.weight_grad),
            rank_loss=0,
            beside=0,
        )

    def of_shards(self, *, along_sequence: bool) -> "LayerTimes":
        """The times where every device has a shard of every matrix: of all shards together."""
        factors = self.shards_along if along_sequence else self.shards
        if not factors:
            return self
        forward, backward, head = factors

        def changed(times: Sequence[Number], factor: Number, lost: Number = 0) -> list[Number]:
            return [factor * max(0, time - lost) + min(time, lost) for time in times]  # a frozen layer loses nothing

        found: dict[str, Any] = {
            "forward": changed(self.forward, forward, self.rank_loss),
            "recompute": changed(self.recompute, forward),
            "backward": changed(self.backward, backward, self.rank_loss),
            "input_grad": changed(self.input_grad, backward, self.rank_loss),
            "weight_grad": changed(self.weight_grad, backward),
        }
        for name in ("head_forward", "head_backward", "head_input_grad", "head_weight_grad"):
            found[name] = head * getattr(self, name)
        return replace(self, **found, shards=(), shards_along=())

    def frozen(self, num_layers: int) -> "LayerTimes":
        """The times with the first layers frozen: they are not recomputed, and have no backward."""
        ways = ("recompute", "backward", "input_grad", "weight_grad", "step")
        known = {name: getattr(self, name) for name in ways if num_layers and getattr(self, name)}
        changed: dict[str, Any] = {name: [0] * num_layers + list(own[num_layers:]) for name, own in known.items()}
        return replace(self, **changed)

    def table(
        self,
        partition: Partition,
        *,
        recompute_ahead: bool = False,
        fused_ahead: bool = False,
        num_head_shards: int = 0,
        keeps_last: bool = False,
        keeps: Sequence[int] = (),
    ) -> CostTable:
        """Times per stage of a partition; of the head's equal shards, if it is cut over the devices.

        Args:
            keeps_last: the last stage's backward recomputes nothing.
            keeps: layers of each backward stage that recompute nothing, the last of their stage; empty: none.

        Raises:
            ValueError: if the partition does not cover the layers.
        """
        spared = [*keeps] or [0] * len(partition.backward)
        if keeps_last:
            spared[-1] = partition.backward[-1]
        if num_head_shards:
            return self._with_cut_head(partition, num_head_shards, recompute_ahead, spared)
        partition.check_layers(self.num_layers)
        made_again = [own[: len(own) - kept] for own, kept in zip(partition.backward_ranges(), spared, strict=True)]
        work = {
            Kind.F: self._forward_works(partition),
            Kind.B: self._backward_works(partition, made_again, recompute_ahead, self.backward, self.head_backward),
            Kind.FB: self._fused_works(partition),
        }
        if self.input_grad:
            work[Kind.I] = self._backward_works(
                partition, made_again, recompute_ahead, self.input_grad, self.head_input_grad
            )
            work[Kind.W] = _plain_works(partition, self.weight_grad, self.head_weight_grad)
        if self.step:
            work[Kind.STEP] = _plain_works(partition, self.step, self.head_step)
        return CostTable(
            work, self.hop, recompute_ahead, fused_ahead, self.units_per_second, self.overlap_gain, self.speeds
        )

    def _with_cut_head(
        self, partition: Partition, num_shards: int, recompute_ahead: bool, keeps: Sequence[int]
    ) -> CostTable:
        """A table whose stages lack the head's work; every device has a shard of the head as actions of their own."""
        headless = replace(self, head_forward=0, head_backward=0, head_input_grad=0, head_weight_grad=0, head_step=0)
        found = headless.table(partition, recompute_ahead=recompute_ahead, keeps=keeps)
        shards = {
            Kind.HF: (Work(self.head_forward / num_shards, num_records=1),) * num_shards,
            Kind.HB: (Work(self.head_backward / num_shards, num_records=1),) * num_shards,
        }
        if self.step:  # every shard is updated with a stage
            steps = enumerate(found.work[Kind.STEP])
            shards[Kind.STEP] = tuple(
                Work(own.main + (self.head_step / num_shards if stage < num_shards else 0)) for stage, own in steps
            )
        return replace(found, work={**found.work, **shards})

    def _forward_works(self, partition: Partition) -> tuple[Work, ...]:
        stages = _stages(partition.forward_ranges(), 0 if partition.fused else self.head_forward)
        return tuple(Work(total(self.forward, own) + head, num_records=len(own) + (head > 0)) for own, head in stages)

    def _backward_works(
        self,
        partition: Partition,
        made_again: Sequence[range],
        ahead: bool,
        gradient: Sequence[Number],
        head_gradient: Number,
    ) -> tuple[Work, ...]:
        works = []
        for (layers, head), again in zip(_stages(partition.backward_ranges(), head_gradient), made_again, strict=True):
            first = pre = total(self.recompute, again)
            if not ahead:  # layer by layer, top down: recompute one, then its backward; the head's backward comes first
                first = self.recompute[layers[-1]] if layers and again == layers and not head > 0 else 0
            records = len(layers) + len(again) * (pre > 0) + (head > 0)
            works.append(Work(total(gradient, layers) + head, pre, first, records))
        return tuple(works)

    def _fused_works(self, partition: Partition) -> tuple[Work, ...]:
        """Only the last backward stage is ever fused; the others stand here so that stages index the tuple."""
        works = []
        for layers in partition.backward_ranges():
            pre = total(self.forward, layers) + self.head_forward
            main = total(self.backward, layers) + self.head_backward
            works.append(Work(main, pre, pre, 2 * len(layers) + (self.head_forward > 0) + (self.head_backward > 0)))
        return tuple(works)


def _stages(ranges: Sequence[range], head: Number) -> list[tuple[range, Number]]:
    """The layers of each stage, with the time of the head in the last."""
    return [(layers, head if number == len(ranges) - 1 else 0) for number, layers in enumerate(ranges)]


def _plain_works(partition: Partition, times: Sequence[Number], head: Number) -> tuple[Work, ...]:
    """Work of every backward stage that has nothing to run ahead."""
    return tuple(Work(total(times, layers) + last) for layers, last in _stages(partition.backward_ranges(), head))


def total(times: Sequence[Number], layers: range) -> Number:
    """Time of a range of layers; equal layers are multiplied, not added, as the artifact's simulator does."""
    if not layers:
        return 0
    chosen = times[layers.start : layers.stop]
    return len(chosen) * chosen[0] if min(chosen) == max(chosen) else sum(chosen)
