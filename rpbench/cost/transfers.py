"""Transfers: bytes and seconds of what goes over links, by the rows of `rpbench.cost.charges`.

Bytes are counted from actions, never from a formula: every action that uses a link carries a share of a stage's
weights, gradients or optimizer state, or a boundary tensor of one microbatch (`rpbench.ir.moved_objects.Payload`). A
stage that recomputes saves one boundary tensor; one that recomputes nothing moves all its activations.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING

from rpbench.cost.charges import CHARGES, cause_of, computations_that_carry, is_collective
from rpbench.cost.footprint.sizes import OPTIMIZER_BYTES, LayerSize, ModelBytes, saved_state
from rpbench.cost.rings import ring_hops
from rpbench.cost.table import CostTable, Number, Work, members_of
from rpbench.ir.action import RECV, SEND, Kind
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.moved_objects import LINKS, Payload
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule, Weights
from rpbench.workload.counts import BYTES_PER_VALUE

if TYPE_CHECKING:
    from rpbench.cost.hardware.machine import Machine


class StageBytes:
    """Bytes of the stages of a partition.

    Args:
        keeps: layers of each backward stage that recompute nothing, the last of their stage; empty: none; None: all or
            none, as `sizes` says.
        num_head_shards: stages that have a shard of embedding and head each; 0: both are whole.
    """

    def __init__(
        self, partition: Partition, sizes: ModelBytes, keeps: Sequence[int] | None = None, num_head_shards: int = 0
    ) -> None:
        partition.check_layers(sizes.num_layers)
        everything = partition.backward if sizes.keeps_activations else ()
        self._sizes, self._keeps = sizes, tuple(everything if keeps is None else keeps)
        self._layers = partition.backward_ranges()
        shards = num_head_shards
        self._forward = _stages(partition.forward_ranges(), sizes, has_head=not partition.fused, num_shards=shards)
        self._backward = _stages(partition.backward_ranges(), sizes, has_head=True, num_shards=shards)

    def of(self, payload: Payload) -> Number:
        """Bytes that an action carries over the link of its device."""
        if payload.object == "A" and any(self._keeps[payload.stage : payload.stage + 1]):
            return _part(self._activations(payload.stage), payload.share)
        stages = self._backward if payload.backward else self._forward
        stage = stages[min(payload.stage, len(stages) - 1)]  # a fused stage receives as the one after the last
        amount = CHARGES[payload.object].bytes_of(stage, self._sizes)
        if payload.object == "G" and payload.lane == "net":
            amount = amount * self._sizes.reduced_bytes // BYTES_PER_VALUE
        return _part(amount, payload.share)

    def _activations(self, stage: int) -> Number:
        """Bytes of one microbatch that a stage keeps: activations of some layers, inputs of the others, logits."""
        own, sizes = self._layers[stage], self._sizes.layers
        first = len(own) - self._keeps[stage]
        kept = sum(sizes[layer].activations for layer in own[first:])
        if first > 0:
            kept += sum(sizes[layer].inputs for layer in own[:first]) or self._sizes.boundary
        return kept + self._sizes.logits * (stage == len(self._layers) - 1)

    def stage(self, number: int, *, backward: bool) -> LayerSize:
        """Bytes of a forward or a backward stage."""
        return (self._backward if backward else self._forward)[number]


def _part(amount: int, share: Fraction) -> Number:
    """A share of some bytes; a whole number where it is one, for fractions are slow."""
    return amount * share.numerator if share.denominator == 1 else amount * share


def moved_bytes(
    schedule: Schedule | Analysis,
    sizes: ModelBytes,
    keeps: Sequence[int] | None = None,
    carry: Mapping[tuple[Kind, int], Sequence[Payload]] | None = None,
) -> list[dict[str, int]]:
    """Bytes over the links of each device by lane and kind, such as `h2d LOAD:P`, for the whole schedule.

    Args:
        keeps: as of `StageBytes`.
        carry: what computations end with, as of `CostTable`.

    Raises:
        ValueError: if the schedule has no partition.
    """
    analysis = analysed(schedule)
    partition, index = analysis.schedule.partition, analysis.index
    if partition is None:
        raise ValueError("the bytes of a transfer follow from its layers: give the schedule a partition first")
    shards = analysis.schedule.shape.num_head_shards
    stages = [StageBytes(partition, own, keeps, shards) for own in sizes.under(analysis.schedule).of_each]

    def bytes_of(number: int, payload: Payload) -> Number:
        return stages[(index.actions[number].microbatch or 0) % len(stages)].of(payload)

    found: list[dict[str, Number]] = [defaultdict(int) for _ in range(analysis.schedule.shape.num_ranks)]
    for number, payload in analysis.payload.items():
        if payload.lane not in LINKS:
            continue
        action = index.actions[number]
        what = f"{action.kind.name}:{action.object}" if action.object else action.kind.name
        found[index.device(number)][f"{payload.lane} {what}"] += bytes_of(number, payload)
    for number, action in enumerate(index.actions) if carry else ():
        for payload in (payload for member in members_of(action) for payload in (carry or {}).get(member, ())):
            found[index.device(number)][f"{payload.lane} {payload.object}"] += bytes_of(number, payload)
    return [{what: round(moved) for what, moved in sorted(device.items())} for device in found]


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of transfers that have their links to themselves: latency, and bytes at the pace of the link.

    Args:
        units_per_second: 1000 for times in milliseconds.
        optimizer: None: a STEP on lane host takes what the costs say.
        free: causes of a step whose transfers carry nothing.
        on_ssd: as of a `Schedule`.
        num_parts: devices that share every matrix.
    """

    stages: StageBytes
    cluster: "Machine"
    units_per_second: int = 1
    optimizer: "OptimizerTraffic | None" = None
    free: frozenset[str] = frozenset()
    on_ssd: str = ""
    num_parts: int = 1

    def __call__(self, payload: Payload) -> float | None:
        """Time of one action on its link, 0 if it carries nothing; None if its bytes do not decide."""
        if payload.lane == "host" and self.optimizer is None:
            return None
        carried, pace = self.bytes_of(payload), self.bytes_per_s(payload)
        seconds = self.cluster.transfer_latency_s + max(carried / pace if pace else 0.0, self.ssd_s(payload))
        return seconds * self.units_per_second if carried else 0.0

    def ssd_s(self, payload: Payload) -> float:
        """Seconds of the host's SSDs that an action takes: a STEP reads states and writes them, a load reads weights.

        What is read, worked on and written back goes in pieces, beside each other, and as the SSDs let it.
        """
        ssd = self.cluster.ssd
        if ssd is None or not self.on_ssd:
            return 0.0
        if payload.lane == "host":
            stage = self.stages.stage(payload.stage, backward=payload.backward)
            state, weights = (float(_part(size, payload.share)) for size in (stage.optimizer, stage.gradients))
            return ssd.seconds(state, state + weights * ("P" in self.on_ssd))  # new weights are as large as gradients
        reads = payload.object == "P" and payload.lane == "h2d" and "P" in self.on_ssd
        return ssd.seconds(float(self.stages.of(payload)), 0.0) if reads else 0.0

    @cached_property
    def _known(self) -> dict[int, tuple[Payload, float]]:
        return {}

    def bytes_of(self, payload: Payload) -> float:
        """Bytes that an action moves over its link, or through the host's memory; found once for an object."""
        if id(payload) not in self._known:
            self._known[id(payload)] = payload, self._bytes_of(payload)  # held, so that its id stays its own
        return self._known[id(payload)][1]

    def _bytes_of(self, payload: Payload) -> float:
        """The same, each time anew.

        Collectives move what would pass during their hops' latency too, and of sums only what nothing hides.
        """
        if self.free and cause_of(payload) in self.free:
            return 0.0
        found, own = float(self.stages.of(payload)), self.optimizer
        if payload.lane != "host":
            if own and found and own.hop_latency_s and is_collective(payload):
                found += self._hops(payload) * own.hop_latency_s * (self.bytes_per_s(payload) or 0.0)
            return found * (1 - own.hidden_sums) if own and payload.object == "sum" else found
        saved = float(_part(saved_state(self.stages.stage(payload.stage, backward=payload.backward)), payload.share))
        return (found + saved) / OPTIMIZER_BYTES * (own.on_host if own else 0.0) - 2 * saved

    def _hops(self, payload: Payload) -> float:
        """Hops whose latency is seen, of all the rings of a collective: of n devices each sends (n - 1) / n in one."""
        if payload.object == "sum":
            return float(payload.share) * self.num_parts / (self.num_parts - 1) * ring_hops(self.num_parts)
        sent, whole = payload.share.as_integer_ratio()
        rings = 1 if sent < whole else 2  # a gather or a scatter, or both
        size = round(Fraction(rings * whole, rings * whole - sent)) if sent < rings * whole else 1
        return rings * ring_hops(size)

    def bytes_per_s(self, payload: Payload) -> float | None:
        """The pace of a link alone; None without limit. What all devices exchange goes at that of collectives."""
        if payload.lane == "host":
            return self.cluster.host_bytes_per_s
        if self.cluster.collective_bytes_per_s and is_collective(payload):
            return self.cluster.collective_bytes_per_s
        return self.cluster.link_bytes_per_s(payload.lane)


