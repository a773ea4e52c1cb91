"""Times of every action of a schedule: the times of layers, summed over the layers of each stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rpbench.ir.action import HEAD, Action, Kind, parts_of
from rpbench.ir.moved_objects import Payload
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import ScheduleError, Shape

Number = Any  # float, or Fraction where an exact result is wanted
# Bounds of times, in any unit, and of device speeds: sums of times must stay finite in floats.
LONGEST = 1e15
LEAST_SPEED = 1e-6
# Fields of `LayerTimes` with the times of one microbatch: of every layer, and of the head.
OF_LAYERS = ("forward", "recompute", "backward", "input_grad", "weight_grad")
OF_HEAD = ("head_forward", "head_backward", "head_input_grad", "head_weight_grad")
_WITH_LOSS = ("forward", "backward", "input_grad")  # those with a layer's part of `rank_loss`


class Work(NamedTuple):
    """The work of one action on its device, in the cost table's unit of time."""

    main: Number
    pre: Number = 0  # recomputation, or the forward half of a fused stage, directly before `main`
    first_gradient: Number = 0  # from the start of the action to the first layer's backward, for the artifact's metrics
    num_records: int = 0  # layer-level records that the artifact writes for the action

    def over(self, divisor: Number) -> "Work":
        """The same work in less time: on a faster device, or for a part of a microbatch."""
        main, pre, first = (time / divisor if time else time for time in self[:3])  # 0 / 2 would make fractions floats
        return Work(main, pre, first, self.num_records)


Members = tuple[tuple[Kind, int], ...]  # (kind, stage) of the plain actions that one action consists of


@dataclass(frozen=True)
class CostTable:
    """Times of the actions of one schedule."""

    # per kind, the work of each stage (forward stages for F and R, backward stages otherwise)
    work: Mapping[Kind, tuple[Work, ...]]
    hop: Number = 0  # time of a boundary tensor between two devices
    recompute_ahead: bool = False  # whether `pre` of a backward may begin before its gradient arrives
    fused_ahead: bool = False  # whether `pre` of a fused stage may begin before its input arrives (see `published`)
    units_per_second: int = 1  # 1000 when times are milliseconds
    overlap_gain: Number = 0  # fraction of the shorter of two actions run together that is hidden behind the longer one
    speeds: tuple[Number, ...] = ()  # of the devices; times are those of speed 1. Empty: all are equal
    # time of a transfer over a link, in a schedule with transfers; None: `work` has it, or it is 0
    transfer_time: Callable[[Payload], Number | None] | None = None
    # the costs of every microbatch of a step, where they differ. Actions of no microbatch, or of several, take the
    # costs of this table, those of the mean. Empty: all are equal
    each: tuple["CostTable", ...] = ()
    # transfers at the end of actions of a kind and stage, whose time is added to their work
    carry: Mapping[tuple[Kind, int], tuple[Payload, ...]] = field(default_factory=dict)

    def at(self, microbatch: int | None) -> "CostTable":
        """The costs of a microbatch, which is counted over all steps."""
        return self if microbatch is None or not self.each else self.each[microbatch % len(self.each)]

    def hop_between(self, producer: Action, consumer: Action) -> Number:
        """Time of a boundary tensor between two actions on different devices."""
        one, other = (None if each.kind is Kind.OVERLAP else each.microbatch for each in (consumer, producer))
        return self.at(other if one is None else one).hop

    def of(self, kind: Kind, stage: int) -> Work:
        """The work of an action; communication and bookkeeping take no time. ScheduleError if its time is unknown."""
        if kind is Kind.STEP_REST:
            kind = Kind.STEP  # a payload says which part of the stage it is
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
        return Work(0)

    def of_payload(self, payload: Payload | None) -> Work | None:
        """Work of a transfer, on devices of every speed; None if its time does not follow from its bytes."""
        time = None if payload is None or self.transfer_time is None else self.transfer_time(payload)
        return None if time is None else Work(time)

    def of_order(self, shape: Shape) -> "CostTable":
        """The table for a shape: R is an action of its own if only every k-th stage keeps its input."""
        if shape.keeps_every == 1 or Kind.R in self.work:
            return self
        work = {**self.work, Kind.R: tuple(Work(own.pre) for own in self.work[Kind.B])}
        return replace(self, work=work, each=tuple(own.of_order(shape) for own in self.each))

    def together(self, members: Members) -> Work:
        """The work of actions that run together: all of it waits for their inputs."""
        if len(members) == 1:
            return self.of(*members[0])
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
        """The work of an action on a device, in a schedule that cuts sequences into `num_parts`."""
        works = [self.at(part.microbatch).of(part.kind, part.stage) for part in parts_of(action)]
        return self.on(device, self._beside(works, members_of(action)), num_parts)

    def on(self, device: int, work: Work, num_parts: int = 1) -> Work:
        """The work of one of a microbatch's `num_parts` on a device, from that of the whole microbatch."""
        if num_parts > 1:
            work = work.over(num_parts)
        return work.over(self.speeds[device]) if self.speeds else work


