"""ZB-1p and ZB-2p: a heuristic that orders F, I and W for given times within a memory limit.

I is the input gradient, W the weight gradient. Four phases, each action as early as it can run:

    warmup    F0 down the pipe; then, from the last stage up, as many forwards as fit before the first I arrives
    turn      the first I, from the last stage to the first
    rounds    a forward down the stages that want one, then the next I up all stages
    drain     what is left of W

W runs only to make room, or where a stage would wait anyway: always if it ends before the input arrives, otherwise if
the stage would idle more than the busiest stage can spare. Three switches (more warmup, I before F, fill every gap)
give eight orders; the one with the shortest longest device-local span wins. Where microbatches differ in length, every
rule uses the times of its microbatch; then the order for equal microbatches is a ninth, and the one that ends first
wins. With F = I = W, 3 ranks, 4 microbatches and room for 3 activations (memory_limit=1p):

    rank 0   0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24 (arXiv 2401.10241). The paper writes B for what is I
here. Its integer program is `schedule=optpipe` without offloading; its optimizer post-validation is left out.
"""

import re
from functools import lru_cache
from itertools import count, product
from typing import NamedTuple

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape, check_one_stage, looped_placement
from rpbench.ordering.list_order import ROUNDING, Pass, Rows, repeat_steps, time_rows
from rpbench.registry import schedule


class Switches(NamedTuple):
    """The heuristic's choices."""

    more_warmup: bool  # warmup takes a forward that ends after the first I could begin, if it starts before
    input_grad_first: bool  # a stage leaves out a forward that would hold up its next I, unless it idles most
    fill_every_gap: bool  # W fills any gap, even if that delays the next action


@schedule("zb_auto", source="Qi et al., ICLR'24", needs_costs=True, searched={"memory_limit": ("2p", "1p", "1.5p")})
def zb_auto(
    shape: Shape, costs: StageCosts, *, memory_limit: str | float = "2p", until_weights: float | None = None
) -> Schedule:
    """No rank ever holds more than the limit: `1p`, `2p`, or a number of the fullest stage's activations.

    `until_weights`: fraction of the activations that an order counts until W; None: what memory counts.
    """
    check_one_stage("zb_auto", shape, "interleaved_zb")
    if until_weights is not None:
        if not 0 <= until_weights <= 1:
            raise ValueError(f"schedule.until_weights={until_weights}: a fraction of the activations, 0 to 1; try 0.5")
        costs = costs.keeping(until_weights)
    limit = read_limit(str(memory_limit), shape.num_ranks) * max(costs.activations)
    rows = repeat_steps(shape, _passes(_best_order(shape.num_microbatches, costs, limit)))
    return Schedule(shape, rows, name="zb_auto", placement=looped_placement(shape))


