"""Transfers: bytes over links and their seconds, by the rows of `rpbench.cost.charges`.

Bytes are counted from actions, never from a formula: every action on a link moves a fraction of a stage's weights,
gradients or optimizer state, or a boundary tensor of one microbatch (`rpbench.ir.moved_objects.Payload`). A stage that
recomputes saves one boundary tensor; one that recomputes nothing moves all its activations.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import itemgetter
from typing import TYPE_CHECKING, Any

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

Demand = tuple[float, float | None, float]  # bytes, bytes a second of its link alone (None: no limit), seconds of SSDs
# A tied matrix's gradients, summed before the step of stage 0, once both ends of a drained pipeline have theirs.
TIED = Payload("tied", 0, True, Fraction(1), "net")


class StageBytes:
    """Bytes of the stages of a partition.

    Args:
        keeps: layers of each backward stage that recompute nothing, the last of their stage; empty: none; None: all or
            none, by `sizes.keeps_activations`.
        num_head_shards: stages that have a shard of embedding and head each; 0: both are whole.
    """

    def __init__(
        self, partition: Partition, sizes: ModelBytes, keeps: Sequence[int] | None = None, num_head_shards: int = 0
    ) -> None:
        partition.check_layers(sizes.num_layers)
        everything = partition.backward if sizes.keeps_activations else ()
        self._sizes, self._keeps = sizes, tuple(everything if keeps is None else keeps)
        self._layers = partition.backward_ranges()
        self._forward = _stages(partition.forward_ranges(), sizes, num_head_shards, has_head=not partition.fused)
        alike = partition.forward == partition.backward and not partition.fused
        self._backward = self._forward if alike else _stages(self._layers, sizes, num_head_shards)

    def of(self, payload: Payload) -> Number:
        """Bytes that an action moves over the link of its device."""
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
        layers = [self._sizes.layers[layer] for layer in self._layers[stage]]
        first = len(layers) - self._keeps[stage]
        kept = sum(layer.activations for layer in layers[first:])
        if first > 0:
            kept += sum(layer.inputs for layer in layers[:first]) or self._sizes.boundary
        return kept + self._sizes.logits * (stage == len(self._layers) - 1)

    def stage(self, number: int, *, backward: bool) -> LayerSize:
        """Bytes of a forward or a backward stage."""
        return (self._backward if backward else self._forward)[number]


def _part(amount: int, share: Fraction) -> Number:
    """A fraction of some bytes; an integer where it can be one, because fractions are slow."""
    return amount * share.numerator if share.denominator == 1 else amount * share


def moved_bytes(
    schedule: Schedule | Analysis,
    sizes: ModelBytes,
    keeps: Sequence[int] | None = None,
    carry: Mapping[tuple[Kind, int], Sequence[Payload]] | None = None,
) -> list[dict[str, int]]:
    """Bytes over the links of each device in the whole schedule, by lane and kind, such as `h2d LOAD:P`.

    Raises ValueError if the schedule has no partition.

    Args:
        keeps: as in `StageBytes`.
        carry: transfers at the end of computations, as in `CostTable`.
    """
    analysis = analysed(schedule)
    order, index = analysis.schedule, analysis.index
    each = sizes.under(order).of_each
    stages = [StageBytes(order.cut, own, keeps, order.shape.num_head_shards) for own in each]
    found: list[dict[str, Number]] = [defaultdict(int) for _ in range(order.shape.num_ranks)]

    def count(number: int, payload: Payload, name: str) -> None:
        own = stages[(index.actions[number].microbatch or 0) % len(stages)]
        found[index.device(number)][f"{payload.lane} {name}"] += own.of(payload)

    for number, payload in analysis.payload.items():
        if payload.lane in LINKS:
            action = index.actions[number]
            count(number, payload, f"{action.kind.name}:{action.object}" if action.object else action.kind.name)
    for number, action in enumerate(index.actions) if carry else ():
        for payload in (payload for member in members_of(action) for payload in (carry or {}).get(member, ())):
            count(number, payload, payload.object)
    return [{name: round(moved) for name, moved in sorted(device.items())} for device in found]


@dataclass(frozen=True)
class TransferTimes:
    """Times of transfers without others on their links: latency, and bytes at the bandwidth of the link."""

    stages: StageBytes
    cluster: "Machine"
    units_per_second: int = 1  # 1000 for times in milliseconds
    optimizer: "OptimizerTraffic | None" = None  # None: a STEP on lane host takes the time in the costs
    free: frozenset[str] = frozenset()  # causes of a step (`cause_of`) whose transfers count as empty
    on_ssd: str = ""  # as in `Schedule`
    num_parts: int = 1  # devices with a shard of every matrix
    _known: dict[int, tuple[Payload, Demand]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, payload: Payload) -> float | None:
        """Time of one action on its link, 0 if it moves nothing; None if its time does not follow from its bytes."""
        if payload.lane == "host" and self.optimizer is None:
            return None
        if payload.object == TIED.object:
            assert self.optimizer is not None
            seconds = 0.0 if cause_of(payload) in self.free else self.optimizer.tied_s
            return seconds * self.units_per_second * self.num_parts  # divided by the parts, and a step has none
        moved, rate, ssd_s = self.demand(payload)
        seconds = self.cluster.transfer_latency_s + max(moved / rate if rate else 0.0, ssd_s)
        return seconds * self.units_per_second if moved else 0.0

    def ssd_s(self, payload: Payload) -> float:
        """Seconds of the host's SSDs that an action takes: a STEP reads and writes states, a load reads weights.

        Reading, computing and writing are cut into pieces and overlap.
        """
        ssd = self.cluster.ssd
        if ssd is None or not self.on_ssd:
            return 0.0
        if payload.lane == "host":
            stage = self.stages.stage(payload.stage, backward=payload.backward)
            state, weights = (float(_part(size, payload.share)) for size in (stage.optimizer, stage.gradients))
            return ssd.seconds(state, state + weights * ("P" in self.on_ssd))  # trained weights: as large as gradients
        reads = payload.object == "P" and payload.lane == "h2d" and "P" in self.on_ssd
        return ssd.seconds(float(self.stages.of(payload)), 0.0) if reads else 0.0

    def bytes_of(self, payload: Payload) -> float:
        """Bytes that an action moves over its link, or through the host's memory.

        Collectives also count the bytes that would pass during the latency of their hops. Sums count the part that no
        computation hides.
        """
        return self.demand(payload)[0]

    def demand(self, payload: Payload) -> Demand:
        """`bytes_of`, `bytes_per_s` and `ssd_s` of a payload, computed once."""
        if id(payload) not in self._known:  # the payload is kept so that no other gets its id
            found = self._bytes_of(payload), self.bytes_per_s(payload), self.ssd_s(payload)
            self._known[id(payload)] = payload, found
        return self._known[id(payload)][1]

    def _bytes_of(self, payload: Payload) -> float:
        if self.free and cause_of(payload) in self.free:
            return 0.0
        found, own = float(self.stages.of(payload)), self.optimizer
        if payload.lane != "host":
            if own and found and own.hop_latency_s and is_collective(payload):
                found += self._hops(payload) * own.hop_latency_s * (self.bytes_per_s(payload) or 0.0)
            return found * (1 - own.hidden_sums) if own and payload.object == "sum" else found
        if own is None:
            return 0.0  # the costs have its time
        saved = float(_part(saved_state(self.stages.stage(payload.stage, backward=payload.backward)), payload.share))
        return own.host_bytes(found, saved)

    def _hops(self, payload: Payload) -> float:
        """Hops whose latency counts, in all rings of a collective; in one ring, each of n devices sends (n - 1) / n."""
        if payload.object == "sum":
            return float(payload.share) * self.num_parts / (self.num_parts - 1) * ring_hops(self.num_parts)
        sent, whole = payload.share.as_integer_ratio()
        rings = 1 if sent < whole else 2  # a gather or a scatter, or both
        size = round(rings * whole / (rings * whole - sent)) if sent < rings * whole else 1
        return rings * ring_hops(size)

    def bytes_per_s(self, payload: Payload) -> float | None:
        """Bandwidth of a link for one transfer, or of collectives for an exchange of all devices; None: no limit."""
        if payload.lane == "host":
            return self.cluster.host_bytes_per_s
        if self.cluster.collective_bytes_per_s and is_collective(payload):
            return self.cluster.collective_bytes_per_s
        return self.cluster.link_bytes_per_s(payload.lane)


def _stages(ranges: Sequence[range], sizes: ModelBytes, num_shards: int, *, has_head: bool = True) -> list[LayerSize]:
    """Bytes of stages with these layers; the first `num_shards` of them have a shard of embedding and head."""
    found = []
    for number, layers in enumerate(ranges):
        held = [LayerSize(0, 0, 0), *(sizes.layers[layer] for layer in layers)]
        if not num_shards:
            held += [sizes.embedding] * (number == 0) + [sizes.head] * (has_head and number == len(ranges) - 1)
        elif number < num_shards:
            held += [LayerSize(*(-(-size // num_shards) for size in end)) for end in (sizes.embedding, sizes.head)]
        found.append(LayerSize(*map(sum, zip(*held, strict=True))))
    return found


@dataclass(frozen=True)
class OptimizerTraffic:
    """Bytes of memory traffic per trained parameter, and figures of a step that go with it."""

    # on_host, on_device: bytes per parameter for an optimizer on the host, and on a device. Both read and write every
    # byte of state, so that smaller moments save twice their bytes
    on_host: float
    on_device: float
    device_bytes_per_s: float  # bandwidth of a device's memory under element-wise kernels
    beside_s: float = 0.0  # seconds of a device's step that do not follow from its parameters: norm, logging, data
    beside: float = 0.0  # slowdown of computations beside a collective, as a fraction of the collective's seconds
    tied_s: float = 0.0  # seconds to sum the gradients of a tied matrix over the devices of embedding and head
    hop_latency_s: float = 0.0  # of one hop of a collective's ring
    hidden_sums: float = 0.0  # fraction of sums over shards of matrices that computation hides

    def host_bytes(self, state: float, saved: float) -> float:
        """Traffic of the host's memory for an update of so much state, smaller by `saved` than in 32 bits."""
        return (state + saved) / OPTIMIZER_BYTES * self.on_host - 2 * saved

    @property
    def state_bytes_per_s(self) -> float:
        """Bytes of state, in 32 bits, that a device's step goes through in a second."""
        return self.device_bytes_per_s * OPTIMIZER_BYTES / self.on_device

    def with_tied_ends(self, schedule: Schedule) -> Schedule:
        """The schedule whose ends sum a tied matrix's gradients, if that takes time and they are on two devices."""
        return replace(schedule, tied=True) if self.tied_s and not schedule.ends_together else schedule

    def device_step_s(self, size: LayerSize) -> float:
        """Seconds of a device's step of a layer or a stage."""
        saved = saved_state(size)
        return (size.optimizer + saved) / self.state_bytes_per_s - 2 * saved / self.device_bytes_per_s