def members_of(action: Action) -> Members:
    """The (kind, stage) pairs that costs of an action are looked up by."""
    return tuple((part.kind, part.stage) for part in parts_of(action))


@dataclass(frozen=True)
class LayerTimes:
    """Times of one microbatch through each layer; the head and loss belong to the last stage.

    Raises ValueError if a time is negative, infinite or not a number, a speed is not above 0, or a gain not a share.
    """

    # forward, recompute, backward: per layer, in model order; `backward` excludes recomputation
    forward: Sequence[Number]
    recompute: Sequence[Number]
    backward: Sequence[Number]
    # head_forward, head_backward: norm, LM head and loss; never recomputed
    head_forward: Number = 0
    head_backward: Number = 0
    # input_grad, weight_grad, head_input_grad, head_weight_grad: the two halves of backward, where known
    input_grad: Sequence[Number] = ()
    weight_grad: Sequence[Number] = ()
    head_input_grad: Number = 0
    head_weight_grad: Number = 0
    # hop, overlap_gain, speeds: as in `CostTable`
    hop: Number = 0
    units_per_second: int = 1
    overlap_gain: Number = 0
    speeds: tuple[Number, ...] = ()
    # step, head_step: the optimizer's step for the weights of each layer and of the head; empty or 0: not known
    step: Sequence[Number] = ()
    head_step: Number = 0
    # part of every forward and every backward of a layer: the time that a rank loses per microbatch
    rank_loss: Number = 0
    beside: Number = 0  # slowdown of layers that run while weights come over a link, as a fraction
    # shards, shards_along: factors of forward, backward and head under tensor parallelism: seconds of all devices
    # together over those of whole layers; `along` with sequence parallelism too. Empty: the same
    shards: tuple[Number, ...] = ()
    shards_along: tuple[Number, ...] = ()
    # uncut, uncut_along: why layers cannot be cut into such shards; empty: they can, or it is not known
    uncut: str = ""
    uncut_along: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_gain <= 1:
            raise ValueError(f"overlap_gain={self.overlap_gain}: a share, from 0 (none is hidden) to 1 (all is)")
        if not all(speed >= LEAST_SPEED for speed in self.speeds):
            raise ValueError(
                f"speeds={list(self.speeds)}: numbers of at least {LEAST_SPEED}; 1 is a device as it was timed"
            )
        for name, value in vars(self).items():
            for time in () if isinstance(value, str) else value if isinstance(value, Sequence) else (value,):
                if not 0 <= time <= LONGEST:
                    raise ValueError(f"{name}={time!r}: times are finite and not negative, at most {LONGEST:g}")

    @property
    def num_layers(self) -> int:
        return len(self.forward)

    def of_whole_microbatches(self, num_ranks: int, *, gathers: bool) -> "LayerTimes":
        """The times on devices that run all layers: per microbatch, time is lost on one rank, not on all.

        `gathers`: whether weights of layers are gathered while other layers compute.
        """
        less, more = self.rank_loss * (num_ranks - 1) / num_ranks, 1 + self.beside * gathers
        if not less and more == 1:
            return self
        changed: dict[str, Any] = {
            name: [max(0, time - less * (name in _WITH_LOSS)) * more for time in getattr(self, name)]
            for name in OF_LAYERS
        }
        return replace(self, **changed, rank_loss=0, beside=0)

    def of_equal_layers(self) -> "LayerTimes":
        """The times with every layer as long as the mean."""
        num, lists = self.num_layers, {name: getattr(self, name) for name in OF_LAYERS}
        equal: dict[str, Any] = {name: [sum(times) / num] * num for name, times in lists.items() if times}
        return replace(self, **equal)

    def of_shards(self, *, along_sequence: bool) -> "LayerTimes":
        """The times of all shards together, where every device has a shard of every matrix."""
        factors = self.shards_along if along_sequence else self.shards
        if not factors:
            return self
        forward, backward, head = factors
        found: dict[str, Any] = {name: head * getattr(self, name) for name in OF_HEAD}
        for name in OF_LAYERS:
            factor = forward if name in ("forward", "recompute") else backward
            lost = self.rank_loss if name in _WITH_LOSS else 0  # a frozen layer loses nothing
            found[name] = [factor * max(0, time - lost) + min(time, lost) for time in getattr(self, name)]
        return replace(self, **found, shards=(), shards_along=())

    def frozen(self, num_layers: int) -> "LayerTimes":
        """The times with the first layers frozen: these have no recomputation, backward or step."""
        changed: dict[str, Any] = {
            name: [0] * num_layers + list(getattr(self, name)[num_layers:])
            for name in (*OF_LAYERS[1:], "step")
            if num_layers and getattr(self, name)
        }
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
        """Times per stage of a partition, and per shard of the head where it is cut over the devices.

        Raises ValueError if the partition does not cover the layers.

        Args:
            recompute_ahead, fused_ahead: as in `CostTable`.
            num_head_shards: equal shards of the head; 0: the last stage has the whole head.
            keeps_last: the last stage's backward recomputes nothing.
            keeps: layers of each backward stage that recompute nothing, the last of their stage; empty: none.
        """
        spared = [*keeps] or [0] * len(partition.backward)
        if keeps_last:
            spared[-1] = partition.backward[-1]
        if num_head_shards:
            return self._with_cut_head(partition, num_head_shards, recompute_ahead, spared)
        partition.check_layers(self.num_layers)
        cut = partition.backward_ranges()
        recomputed = [own[: len(own) - kept] for own, kept in zip(cut, spared, strict=True)]
        forward = _stages(partition.forward_ranges(), 0 if partition.fused else self.head_forward)
        work = {
            Kind.F: tuple(
                Work(total(self.forward, own) + head, num_records=len(own) + (head > 0)) for own, head in forward
            ),
            Kind.B: self._backward_works(cut, recomputed, recompute_ahead, self.backward, self.head_backward),
            Kind.FB: self._fused_works(cut),
        }
        if self.input_grad:
            work[Kind.I] = self._backward_works(cut, recomputed, recompute_ahead, self.input_grad, self.head_input_grad)
            work[Kind.W] = _plain_works(cut, self.weight_grad, self.head_weight_grad)
        if self.step:
            work[Kind.STEP] = _plain_works(cut, self.step, self.head_step)
        return CostTable(
            work, self.hop, recompute_ahead, fused_ahead, self.units_per_second, self.overlap_gain, self.speeds
        )

    def _with_cut_head(
        self, partition: Partition, num_shards: int, recompute_ahead: bool, keeps: Sequence[int]
    ) -> CostTable:
        """A table whose stages lack the head's work; every shard of the head has actions of its own."""
        without: dict[str, Any] = dict.fromkeys(OF_HEAD, 0)
        headless = replace(self, **without, head_step=0)
        found = headless.table(partition, recompute_ahead=recompute_ahead, keeps=keeps)
        shards = {
            Kind.HF: (Work(self.head_forward / num_shards, num_records=1),) * num_shards,
            Kind.HB: (Work(self.head_backward / num_shards, num_records=1),) * num_shards,
        }
        if self.step:  # each shard is updated in the STEP of a stage
            steps = enumerate(found.work[Kind.STEP])
            shards[Kind.STEP] = tuple(
                Work(own.main + (self.head_step / num_shards if stage < num_shards else 0)) for stage, own in steps
            )
        return replace(found, work={**found.work, **shards})

    def _backward_works(
        self,
        cut: Sequence[range],
        recomputed: Sequence[range],
        ahead: bool,
        gradient: Sequence[Number],
        head_gradient: Number,
    ) -> tuple[Work, ...]:
        works = []
        for (layers, head), again in zip(_stages(cut, head_gradient), recomputed, strict=True):
            first = pre = total(self.recompute, again)
            if not ahead:  # the head's backward, then each layer's, just after that layer is recomputed
                first = self.recompute[layers[-1]] if layers and again == layers and not head > 0 else 0
            records = len(layers) + len(again) * (pre > 0) + (head > 0)
            works.append(Work(total(gradient, layers) + head, pre, first, records))
        return tuple(works)

    def _fused_works(self, cut: Sequence[range]) -> tuple[Work, ...]:
        """Work of every backward stage as a fused one; only the last is ever fused."""
        works = []
        for layers in cut:
            pre = total(self.forward, layers) + self.head_forward
            main = total(self.backward, layers) + self.head_backward
            works.append(Work(main, pre, pre, 2 * len(layers) + (self.head_forward > 0) + (self.head_backward > 0)))
        return tuple(works)


def _stages(ranges: Sequence[range], head: Number) -> list[tuple[range, Number]]:
    """The layers of each stage, and the time of its head: that of the last stage alone is not 0."""
    return [(layers, head if number == len(ranges) - 1 else 0) for number, layers in enumerate(ranges)]


def _plain_works(cut: Sequence[range], times: Sequence[Number], head: Number) -> tuple[Work, ...]:
    """Work of every stage, without a part that may run ahead."""
    return tuple(Work(total(times, layers) + last) for layers, last in _stages(cut, head))


def total(times: Sequence[Number], layers: range) -> Number:
    """Time of a range of layers; equal times are multiplied, not added, as in the artifact's simulator."""
    if not layers:
        return 0
    chosen = times[layers.start : layers.stop]
    return len(chosen) * chosen[0] if min(chosen) == max(chosen) else sum(chosen)