def _stages(ranges: Sequence[range], sizes: ModelBytes, *, has_head: bool, num_shards: int) -> list[LayerSize]:
    found, ends = [], (sizes.embedding, sizes.head)
    shard = [LayerSize(*(-(-size // num_shards) for size in end)) for end in ends] if num_shards else []
    for number, layers in enumerate(ranges):
        held = [sizes.layers[layer] for layer in layers]
        if shard:
            held += shard if number < num_shards else []
        else:
            held += [sizes.embedding] * (number == 0) + [sizes.head] * (has_head and number == len(ranges) - 1)
        found.append(
            LayerSize(*map(sum, zip(*held, strict=True))) if held else LayerSize(*[0] * len(LayerSize._fields))
        )
    return found


@dataclass(frozen=True)
class OptimizerTraffic:
    """Bytes of memory traffic for each trained parameter, and the pace of a device's memory.

    Args:
        on_host: where the host's optimizer works.
        on_device: where a device updates what it holds; of both a byte of state is read and written, so that smaller
            moments save twice their bytes.
        device_bytes_per_s: what element-wise kernels get of a device's memory.
        beside_s: seconds of a device's steps that do not follow from its parameters: norm, logging, data.
        beside: loss of computations that run beside a collective, as a share of its seconds.
        tied_s: seconds of a sum of a tied matrix's gradients over the devices of its two ends.
        hop_latency_s: of one hop of a collective's ring.
        hidden_sums: the part of sums over shares of matrices that computation hides.
    """

    on_host: float
    on_device: float
    device_bytes_per_s: float
    beside_s: float = 0.0
    beside: float = 0.0
    tied_s: float = 0.0
    hop_latency_s: float = 0.0
    hidden_sums: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """What is charged for a model's transfers on a cluster.

    Args:
        boundaries: whether boundary tensors travel as transfers, so that hops take no time besides; None: they do where
            they stand in lanes of the schedule, or weights come to them; a device that has all stages hands none over.
        optimizer: None: it takes what the costs say, and computations end with nothing.
    """

    sizes: ModelBytes
    cluster: "Machine"
    boundaries: bool | None = None
    optimizer: OptimizerTraffic | None = None

    def times(self, schedule: Schedule, units_per_second: int, keeps: Sequence[int] | None = None) -> TransferTimes:
        """Times of the transfers of a schedule whose partition is known; `keeps` as of `StageBytes`."""
        assert schedule.partition is not None
        stages = StageBytes(schedule.partition, self.sizes.under(schedule), keeps, schedule.shape.num_head_shards)
        parts = 1 if self.optimizer is None else schedule.shape.num_parts
        return TransferTimes(
            stages, self.cluster, units_per_second, self.optimizer, on_ssd=schedule.on_ssd, num_parts=parts
        )

    def activation_times(self, partition: Partition, units_per_second: int) -> tuple[tuple[float, ...], ...]:
        """Times of the activations that a backward stage of each number keeps of a microbatch: to the host, and back.

        Of a device that has its links to itself.
        """
        times = TransferTimes(StageBytes(partition, self.sizes), self.cluster, units_per_second)
        return tuple(
            tuple(
                times(Payload("A", stage, True, Fraction(1), lane)) or 0.0 for stage in range(len(partition.backward))
            )
            for lane in ("d2h", "h2d")
        )

    def charged(self, schedule: Schedule, costs: CostTable, keeps: Sequence[int] | None = None) -> CostTable:
        """The costs with what the transfers and the optimizer of a schedule take.

        Args:
            keeps: as of `StageBytes`; whole activations of these layers move.
        """
        if costs.each:
            pairs = list(zip(costs.each, self.sizes.of_each, strict=True))
            alike = {(id(table), id(sizes)): (table, sizes) for table, sizes in pairs}
            own = {
                key: replace(self, sizes=sizes).charged(schedule, table, keeps) for key, (table, sizes) in alike.items()
            }
            costs = replace(costs, each=tuple(own[id(table), id(sizes)] for table, sizes in pairs))
        times = self.times(schedule, costs.units_per_second, keeps)
        work, carry = dict(costs.work), costs.carry
        if self.optimizer is not None:
            work[Kind.STEP] = self._steps(schedule, times.stages, costs.units_per_second)
            work |= slowed_by_exchanges(schedule, work, times, self.optimizer.beside)
            carry = computations_that_carry(schedule)
        hop = 0 if self._boundaries_of(schedule) else costs.hop
        return replace(costs, work=work, transfer_time=times, hop=hop, carry=carry)

    def _boundaries_of(self, schedule: Schedule) -> bool:
        if self.boundaries is not None:
            return self.boundaries
        alone = bool(schedule.placement) and all(len(holders) > 1 for holders in schedule.placement)
        return alone or schedule.weights is Weights.STREAMED or not schedule.kinds.isdisjoint(SEND | RECV)

    def _steps(self, schedule: Schedule, stages: StageBytes, units_per_second: int) -> tuple[Work, ...]:
        """Steps on devices, by stage. One STEP stands for those of all replicas, of a shard or of the whole stage each;
        the devices take turns with them, and of whole stages each device updates as much as any other. Where the ends
        of a tied matrix are apart, their sum comes before.
        """
        assert self.optimizer is not None
        rate = self.optimizer.device_bytes_per_s
        pace = rate * OPTIMIZER_BYTES / self.optimizer.on_device
        num_stages = schedule.shape.num_backward_stages
        beside = self.optimizer.beside_s

        def seconds(stage: LayerSize) -> float:
            saved = saved_state(stage)
            return (stage.optimizer + saved) / pace - 2 * saved / rate

        own = [seconds(stages.stage(number, backward=True)) for number in range(num_stages)]
        found = [each + beside * schedule.shape.num_ranks / num_stages for each in own]  # a device has several
        for steps, held in _whole_copies(schedule):
            for number in steps:
                found[number] = (sum(own[other] for other in held) + beside) / len(steps)
        if self.optimizer.tied_s and not schedule.ends_together:
            found[0] += self.optimizer.tied_s  # the last gradient of a step; the other end waits for it
        whole = units_per_second * schedule.shape.num_parts  # actions are timed as parts, and a step has none
        return tuple(Work(each * whole) for each in found)


def slowed_by_exchanges(
    schedule: Schedule, work: Mapping[Kind, Sequence[Work]], times: Callable[[Payload], Number | None], beside: float
) -> dict[Kind, tuple[Work, ...]]:
    """What replicas compute beside their sums, and beside gathers of a step; nothing for other schedules.

    Where weights are gathered for every visit, layers have the loss already (`LayerTimes.of_whole_microbatches`).

    Args:
        beside: loss of computations that run beside a collective, as a share of its seconds.
    """
    shape, net = schedule.shape, schedule.lanes[0].get("net", ())
    n = shape.num_ranks * shape.outer_replicas
    if not (beside and net and n > 1 and len(schedule.placement)):
        return {}
    if any(len(holders) < shape.num_ranks for holders in schedule.placement) or schedule.weights is Weights.STREAMED:
        return {}
    kinds, found = Counter(map(itemgetter(0), net)), dict[Kind, tuple[Work, ...]]()
    microbatches = shape.total_microbatches / shape.num_ranks  # of a device
    if kinds[Kind.UNSHARD] > shape.num_stages * microbatches:
        return {}
    for exchange, kind, name in ((Kind.REDUCE_GRAD, Kind.B, "G"), (Kind.UNSHARD, Kind.F, "P")):
        each = kinds[exchange] / shape.num_stages / microbatches  # of a computation
        if not each:
            continue
        share = Fraction(n - 1, n) * (2 if name == "G" and Kind.UNSHARD not in kinds else 1)
        found[kind] = tuple(
            own._replace(
                main=own.main + beside * each * (times(Payload(name, stage, kind is Kind.B, share, "net")) or 0.0)
            )
            for stage, own in enumerate(work[kind])
        )
    return found


def _whole_copies(schedule: Schedule) -> list[tuple[list[int], list[int]]]:
    """Of devices that each update all of the stages they have copies of: whose STEPs stand there, and which they have.

    Empty where devices share the states of a stage, or each stage is on one of them.
    """
    shares = schedule.shape.tensor_parallel or Kind.UNSHARD in schedule.kinds
    moves = any(what == "P" for _, what in schedule.moves)
    if shares or moves or not schedule.placement or any(len(holders) == 1 for holders in schedule.placement):
        return []
    found = []
    for device in range(schedule.shape.num_ranks):
        row = schedule.compute(device)
        steps = list(dict.fromkeys(action.stage for action in row if action.kind is Kind.STEP))
        held = [stage for stage, holders in enumerate(schedule.placement) if device in holders]
        found += [(steps, held)] if steps else []
    return found