def read_limit(text: str, num_ranks: int) -> float:
    """The activations a memory limit allows: `2p` is twice the ranks, a number is itself; ValueError for any other text
    or below one activation.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(p?)", text.strip())
    if match is None:
        raise ValueError(
            f"memory_limit={text!r}: write 1p or 2p (times the ranks), or a number of microbatch activations"
        )
    limit = float(match[1]) * (num_ranks if match[2] else 1)
    if limit < 1:
        raise ValueError(
            f"memory_limit={text}: a rank must be able to hold the activations of one microbatch; take 1 or more"
        )
    return limit


@lru_cache(maxsize=4)  # a partition search asks for the same order several times
def _best_order(num_microbatches: int, costs: StageCosts, limit: float) -> list[list[Kind]]:
    tried = (_Heuristic(num_microbatches, costs, limit, Switches(*on)) for on in product((False, True), repeat=3))
    trials = [trial.run() for trial in tried]
    if not costs.each:
        return min(trials, key=lambda trial: trial.span).rows
    # A rule may lead astray where microbatches differ: the order of equal ones is one more to choose from.
    orders = [*(trial.rows for trial in trials), _best_order(num_microbatches, costs.mean, limit)]
    return min(orders, key=lambda rows: time_rows(_passes(rows), lambda stage, microbatch: stage, costs).makespan)


def _passes(rows: list[list[Kind]]) -> Rows:
    """The passes of every rank: each kind takes the microbatches in order."""
    counts = [{kind: count() for kind in Kind} for _ in rows]
    return [[Pass(kind, rank, next(counts[rank][kind])) for kind in order] for rank, order in enumerate(rows)]


class _Heuristic:
    """One setting of the switches; `run` fills `rows` and `span`."""

    def __init__(self, num_microbatches: int, costs: StageCosts, limit: float, switches: Switches) -> None:
        self.costs, self.limit, self.switches = costs, limit * (1 + ROUNDING), switches
        self.of = [costs.at(microbatch) for microbatch in range(num_microbatches)]
        self.of.append(self.of[-1])  # read one past the end: as the last microbatch
        self.num_stages, self.num_microbatches = costs.num_stages, num_microbatches
        stages = range(self.num_stages)
        self.rows: list[list[Kind]] = [[] for _ in stages]
        self.forward_ends: list[list[float]] = [[] for _ in stages]
        self.input_ends: list[list[float]] = [[] for _ in stages]
        self.num_pending = [0] * self.num_stages  # I without their W
        self.now = [0.0] * self.num_stages
        self.started = [0.0] * self.num_stages
        self.idle = [0.0] * self.num_stages
        self.held = [0.0] * self.num_stages

    @property
    def span(self) -> float:
        """The longest time from a stage's first start to its last end."""
        return max(end - start for start, end in zip(self.started, self.now, strict=True))

    def run(self) -> "_Heuristic":
        for stage in range(self.num_stages):
            self.started[stage] = self.now[stage] = self._forward_arrives(stage)
            self._forward(stage)
        for stage, num_warmup in enumerate(self._num_warmup()):
            for _ in range(num_warmup - 1):
                self._forward(stage)
        self._input_grads()
        while len(self.input_ends[0]) < self.num_microbatches:
            wanted = self._wanted_forwards(put_off=self.switches.input_grad_first)
            self._forwards(wanted)
            self._input_grads()
            if self.switches.input_grad_first:
                late = self._wanted_forwards(put_off=False)
                self._forwards([now and not before for now, before in zip(late, wanted, strict=True)])
        for stage in range(self.num_stages):
            self._drain(stage)
        return self

    # --- phases ---

    def _num_warmup(self) -> list[int]:
        """Forwards of every stage before its first I; a stage's predecessor has at least as many."""
        costs, counts = self.costs, [1] * self.num_stages
        ends, arrives = list(self.now), 0.0
        for stage in reversed(range(self.num_stages)):
            # A stage leaves room for one more forward on every stage before it: with as many as its predecessor, its
            # next forward would wait for theirs in every round.
            room = int(self.limit / max(costs.activations)) - stage
            while counts[stage] < min(room, self.num_microbatches):
                takes = self.of[counts[stage]].forward[stage]
                latest = ends[stage] if self.switches.more_warmup else ends[stage] + takes
                if latest > arrives + ROUNDING or (self.switches.more_warmup and latest >= arrives - ROUNDING):
                    break
                for other in range(stage + 1):
                    if counts[other] <= counts[stage] or other == stage:
                        ends[other] += self.of[counts[other]].forward[other]
                        counts[other] += 1
            arrives = max(arrives, ends[stage]) + self.of[0].input_grad[stage] + costs.hop
        return counts

    def _forwards(self, wanted: list[bool]) -> None:
        for stage in range(self.num_stages):
            sent = self.num_microbatches if not stage else len(self.forward_ends[stage - 1])
            if not wanted[stage] or len(self.forward_ends[stage]) == sent:
                continue
            self._make_room(stage)
            if self.held[stage] + self._next(stage).activations[stage] > self.limit:
                return  # the stages after this one go without, too
            self._fill(stage, self._forward_arrives(stage))
            self._forward(stage)

    def _wanted_forwards(self, put_off: bool) -> list[bool]:
        """Stages that take a forward in this round: only where the next stage takes one, or needs no more."""
        wanted = [False] * self.num_stages
        most_idle = max(self.idle)
        follows, arrives, hop = True, 0.0, self.costs.hop
        for stage in reversed(range(self.num_stages)):
            sent, back = len(self.forward_ends[stage]), len(self.input_ends[stage])
            left = sent < self.num_microbatches
            takes = left and follows
            free, forward = self.now[stage], self.of[sent].forward[stage]
            if takes and put_off and back < sent:
                held_up = free + forward > arrives
                spared = self.idle[stage] + max(0.0, arrives - free) < most_idle
                takes = not (held_up and spared and stage < self.num_stages - 1)
            wanted[stage] = takes
            follows = takes or not left
            free += forward * takes
            arrives = max(arrives, free) + self.of[back].input_grad[stage] + hop
        return wanted

    def _input_grads(self) -> None:
        for stage in reversed(range(self.num_stages)):
            if len(self.input_ends[stage]) < len(self.forward_ends[stage]):
                self._fill(stage, self._gradient_arrives(stage))
                self._input_grad(stage)
        if len(self.forward_ends[0]) == self.num_microbatches:
            self._drain(0)

    # --- single actions ---

    def _next(self, stage: int) -> StageCosts:
        """The costs of the microbatch whose forward comes next."""
        return self.of[len(self.forward_ends[stage])]

    def _forward_arrives(self, stage: int) -> float:
        if not stage:
            return 0.0
        return self.forward_ends[stage - 1][len(self.forward_ends[stage])] + self.costs.hop

    def _gradient_arrives(self, stage: int) -> float:
        number = len(self.input_ends[stage])
        if stage == self.num_stages - 1:
            return self.forward_ends[stage][number]
        return self.input_ends[stage + 1][number] + self.costs.hop

    def _forward(self, stage: int) -> None:
        own = self._next(stage)
        self._take(stage, Kind.F, self._forward_arrives(stage), own.forward[stage])
        self.forward_ends[stage].append(self.now[stage])
        self.held[stage] += own.activations[stage]

    def _input_grad(self, stage: int) -> None:
        own = self.of[len(self.input_ends[stage])]
        self._take(stage, Kind.I, self._gradient_arrives(stage), own.input_grad[stage])
        self.input_ends[stage].append(self.now[stage])
        self.held[stage] -= own.activations[stage] - own.kept_for_weights[stage]
        self.num_pending[stage] += 1

    def _weight_grad(self, stage: int) -> None:
        own = self._pending(stage)
        self._take(stage, Kind.W, 0.0, own.weight_grad[stage])
        self.held[stage] -= own.kept_for_weights[stage]
        self.num_pending[stage] -= 1

    def _take(self, stage: int, kind: Kind, arrives: float, time: float) -> None:
        wait = max(0.0, arrives - self.now[stage])
        self.idle[stage] += wait
        self.now[stage] += wait + time
        self.rows[stage].append(kind)

    # --- weight gradients ---

    def _pending(self, stage: int) -> StageCosts:
        """The costs of the microbatch whose W comes next."""
        return self.of[len(self.input_ends[stage]) - self.num_pending[stage]]

    def _make_room(self, stage: int) -> None:
        """W until one more forward fits."""
        while self.num_pending[stage] and self.held[stage] + self._next(stage).activations[stage] > self.limit:
            self._weight_grad(stage)

    def _fill(self, stage: int, until: float) -> None:
        """W in the time a stage would wait for its next input."""
        if self.now[stage] > until:
            return
        while self.num_pending[stage] and self.now[stage] + self._pending(stage).weight_grad[stage] <= until:
            self._weight_grad(stage)
        gap = until - self.now[stage]
        if self.num_pending[stage] and gap > 0:
            spare = max(self.idle) - self.idle[stage]
            if self.switches.fill_every_gap or gap > spare:
                self._weight_grad(stage)

    def _drain(self, stage: int) -> None:
        while self.num_pending[stage]:
            self._weight_grad(stage)