@dataclass(frozen=True)
class Traffic:
    """The transfers that are charged for a model on a cluster."""

    sizes: ModelBytes
    cluster: "Machine"
    # whether boundary tensors are transfers, and hops take no time; None: they are where the schedule has them in
    # lanes or streams its weights, and where every stage has several devices, with no hop in between
    boundaries: bool | None = None
    # None: it takes the time in the costs, and computations end without an exchange
    optimizer: OptimizerTraffic | None = None

    def times(self, schedule: Schedule, units_per_second: int, keeps: Sequence[int] | None = None) -> TransferTimes:
        """Times of the transfers of a schedule whose partition is known; `keeps` as in `StageBytes`."""
        shape = schedule.shape
        stages = StageBytes(schedule.cut, self.sizes.under(schedule), keeps, shape.num_head_shards)
        more: dict[str, Any] = {"on_ssd": schedule.on_ssd, "num_parts": shape.num_parts}
        return TransferTimes(stages, self.cluster, units_per_second, self.optimizer, **more)

    def activation_times(self, partition: Partition, units_per_second: int) -> tuple[tuple[float, ...], ...]:
        """Times to move a microbatch's saved activations to the host and back over free links, (2, backward stages)."""
        times = TransferTimes(StageBytes(partition, self.sizes), self.cluster, units_per_second)
        stages = range(len(partition.backward))
        return tuple(
            tuple(times(Payload("A", stage, True, Fraction(1), lane)) or 0.0 for stage in stages)
            for lane in ("d2h", "h2d")
        )

    def charged(self, schedule: Schedule, costs: CostTable, keeps: Sequence[int] | None = None) -> CostTable:
        """The costs with the times of a schedule's transfers and optimizer.

        `keeps`: as in `StageBytes`; all activations of these layers move.
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
            if schedule.tied:
                carry = {**carry, (Kind.STEP, 0): (TIED,)}
        boundaries = self.boundaries
        if boundaries is None:
            copied = bool(schedule.placement) and all(len(holders) > 1 for holders in schedule.placement)
            boundaries = copied or schedule.weights is Weights.STREAMED or not schedule.kinds.isdisjoint(SEND | RECV)
        return replace(costs, work=work, transfer_time=times, hop=0 if boundaries else costs.hop, carry=carry)

    def _steps(self, schedule: Schedule, stages: StageBytes, units_per_second: int) -> tuple[Work, ...]:
        """Steps on devices, by stage.

        One STEP stands for those of all replicas, each of a shard or of the whole stage. With whole copies, the STEPs
        of a device together take the time of all stages that it has.
        """
        assert self.optimizer is not None
        beside, num_stages = self.optimizer.beside_s, schedule.shape.num_backward_stages
        own = [self.optimizer.device_step_s(stages.stage(number, backward=True)) for number in range(num_stages)]
        found = [each + beside * schedule.shape.num_ranks / num_stages for each in own]  # a device has several
        for steps, held in _whole_copies(schedule):
            for number in steps:
                found[number] = (sum(own[other] for other in held) + beside) / len(steps)
        whole = units_per_second * schedule.shape.num_parts  # times are divided by the parts, and a step has none
        return tuple(Work(each * whole) for each in found)


def slowed_by_exchanges(
    schedule: Schedule, work: Mapping[Kind, Sequence[Work]], times: Callable[[Payload], Number | None], beside: float
) -> dict[Kind, tuple[Work, ...]]:
    """Forwards and backwards of replicas, slowed by gathers and sums of a step beside them; empty for others.

    Where weights are gathered for every visit, layers are slowed already (`LayerTimes.of_whole_microbatches`).
    `beside`: as in `OptimizerTraffic`.
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
        if exchange not in kinds:
            continue
        each = kinds[exchange] / shape.num_stages / microbatches  # exchanges per computation
        share = Fraction(n - 1, n) * (2 if name == "G" and Kind.UNSHARD not in kinds else 1)
        slowed = []
        for stage, own in enumerate(work[kind]):
            seconds = times(Payload(name, stage, kind is Kind.B, share, "net")) or 0.0
            slowed.append(own._replace(main=own.main + beside * each * seconds))
        found[kind] = tuple(slowed)
    return found


def _whole_copies(schedule: Schedule) -> list[tuple[list[int], list[int]]]:
    """For each device with STEPs, if every stage has whole copies: the stages of its STEPs, and all its stages.

    Empty where devices share the states of a stage, or a stage is on one device.
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
