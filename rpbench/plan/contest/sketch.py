"""Sketch: cuts of a setting worth timing, found by their computation alone, and the pace that is left to hope for."""

from dataclasses import replace
from math import inf
from typing import NamedTuple

from rpbench.ir.partition import Partition
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule
from rpbench.plan.climb import MISFIT, Climb, ClimbOrder, Tally
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.frame import posed
from rpbench.plan.contest.space import Setting
from rpbench.plan.contest.terms import Terms
from rpbench.plan.counts import Counts, plain_partitions, promising_counts
from rpbench.plan.greedy import plan_greedy
from rpbench.plan.problem import Problem

# Cuts of a setting worth timing.
CUTS = 2
# Where the search finds the numbers of stages: so many pairs are looked at, and so many of them closely. What moves
# decides between them, so that more of them are worth timing. A sketch that may time less looks at fewer: at one for so
# many actions.
PAIRS, CLOSELY, ACTIONS_A_PAIR = 24, 5, 8_000
# Steps of schedules whose steps overlap.
STEPS = 2
# What recomputing nothing saves at most of a step: a forward in a forward, a recomputation and a backward of two.
SPARED = 4 / 3


class Sketch(NamedTuple):
    """What computation alone says of a setting.

    Args:
        cuts: the best first.
        tokens_per_s: what it would allow; 0 where nothing fits.
        is_level: whether all cuts compute alike.
        overlaps: whether a step begins before the one before it has ended, so that two of them say little.
    """

    cuts: tuple[Partition, ...]
    tokens_per_s: float
    is_level: bool = False
    overlaps: bool = False


class Sketcher:
    """Sketches of one contender's settings, each made once."""

    def __init__(self, contender: Contender, terms: Terms, work: int) -> None:
        self.contender, self.terms, self.work = contender, terms, work
        self.tally = Tally()
        self._known: dict[tuple[Setting, bool], Sketch] = {}
        self._orders: dict[tuple[Setting, Counts, int], ClimbOrder] = {}

    def of(self, setting: Setting) -> Sketch:
        """The sketch of a setting.

        Raises:
            ValueError: if the schedule does not take it.
        """
        setting = setting.changed("prefetch", 1)  # which is nothing to computation
        if setting.recompute != "fitting":
            return self._once(setting, limited=True)
        again = self._once(setting.changed("recompute", "all"), limited=True)
        if self._streams(setting):
            return again
        kept = self._once(setting.changed("recompute", "none"), limited=True)
        fast = self._once(setting.changed("recompute", "none"), limited=False)
        cuts = dict.fromkeys((*kept.cuts[:1], *fast.cuts[:1], *again.cuts[:1]))
        pace = max(kept.tokens_per_s, min(fast.tokens_per_s, SPARED * again.tokens_per_s))
        return again._replace(cuts=tuple(cuts), tokens_per_s=pace)

    def _streams(self, setting: Setting) -> bool:
        return self.contender.entry.separate_cuts or setting.recompute == "all"

    def _once(self, setting: Setting, *, limited: bool) -> Sketch:
        key = setting, limited
        if key not in self._known:
            self._known[key] = self._made(setting, limited)
        return self._known[key]

    def _made(self, setting: Setting, limited: bool) -> Sketch:
        problem = posed(self.contender, setting, self.terms, 1)
        counts, order = self._first_order(setting, problem)
        alike = order.placement and all(len(holders) == self.terms.num_devices > 1 for holders in order.placement)
        overlaps = order.policy is not Policy.FLUSH
        if alike:  # every device runs all stages in turn: the cut makes no difference to that
            return Sketch(
                tuple(plain_partitions(problem, counts)[:CUTS]), self._pace(problem, _turn(problem)), True, overlaps
            )
        if overlaps:
            problem = replace(problem, num_steps=STEPS)
        if not limited:
            problem = replace(problem, memory=None)
        climbs = self._climbs(setting, problem, counts)
        found = [climb.best for climb in (climbs if problem.entry.separate_cuts else climbs[:CUTS])]
        if problem.entry.separate_cuts:
            found.append(plan_greedy(problem))
        steps_s = climbs[0].best_score if climbs[0].best_score < MISFIT and not climbs[0].hopeless else inf
        return Sketch(tuple(dict.fromkeys(found)), self._pace(problem, steps_s / problem.num_steps), overlaps=overlaps)

    def _first_order(self, setting: Setting, problem: Problem) -> tuple[Counts, Schedule]:
        refused = ""
        for counts in promising_counts(problem)[: self._num_pairs]:
            if not plain_partitions(problem, counts):
                refused = f"{problem.num_layers} layers make no {counts[0]} stages; take fewer devices or stages"
                continue
            try:
                return counts, self._order(setting, problem, counts).schedule
            except ValueError as error:
                refused = str(error)
        raise ValueError(refused or f"no cut of {problem.num_layers} layers can be built")

    @property
    def _num_pairs(self) -> int:
        return max(CLOSELY, min(PAIRS, self.work // ACTIONS_A_PAIR))

    def _order(self, setting: Setting, problem: Problem, counts: Counts) -> ClimbOrder:
        """The order of a setting's cuts, which what is recomputed does not change: it is timed with equal stages."""
        if problem.entry.separate_cuts:  # many numbers of stages, and recomputation is no choice there
            return ClimbOrder(problem, counts)
        key = setting.changed("recompute", "all"), counts, problem.num_steps
        if key not in self._orders:
            self._orders[key] = ClimbOrder(problem, counts)
        return self._orders[key]

    def _climbs(self, setting: Setting, problem: Problem, first: Counts) -> list[Climb]:
        others = promising_counts(problem)[: self._num_pairs] if problem.entry.separate_cuts else ()
        climbs = [
            Climb(problem, cuts, self.tally, self._order(setting, problem, counts))
            for counts in dict.fromkeys([first, *others])
            if (cuts := plain_partitions(problem, counts))
        ]
        climbs = sorted(climbs, key=lambda climb: climb.best_score)[:CLOSELY]
        for climb in climbs:
            climb.run(self.work // len(climbs))
        return sorted(climbs, key=lambda climb: climb.best_score)

    def _pace(self, problem: Problem, step: float) -> float:
        seconds = step / problem.times.units_per_second
        return self.terms.tokens(self.terms.sequences_per_step) / seconds if seconds < inf else 0.0


def _turn(problem: Problem) -> float:
    """The step of a device that runs every stage of its microbatches."""
    times = problem.times
    layers = sum(times.forward) + sum(times.recompute) + sum(times.backward)
    each = layers + times.head_forward + times.head_backward
    return float(each) * problem.num_microbatches / problem.num_ranks
