"""Bytes where replicas share a model or keep parts of it on the host: counted from a schedule's actions.

    weights             whole; a shard where they are gathered (UNSHARD); none where they come from the host for a visit
    gathered weights    what UNSHARD and LOAD:P bring before RESHARD and FREE:P take it: the peak of those lanes
    gradients           whole; a shard where they are scattered after every visit; none where they are stored (STORE:G)
    gradients on their way   of two backward visits in a row: one is made while the other is scattered or stored
    optimizer state     whole; a shard where gradients are scattered; none where the STEP stands on the host's lane

A gathered stage holds its device's own shard too. Of n devices each brings, keeps and updates 1/n. What stays is
exact; how many gradients are on their way depends on the links, and two stages are what a device has room for.

Source: Rajbhandari et al., "ZeRO", SC'20, section 5.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from rpbench.cost.sizes import LayerSize, ModelBytes
from rpbench.cost.transfers import StageBytes
from rpbench.ir.action import Kind
from rpbench.ir.cargo import cargo_of
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule, Weights
from rpbench.ir.visits import Visit, visits_of

_SHARING = frozenset({Kind.UNSHARD, Kind.REDUCE_GRAD})


def shares_or_offloads(schedule: Schedule) -> bool:
    """Whether anything but activations moves between devices, or to the host."""
    return any(
        action.kind in _SHARING or action.object in ("P", "G") for _, _, row in schedule.items() for action in row
    )


def classes_of(schedule: Schedule, sizes: ModelBytes, in_flight: Sequence[int]) -> list[dict[str, int]]:
    """Bytes of each class of tensors on every device; arguments as of `rpbench.cost.memory.classes_of`."""
    replicas = _Replicas(schedule, sizes)
    return [replicas.classes(device, number) for device, number in enumerate(in_flight)]


def host_bytes(schedule: Schedule, sizes: ModelBytes) -> int:
    """Bytes at home on the host: what is loaded for every visit, stored, or updated there.

    Streamed schedules keep everything there, and of every microbatch of a step the inputs they recompute from.
    """
    if schedule.partition is None:
        raise ValueError("the bytes of a schedule follow from its layers: give it a partition first")
    stages = range(schedule.shape.num_backward_stages)
    if schedule.weights is Weights.STREAMED:
        kept = sizes.boundary * (len(stages) - 1) * schedule.shape.num_microbatches
        return kept + sum(sum(layer[:3]) for layer in (*sizes.layers, sizes.embedding, sizes.head))
    if not shares_or_offloads(schedule):
        return 0
    replicas = _Replicas(schedule, sizes)
    return sum(replicas.host_bytes(stage) for stage in stages)


class _Replicas:
    def __init__(self, schedule: Schedule, sizes: ModelBytes) -> None:
        assert schedule.partition is not None
        self._index, self._sizes = Index(schedule), sizes
        self._moves = self._index.moves
        self._stages = StageBytes(schedule.partition, sizes)
        self._visits = visits_of(self._index)
        self._steps = {  # stage -> whether the host updates it
            self._index.actions[number].stage: self._index.lanes[self._index.lane_of[number]].name == "host"
            for number in self._index.steps.values()
        }
        self._loaded = {stage for _, stage in self._served_by_visit((Kind.LOAD, "P"))}
        self._leaving = self._served_by_visit((Kind.REDUCE_GRAD, None), (Kind.STORE, "G"))
        self._arrivals = {  # number -> bytes of weights it brings for a while
            number: Fraction(self._stages.of(cargo))
            for number, cargo in cargo_of(self._index).items()
            if self._index.actions[number].kind is Kind.UNSHARD or (cargo.object == "P" and cargo.stage in self._loaded)
        }

    def size(self, stage: int) -> LayerSize:
        return self._stages.stage(stage, backward=True)

    def classes(self, device: int, in_flight: int) -> dict[str, int]:
        """Bytes of each class on a device."""
        visits = self._visits[device]
        held = sorted({visit.stage for visit in visits})
        found: dict[str, Fraction] = {
            "weights": sum((self.size(stage).weights * self._kept_weights(stage) for stage in held), Fraction(0)),
            "gathered weights": self._peak(device, "net") + self._peak(device, "h2d"),
            "gradients": sum(
                (self.size(stage).gradients * self._kept_gradients(device, stage) for stage in held), Fraction(0)
            ),
            "gradients on their way": self._passing(device, visits),
            "optimizer state": sum(
                (self.size(stage).optimizer * self._kept_state(stage) for stage in held), Fraction(0)
            ),
            "kept stage inputs": Fraction(in_flight * self._sizes.boundary),
            "recomputed activations": Fraction(max((self.size(stage).activations for stage in held), default=0)),
            "logits": Fraction(self._sizes.logits * (self._index.shape.num_stages - 1 in held)),
        }
        return {name: round(number) for name, number in found.items()}

    def host_bytes(self, stage: int) -> int:
        """Bytes of a stage at home on the host."""
        size, found = self.size(stage), 0
        found += size.weights * (not self._kept_weights(stage))
        found += size.gradients * self._moves.moves((Kind.STORE, "G"), stage)
        return found + size.optimizer * self._steps.get(stage, False)

    # --- what stays on a device ---

    def _kept_weights(self, stage: int) -> Fraction:
        if stage in self._loaded:
            return Fraction(0)
        gathered = self._moves.moves((Kind.UNSHARD, None), stage)
        return Fraction(1, self._moves.replicas.get(stage, 1)) if gathered else Fraction(1)

    def _kept_gradients(self, device: int, stage: int) -> Fraction:
        if not self._leaves_after_visits(device, stage):
            return Fraction(1)
        if self._moves.moves((Kind.STORE, "G"), stage):
            return Fraction(0)
        return Fraction(1, self._moves.replicas.get(stage, 1))

    def _kept_state(self, stage: int) -> Fraction:
        if self._steps.get(stage, False):
            return Fraction(0)
        shared = self._moves.moves((Kind.UNSHARD, None), stage)
        return Fraction(1, self._moves.replicas.get(stage, 1)) if shared else Fraction(1)

    def _leaves_after_visits(self, device: int, stage: int) -> bool:
        """Whether a gradient is scattered or stored after every visit that makes it; sums of replicas stay whole."""
        shared = self._moves.moves((Kind.UNSHARD, None), stage) or self._moves.moves((Kind.STORE, "G"), stage)
        return shared and (device, stage) in self._leaving

    def _served_by_visit(self, *kinds: tuple[Kind, str | None]) -> set[tuple[int, int]]:
        """(device, stage) whose transfers of some kinds all serve one visit."""
        found = {
            (move.visits[0].device, move.visits[0].stage) for what in kinds for move in self._moves.transfers[what]
        }
        shared = (move.visits[0] for what in kinds for move in self._moves.transfers[what] if len(move.visits) > 1)
        return found - {(visit.device, visit.stage) for visit in shared}

    # --- what comes and goes ---

    def _peak(self, device: int, name: str) -> Fraction:
        """The most weights that a lane has brought and not taken away again."""
        brought: dict[int, deque[Fraction]] = defaultdict(deque)  # stage -> what is there, oldest first
        level = peak = Fraction(0)
        for number in self._lane(device, name):
            action = self._index.actions[number]
            if number in self._arrivals:
                if action.part == 0:
                    brought[action.stage].append(Fraction(0))
                brought[action.stage][-1] += self._arrivals[number]
                level += self._arrivals[number]
            elif (action.kind is Kind.RESHARD or action.object == "P") and brought[action.stage]:
                level -= brought[action.stage].popleft()
            peak = max(peak, level)
        return peak

    def _lane(self, device: int, name: str) -> range:
        found = (lane for lane in self._index.lanes if (lane.device, lane.name) == (device, name))
        return next((range(lane.start, lane.stop) for lane in found), range(0))

    def _passing(self, device: int, visits: Sequence[Visit]) -> Fraction:
        """Gradients of backward visits that follow each other, where they leave after each."""
        made = [visit for visit in visits if visit.last_gradient >= 0]
        bytes_ = [self.size(visit.stage).gradients * (self._kept_gradients(device, visit.stage) < 1) for visit in made]
        pairs = [first + second for first, second in pairwise([*bytes_, 0])]
        return Fraction(max(pairs, default=0))
