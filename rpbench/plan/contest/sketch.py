"""Sketch: the best cuts of a setting by their computation alone, and the pace they would allow."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import NamedTuple

from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.policy import DRAINED, Policy
from rpbench.ir.schedule import Schedule
from rpbench.ir.waits.moves import has_transfers
from rpbench.plan.climb import MISFIT, PATIENCE, Climb, ClimbOrder, Tally
from rpbench.plan.contest.contender import Contender, Setting, Space
from rpbench.plan.contest.frame import posed
from rpbench.plan.contest.terms import Terms
from rpbench.plan.counts import Counts, plain_partitions, promising_counts
from rpbench.plan.even_and_greedy import fill_stages, plan_greedy
from rpbench.plan.problem import Problem

Placement = tuple[tuple[int, ...], ...]  # the devices of each stage

WORTH = 0.06  # fraction by which a plan, or a sketch, may be slower than the best to be worth more work
CUTS = 2  # cuts of a setting worth timing
# If the numbers of stages are open: pairs (forward, backward stages) whose plain cuts are timed, pairs climbed from to
# the end (several, because transfers decide between them), and actions of the sketch's budget per pair tried.
PAIRS, CLOSELY, ACTIONS_A_PAIR = 24, 5, 8_000
ACTIONS_BESIDE = 200_000  # for near numbers of stages
# The same with a time limit; how many of these begin with plain cuts, and actions of each sketch: there are few, so
# each has to find a good pair.
PAIRS_IN_TIME, CLOSELY_IN_TIME, PLAINLY_IN_TIME, ACTIONS_IN_TIME = 12, 5, 3, 3_000_000
# The same for a posed problem, where no other dimension is open; pairs beyond the first climbs only within half of the
# work. Most pairs that climb a little before they are dropped, and the part of the work of each.
PAIRS_POSED, CLOSELY_POSED = 160, 4
FIRST_CLIMBS, A_LITTLE = 40, 8
# If orders follow from times: most plain cuts that get an order of their own, and actions of the budget per order.
MOST_ORDERS, ACTIONS_AN_ORDER = 4, 400
# Posed problem: moves without a better cut after which the climb with a second order stops. It begins near
# its end: in 33 problems of eleven schedules no better cut came after more than 2,880 of them.
PATIENCE_POSED = 10_000
# Steps that are timed if steps overlap, and for a posed problem, whose pace is that of the whole run.
STEPS, STEPS_POSED = 2, 8


class Sketch(NamedTuple):
    """The sketch of a setting, by its computation alone."""

    cuts: tuple[Partition, ...]  # best first
    tokens_per_s: float  # pace by computation alone; 0 if nothing fits
    is_level: bool = False  # whether all cuts take equally long
    moves: bool = False  # whether the order itself moves activations, which a sketch does not count


class Sketcher:
    """Sketches of one contender's settings, each made once; one that was cut short is made again when there is time.

    `of`, `overlaps` and `placement` raise ValueError for a setting that the schedule does not take.

    Args:
        work: actions timed in one sketch; `ACTIONS_IN_TIME` with a time limit, if the numbers of stages are open.
        is_over: whether the time limit has passed: a sketch then has plain cuts only. None: no limit.
    """

    def __init__(
        self, contender: Contender, terms: Terms, work: int, *, is_over: Callable[[], bool] | None = None
    ) -> None:
        if contender.entry.separate_cuts and is_over is not None:
            work = ACTIONS_IN_TIME
        self.contender, self.terms, self.work, self._is_over = contender, terms, work, is_over
        self.tally = Tally()
        self._known: dict[Setting, Sketch] = {}
        self._cut_short: set[Setting] = set()
        self._orders: dict[tuple[Setting, Counts, int], ClimbOrder] = {}
        self._overlapping: dict[tuple[object, ...], bool] = {}
        self._placements: dict[tuple[object, ...], Placement] = {}

    def of(self, setting: Setting) -> Sketch:
        setting = _sketched(setting)
        if setting not in self._known or (setting in self._cut_short and not self._time_is_over()):
            self._cut_short.discard(setting)
            self._known[setting] = self._made(setting)
            if self._time_is_over():
                self._cut_short.add(setting)
        return self._known[setting]

    def overlaps(self, setting: Setting) -> bool:
        """Whether steps overlap, so that timing two of them says little; it depends on the options."""
        if setting.options not in self._overlapping:
            self.placement(setting)
        return self._overlapping[setting.options]

    def placement(self, setting: Setting) -> Placement:
        """The devices of each stage; empty if visits go to any device."""
        key = setting.chunks_per_device, setting.options
        if key not in self._placements:
            order = self._any_order(setting)
            drained = DRAINED if self._is_over is not None else (Policy.FLUSH,)  # with time, more steps are timed
            self._overlapping[setting.options] = order.policy not in drained
            self._placements[key] = order.placement
        return self._placements[key]

    def knows(self, setting: Setting) -> bool:
        return _sketched(setting) in self._known

    def pace(self, setting: Setting) -> float:
        """Tokens per second of the sketch; 0 if no cut fits, the setting is refused, or time ended before a sketch."""
        if self._time_is_over() and not self.knows(setting):
            return 0.0
        try:
            return self.of(setting).tokens_per_s
        except ValueError:
            return 0.0

    def plain_cuts(self, setting: Setting, like: Partition) -> list[Partition]:
        """Even and time-balanced cuts into as many stages as another cut has."""
        return list(plain_partitions(posed(self.contender, setting, self.terms, 1), _counts(like)))

    def with_other_counts(self, setting: Setting, cut: Partition, seen: set[Counts]) -> Iterator[Partition]:
        """The best cuts into near numbers of stages that were not `seen`, where both directions are cut apart.

        More stages come first: shorter ones expose less of the transfers, which no sketch counts.
        """
        problem, num = posed(self.contender, setting, self.terms, 1), self.terms.num_devices
        forward, backward = _counts(cut)
        for up, down in (*_ways(num), *_ways(max(1, num // 2)), *_ways(1)):
            counts = forward + up, backward + down
            if counts in seen or min(counts) < 1:
                continue
            seen.add(counts)
            if cuts := plain_partitions(problem, counts):
                climb = self._climb(setting, problem, cuts, self._order(setting, problem, counts))
                climb.run(min(self.work, ACTIONS_BESIDE))
                yield climb.best

    def first_size(self, setting: Setting, space: Space) -> Setting:
        """The setting with the microbatch size that sketches best; its own size if a sketch says little.

        Under a time limit the largest, if every device moves all weights for each microbatch.
        """
        if self._says_little_of_sizes(setting):
            largest = setting.changed("microbatch_sequences", max(space.dimensions["microbatch_sequences"]))
            return largest if self._is_over is not None and self.moves_each_time(setting) else setting
        if self.contender.entry.separate_cuts:
            return self.close_sizes(setting, space)[0]
        return max([setting, *self.by_promise(setting, space)], key=self.pace)

    def close_sizes(self, setting: Setting, space: Space) -> list[Setting]:
        """The setting with the microbatch sizes whose sketches are close to the best; itself if none fits.

        The best one comes first, then the largest: transfers and their latencies, which no sketch counts, are fewer. If
        steps overlap, where the pace of a sketch is less certain, the largest is first.
        """
        sized = [setting, *self.by_promise(setting, space)]
        best = max(sized, key=self.pace)
        close = [each for each in sized if self.pace(each) >= self.pace(best) * (1 - WORTH) > 0] or [setting]
        first = [] if self.overlaps(setting) or best not in close else [best]
        return list(dict.fromkeys([*first, *sorted(close, key=lambda each: -each.microbatch_sequences)]))

    def moves_each_time(self, setting: Setting) -> bool:
        """Whether every device moves all weights for each microbatch, so that large ones are fast."""
        return self.contender.entry.lower is not None and self._is_level(self.placement(setting))

    def _is_level(self, placement: Placement) -> bool:
        """Whether every device runs all stages in turn, so that the cut makes no difference to computation."""
        return bool(placement) and all(len(holders) == self.terms.num_devices > 1 for holders in placement)

    def is_blind(self, setting: Setting) -> bool:
        """Whether weights or activations move, or all cuts take equally long, so that a sketch says little."""
        entry = self.contender.entry
        if entry.lower is not None or entry.separate_cuts:
            return True
        return self.pace(setting) > 0 and (self.of(setting).is_level or self.of(setting).moves)

    def _says_little_of_sizes(self, setting: Setting) -> bool:
        """Whether a sketch is no guide to the microbatch size; in short time it is, where directions are cut apart."""
        return self.is_blind(setting) and not (self._is_over is not None and self.contender.entry.separate_cuts)

    def by_promise(self, setting: Setting, space: Space) -> list[Setting]:
        """The setting with other microbatch sizes, the fastest sketch first.

        Sketches of many small microbatches take long, so sizes are tried outwards from its own as long as they get
        faster. If a sketch says little (`is_blind`), all sizes are returned.
        """
        sizes, own = space.dimensions["microbatch_sequences"], setting.microbatch_sequences
        if self._says_little_of_sizes(setting):
            found = [setting.changed("microbatch_sequences", size) for size in sizes if size != own]
            return sorted(found, key=self.pace, reverse=True)
        smaller, larger = [size for size in sizes if size < own], [size for size in sizes if size > own]
        paces, begun = dict[Setting, float](), self.pace(setting)
        for way in (sorted(smaller, reverse=True), sorted(larger)):
            best = begun
            for each in (setting.changed("microbatch_sequences", size) for size in way):
                paces[each] = self.pace(each)
                if 0 < best >= paces[each]:
                    break
                best = paces[each]
            if not 0 < max(paces.values(), default=begun) <= begun:
                break  # smaller sizes are faster, or the first that fit
        return sorted(paces, key=lambda each: -paces[each])

    def _time_is_over(self) -> bool:
        return self._is_over is not None and self._is_over()

    def _made(self, setting: Setting) -> Sketch:
        problem = posed(self.contender, setting, self.terms, 1)
        counts, order = self._first_order(setting, problem)
        if self._is_level(order.placement):
            pace = self._pace(problem, _turn(problem, problem.num_layers if setting.recompute == "all" else 0))
            even = plain_partitions(problem, counts)[0], self._even_in_bytes(setting, counts[0])
            return Sketch((*even, *self._starts(counts)), pace, True)
        overlaps = self.overlaps(setting)
        if overlaps:
            to_fill = self.terms.steps_to_fill(setting.microbatch_sequences)
            problem = replace(problem, num_steps=STEPS * to_fill if self.terms.problem is None else STEPS_POSED)
        climbs = self._climbs(setting, problem, counts)
        num = 1 if problem.entry.separate_cuts or self.terms.problem is not None else CUTS
        found = [cut for climb in climbs for cut in climb.leaders(num)]
        if problem.entry.separate_cuts:
            plain = plan_greedy(problem) if self._is_over is None else plain_partitions(problem, counts)[0]
            found.append(plain)
        found += self._starts(counts, any_number=problem.entry.separate_cuts)
        step = climbs[0].best_score if climbs[0].best_score < MISFIT and not climbs[0].hopeless else inf
        if overlaps and step < inf and self.terms.problem is None and not self._time_is_over():
            fewer = replace(problem, num_steps=problem.num_steps - to_fill)  # without the fill, which counts if posed
            step = (step - climbs[0].best_under(self._order(setting, fewer, climbs[0].counts))) / to_fill
            again = climbs[0].best.num_layers - climbs[0].best.num_layers_fused if setting.recompute == "all" else 0
            step = max(step, _turn(problem, again))  # the difference says too little where filling is long
        else:
            step /= problem.num_steps
        return Sketch(tuple(dict.fromkeys(found)), self._pace(problem, step), moves=has_transfers(order))

    def _even_in_bytes(self, setting: Setting, num_stages: int) -> Partition:
        """The cut whose stages have weights of about as many bytes, which decides where stages visit every device."""
        sizes = self.terms.sizes(setting.microbatch_sequences)
        first, *others = [layer.weights for layer in sizes.layers]
        layers = [first + sizes.embedding.weights, *others]
        return symmetric(fill_stages(layers, sizes.head.weights, num_stages))

    def _starts(self, counts: Counts, *, any_number: bool = False) -> list[Partition]:
        """The given cuts with these numbers of stages, or with any number."""
        return [cut for cut in self.terms.starts if any_number or _counts(cut) == counts]

    def _any_order(self, setting: Setting) -> Schedule:
        """The order of a setting with the largest microbatches that the schedule takes, the soonest to order."""
        refused: ValueError | None = None
        for size in sorted({*self.terms.microbatches, setting.microbatch_sequences}, reverse=True):
            changed = setting.changed("microbatch_sequences", size)
            try:
                return self._first_order(changed, posed(self.contender, changed, self.terms, 1))[1]
            except ValueError as error:
                refused = refused or error
        assert refused is not None
        raise refused

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
        most = PAIRS if self.terms.problem is None else PAIRS_POSED
        if self._is_over is not None:
            most = PAIRS_IN_TIME
        return max(CLOSELY, min(most, self.work // ACTIONS_A_PAIR))

    def _order(self, setting: Setting, problem: Problem, counts: Counts) -> ClimbOrder:
        """The order of a setting's cuts; recomputation changes it only where it follows from times."""
        if problem.entry.separate_cuts:  # many numbers of stages, and recomputation is no choice there
            return ClimbOrder(problem, counts)
        timed = problem.entry.needs_costs
        key = setting if timed else setting.changed("recompute", "all"), counts, problem.num_steps
        if key not in self._orders:
            cut = plain_partitions(problem, counts)[0] if timed and self.terms.problem is None else None
            self._orders[key] = ClimbOrder(problem, counts, cut)
        return self._orders[key]

    def _climbs(self, setting: Setting, problem: Problem, first: Counts) -> list[Climb]:
        others = promising_counts(problem)[: self._num_pairs] if problem.entry.separate_cuts else ()
        climbs, half = list[Climb](), self.tally.work + self.work // 2
        given = [_counts(cut) for cut in self.terms.starts] if problem.entry.separate_cuts else []
        for counts in dict.fromkeys([first, *given, *others]):
            cuts = [*self._starts(counts), *plain_partitions(problem, counts)]
            if len(climbs) >= FIRST_CLIMBS and self.tally.work > half:
                break
            if cuts and not (climbs and self._time_is_over()):
                climbs.append(self._climb(setting, problem, cuts, self._order(setting, problem, counts)))
        climbs = self._narrowed(climbs)
        fitting = setting.recompute == "fitting" and not problem.entry.separate_cuts
        if fitting and not self._time_is_over() and not climbs[0].keeps_everything:
            starts = self.of(setting.changed("recompute", "none")).cuts
            climbs.append(self._climb(setting, problem, starts, self._order(setting, problem, first)))
            self._narrowed(climbs[-1:])
            climbs.sort(key=lambda climb: climb.best_score)
        if problem.entry.needs_costs and not problem.entry.separate_cuts and not self._time_is_over():
            # Climb again with the order of the best cut.
            again = self._climb(setting, problem, climbs[0].leaders(CUTS), ClimbOrder(problem, first, climbs[0].best))
            if self._is_over is not None:
                again.level()
            again.run(self.work, PATIENCE if self.terms.problem is None else PATIENCE_POSED)
            climbs.append(again)
            if self.terms.problem is None:
                climbs += self._with_own_order(setting, problem, first, again.num_actions)
        return sorted(climbs, key=lambda climb: climb.best_score)

    def _narrowed(self, climbs: list[Climb]) -> list[Climb]:
        """Few of the climbs, run to their end, best first.

        A plain cut says little about the best one with as many stages. So for a posed problem pairs climb a little
        before they are dropped; else other settings bring other pairs, and timelines choose.
        """
        if self._is_over is not None:
            return self._in_time(climbs)
        closely, rounds = CLOSELY, list[tuple[int, int]]()
        if self.terms.problem is not None:
            closely = CLOSELY_POSED
            rounds = [(FIRST_CLIMBS, self.work // A_LITTLE)] if len(climbs) > closely else []
        for most, work in [*rounds, (closely, self.work // min(closely, len(climbs)))]:
            climbs = sorted(climbs, key=lambda climb: climb.best_score)[:most]
            for climb in climbs:
                climb.run(work)
        return climbs

    def _in_time(self, climbs: list[Climb]) -> list[Climb]:
        """The same with a time limit, where level cuts stand for long climbs (`rpbench.plan.cutting_planes`).

        They say how much computation allows; plain cuts, whose stages are alike, hide their transfers better, which no
        sketch counts. So of several pairs some begin with these and some with those.
        """
        climbs = sorted(climbs, key=lambda climb: climb.best_score)
        plain = climbs[: min(PLAINLY_IN_TIME, len(climbs) // 2)]
        others = climbs[len(plain) :]
        for climb in others:
            if not self._time_is_over():
                climb.level()
        climbs = plain + sorted(others, key=lambda climb: climb.best_score)[: CLOSELY_IN_TIME - len(plain)]
        for climb in climbs:
            if not self._time_is_over():
                climb.run(self.work // len(climbs))
        return sorted(climbs, key=lambda climb: climb.best_score)

    def _with_own_order(self, setting: Setting, problem: Problem, counts: Counts, num_actions: int) -> list[Climb]:
        """The best plain cut under its own order, if one fits; another cut's order may make it seem slow or large."""
        most, found = min(MOST_ORDERS, self.work // (ACTIONS_AN_ORDER * num_actions)), list[Climb]()
        for cut in plain_partitions(problem, counts)[::-1][:most]:  # cuts that leave room for the head first
            if self._time_is_over():
                break
            with suppress(ValueError):  # the schedule refuses these times
                found.append(self._climb(setting, problem, [cut], ClimbOrder(problem, counts, cut)))
        best = min(found, key=lambda climb: climb.best_score, default=None)
        return [] if best is None or best.best_score >= MISFIT else [best]

    def _climb(self, setting: Setting, problem: Problem, cuts: Sequence[Partition], order: ClimbOrder) -> Climb:
        fitting = setting.recompute == "fitting" and not problem.entry.separate_cuts
        if self.terms.problem is None:
            hop = self._hop(setting, streamed=problem.entry.separate_cuts) * problem.times.units_per_second
            problem = replace(problem, times=replace(problem.times, hop=min(hop, problem.times.hop)))
            if problem.entry.steps_each_microbatch and self._is_over is not None:
                problem = replace(problem, times=self._with_steps(setting, problem.times))
        return Climb(problem, cuts, self.tally, order, fitting=fitting)

    def _with_steps(self, setting: Setting, times: LayerTimes) -> LayerTimes:
        """The times with those of an optimizer that runs after every backward, of which sketches have no action."""
        sizes, unit = self.terms.sizes(setting.microbatch_sequences), times.units_per_second
        embedding, *steps, head = (
            unit * self.terms.optimizer.device_step_s(each) for each in (sizes.embedding, *sizes.layers, sizes.head)
        )
        steps[0] += embedding
        backward = [time + step for time, step in zip(times.backward, steps, strict=True)]
        return replace(times, backward=backward, head_backward=times.head_backward + head)

    def _hop(self, setting: Setting, *, streamed: bool) -> float:
        """Seconds to send a boundary tensor over idle links, as timelines charge it.

        The problem's own hop may be slower (software without streams) or faster (measured). The smaller one counts: a
        sketch that promises too little hides a plan, one that promises too much costs a timeline.
        """
        cluster, size = self.terms.cluster, self.terms.sizes(setting.microbatch_sequences).boundary
        through_host = streamed or cluster.intra_bytes_per_s is None
        paces = [cluster.link_bytes_per_s(lane) for lane in (("d2h", "h2d") if through_host else ("net",))]
        return sum(cluster.transfer_latency_s + (size / pace if pace else 0.0) for pace in paces)

    def _pace(self, problem: Problem, step: float) -> float:
        seconds = step / problem.times.units_per_second
        return self.terms.tokens(self.terms.sequences_per_step) / seconds if seconds < inf else 0.0


def _counts(cut: Partition) -> Counts:
    return len(cut.forward), len(cut.backward)


def _ways(step: int) -> list[Counts]:
    """Changes of the numbers of stages, more stages first."""
    return [(0, step), (step, 0), (step, -step), (-step, step), (-step, 0), (0, -step)]


def _sketched(setting: Setting) -> Setting:
    """The setting with prefetch 1, whose sketch is the same."""
    return setting.changed("prefetch", 1)


def _turn(problem: Problem, num_again: int) -> float:
    """Step time, in the unit of the times, if no device ever waited and so many layers recompute."""
    times, num_layers = problem.times, problem.num_layers
    layers = sum(times.forward) + sum(times.recompute) * num_again / num_layers + sum(times.backward)
    all_work = float(layers + times.head_forward + times.head_backward) * problem.num_microbatches
    return all_work * (1 - float(times.overlap_gain) / 2) / (float(sum(times.speeds)) or problem.num_ranks)
