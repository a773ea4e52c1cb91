"""Side searches: the contenders of an advice, dealt to processes. Each looks at all of its own and finishes the best.

    look      time the first setting, with a cut and all transfers, of a few contenders of every kind; then of the
              others, near the plans of these (`rpbench.advice.probing`)
    turns     for contenders without a plan, find whether any fits (`rpbench.advice.whole_layers`); go on with the
              searches in turn, the most promising first
    finish    try the leading plans of all processes for every contender (`rpbench.advice.probing`); search each to its
              end, while there is time
    change    compute what would change for the leaders, in the process that has their frames

Times are processor times of each process. A contender whose search was cut short is ranked with what it has, and says
so; one that was not looked at is left out by name.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from rpbench.advice.probing import Loan, borrow, kind_of, known_plans, leading, loan_of
from rpbench.advice.whole_layers import lightest
from rpbench.cost.hardware.basis import Basis
from rpbench.mesh.plan_search.terms import terms_of
from rpbench.plan.contest.contender import OPTION, Contender, contenders
from rpbench.plan.contest.frame import Frames, posed, uncollected
from rpbench.plan.contest.plans import Budget, Tuned, rank
from rpbench.plan.contest.search import GIVEN_UP, OUT_OF_TIME, Search
from rpbench.plan.contest.terms import Terms
from rpbench.plan.counts import plain_partitions, promising_counts
from rpbench.side_processes import forks, inherited

# Fractions of the time:
LOOKING = 0.75  # for all first looks
ONE_LOOK = 0.04  # for one of them
SHORTEST = 0.6  # of these, at least, however long others took
CUT_APART = 1.7  # times as long where the numbers of stages are open
ONE_CLIMB = 0.01  # for moving single layers after it
NEAR_PLANS = 0.04  # for one that begins near the plans of others and tries its own options there
WEIGHING = 0.04  # for the least memory of one contender without a plan
ONE_TURN = 0.03  # for one turn of a search
BOUNDING = 0.05  # for the bounds of rows, which stay looser when it is over
CHANGING = 0.06  # for what would change
TURNS = 0.5  # of what the looks and the leader leave, for turns
PROBING = 0.6  # of what these leave, for plans of others
ONE_SEARCH = 0.4  # of what these leave, for one search of the fastest
FAIR = 1.5  # of an equal part of what is left, for each search
# What a turn may gain, as a fraction of a pace:
NEAR = 0.02  # too little for a turn
MOST_GAIN = 1.0
NO_PLAN = 1.5  # of a contender without a plan
FAR_BEHIND = 0.35  # at most, of one so far behind that it is soon given up
TIRED = 0.25  # factor after a turn that gained nothing

# Weights that stay, weights that stream over a shared link, and orders by times: together they call every kernel.
CALLING = ("gpipe", "roundpipe", "zb_v")


class Glance(NamedTuple):
    """The result of a first look."""

    hope: float = -inf  # sorts contenders: the pace, or below 0 by how much the plan does not fit
    pace: float = 0.0  # tokens per second so far; 0 where nothing fits
    remark: str = ""  # why there is no plan; empty where there is one
    loan: Loan | None = None  # the plan, for others to try


class Clock:
    """Processor time of this process from now on; time is over after `end` seconds."""

    def __init__(self, end: float = inf) -> None:
        self._began, self._end = time.process_time(), end

    @property
    def spent(self) -> float:
        return time.process_time() - self._began

    def allow(self, end: float) -> None:
        self._end = end

    @property
    def left(self) -> float:
        """Seconds until time is over; below 0 afterwards."""
        return self._end - self.spent

    def is_over(self) -> bool:
        return self.left < 0


class Share:
    """The contenders of one process.

    Args:
        contenders: those of all processes, by number.
        numbers: of this process's contenders, in the order in which to look at them.
        row: makes the row of a plan from it and its frames.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        numbers: Sequence[int],
        terms: Terms,
        budget: Budget,
        row: Callable[[Tuned, Frames], Any],
    ) -> None:
        self.contenders, self.numbers, self.terms, self.budget, self._row = contenders, numbers, terms, budget, row
        self.clock, self._seconds = Clock(), inf
        self.searches: dict[int, Search] = {}
        self._able, self._end = list[int](), inf
        self._found = dict[int, Any]()  # rows that are known before the end
        self._loans, self._borrowed = tuple[Loan, ...](), set[tuple[int, Loan]]()
        self._least = dict[int, int]()  # bytes of the lightest plan, where that is known and too much

    def look(
        self, seconds: float, numbers: Sequence[int] | None = None, num_later: int = 0, loans: Sequence[Loan] = ()
    ) -> tuple[dict[int, Glance], float]:
        """First looks at some of the contenders, and the seconds that this process has spent.

        Args:
            seconds: for the whole advice.
            numbers: None: all of this process.
            num_later: how many contenders are looked at in a later call.
            loans: plans of contenders that were looked at before, to begin near.
        """
        if not self.searches:
            self.clock, self._seconds = Clock(), seconds
        found, numbers = {}, self.numbers if numbers is None else numbers
        for place, number in enumerate(numbers):
            spent, end = self.clock.spent, LOOKING * seconds
            fair = (1 if loans else FAIR) * (end - spent) / (len(numbers) + num_later - place)
            longer = CUT_APART if self.contenders[number].entry.separate_cuts else 1
            most = (NEAR_PLANS if loans else ONE_LOOK) * seconds
            self.clock.allow(spent + longer * min(max(fair, SHORTEST * most), most))  # the last ones too get a part
            found[number] = Glance(remark=OUT_OF_TIME) if spent > seconds else self._glance(number, loans)
        return found, self.clock.spent

    def _glance(self, number: int, loans: Sequence[Loan]) -> Glance:
        search = Search(self.contenders[number], self.terms, self.budget, is_over=self.clock.is_over)
        try:
            outcome = search.look(known_plans(search, loans))
        except ValueError as error:
            return Glance(remark=str(error))
        if not (search.orders_follow_times or search.bounds.moves):  # else every cut takes an order, or many timelines
            self.clock.allow(self.clock.spent + min(self.clock.left, ONE_CLIMB * self._seconds))
            search.move_layers()
            outcome = search.best().timed
        self.searches[number] = search
        search.keep_one_frame()
        return Glance(rank(outcome), outcome.tokens_per_s if outcome.fits else 0.0, loan=loan_of(search))

    def go_by_turns(
        self, numbers: Sequence[int], to_beat: float | None, seconds: float, loans: Sequence[Loan]
    ) -> list[Loan]:
        """Search some contenders further, first the one that may gain most; the plans that lead then.

        Args:
            numbers: of these contenders, the most promising first.
            to_beat: as in `rpbench.plan.contest.search.tune`.
            seconds: for all that is left to do, this part included.
            loans: plans of contenders in all processes, to try.
        """
        self._loans, self._end = tuple(loans), self.clock.spent + seconds
        able = [number for number in numbers if not self.searches[number].cannot_fit()]
        self._able = [number for number in able if not self._is_too_much(number)]
        for number in self._able[:1]:  # the leader first
            self._go_on(number, to_beat, min(ONE_TURN * self._seconds, seconds), everywhere=False)
        self._take_turns(self._able, to_beat, TURNS * (self._end - self.clock.spent))
        return leading(map(loan_of, self.searches.values()))

    def finish(self, to_beat: float | None, loans: Sequence[Loan]) -> dict[int, Any]:
        """The rows of this process's contenders, after all have tried the leading plans and some searched to the end.

        Args:
            to_beat, loans: as in `go_by_turns`.
        """
        self._loans, found, end = tuple(loans), self._found, self._end
        waiting = sorted(self._able, key=lambda each: self.searches[each].best_pace())  # without a plan first
        until = self.clock.spent + PROBING * (end - self.clock.spent)
        for place, number in enumerate(waiting):
            self.clock.allow(self.clock.spent + FAIR * (until - self.clock.spent) / (len(waiting) - place))
            self._borrow(number)
            self.searches[number].move_layers()
        # First searches that have not ended, the fastest first; then all, from other starting points.
        for part, everywhere in ((ONE_SEARCH, False), (0.0, True)):
            waiting = [each for each in self._able if each not in found]
            waiting = [each for each in waiting if everywhere or not self.searches[each].has_ended]
            waiting.sort(key=lambda each: -self.searches[each].best_pace())
            for place, number in enumerate(waiting):
                of_left = part or min(ONE_SEARCH, FAIR / (len(waiting) - place))
                left = of_left * (end - self.clock.spent)
                self._go_on(number, to_beat, left, everywhere=everywhere)
        self.clock.allow(max(end, self.clock.spent) + BOUNDING * self._seconds)
        return {number: found[number] if number in found else self._finished(number) for number in self.searches}

    def _is_too_much(self, number: int) -> bool:
        """Whether even the lightest plan of a contender without a plan does not fit; if it fits, search on from it."""
        search, limit = self.searches[number], self.terms.limits.device_memory_bytes
        if search.best_pace() or limit is None:
            return False
        self.clock.allow(min(self._end, self.clock.spent + WEIGHING * self._seconds))
        found = lightest(search, self.clock.is_over)
        if found is None:
            return False
        if found.bytes > limit:
            self._least[number] = found.bytes
            return True
        self.clock.allow(min(self._end, self.clock.spent + ONE_TURN * self._seconds))
        for recompute in search.space.dimensions["recompute"]:
            if not search.best_pace():
                search.climb_from(found.setting.changed("recompute", recompute), found.cut, self.budget.work)
        return False

    def _begin_light(self, search: Search) -> None:
        """Begin at light settings, without sketches: the smallest microbatch, one option of the schedule changed."""
        entry = search.contender.entry
        if entry.separate_cuts:
            return
        self.clock.allow(self.clock.spent + ONE_TURN * self._seconds)
        first = search.space.first.changed("microbatch_sequences", min(self.terms.microbatches))
        first = first.changed("recompute", "all")
        options = [changed for dimension, changed in search.space.changes(first) if dimension.startswith(OPTION)]
        chunks = [changed for dimension, changed in search.space.changes(first) if dimension == "chunks_per_device"]
        for setting in (*options[::-1], first, *chunks):  # an option's default is seldom the lightest
            with suppress(ValueError):  # the schedule does not take the setting
                problem = posed(search.contender, setting, self.terms, 1)
                cuts = plain_partitions(problem, promising_counts(problem)[0])[::-1]  # room for the head first
                # Where each cut has its own order, all are timed: moving layers off one may lead back to it.
                for cut in cuts if entry.needs_costs else cuts[:1]:
                    if search.best_pace() or self.clock.is_over():
                        return
                    frame = search.frames.of(setting, cut, self.terms.num_steps)
                    work = 1 if entry.needs_costs else self.budget.work
                    search.climb_from(setting, frame.emptier(cut, "all"), work)

    def _take_turns(self, able: Sequence[int], to_beat: float | None, seconds: float) -> None:
        """Search in turns: the contender that may gain most is next, judged by bounds and by earlier turns."""
        until, bounded = self.clock.spent + seconds, set[int]()
        self.clock.allow(until)
        worth = {number: self._worth(number, to_beat or 0.0) for number in able}
        while self.clock.spent < until and max(worth.values(), default=0.0) > NEAR:
            number = max(worth, key=lambda each: worth[each])
            search = self.searches[number]
            before = search.best_pace()
            if before and number not in bounded:  # a tighter bound takes an order, and is worth it by now
                worth[number] = min(worth[number], search.bounds.best_pace(self.clock.is_over) / before - 1)
                bounded.add(number)
                continue
            # A search of such a contender learns little about other cuts.
            begins_light = not before and search.contender.entry.needs_costs
            if begins_light:
                self._begin_light(search)
            self._go_on(number, to_beat, ONE_TURN * self._seconds, everywhere=False)
            if not search.best_pace() and not begins_light:
                self._begin_light(search)
            gain = search.best_pace() / before - 1 if before else float(search.best_pace() > 0)
            worth[number] = max(TIRED * worth[number], min(gain, MOST_GAIN))
            self.clock.allow(until)
            if number in self._found or search.has_ended:
                del worth[number]

    def _worth(self, number: int, to_beat: float) -> float:
        """What a first turn may gain, as a fraction of the pace; little if the contender is far behind."""
        search = self.searches[number]
        pace = search.best_pace()
        if not pace:
            return NO_PLAN
        bound = max(search.bounds.loose_pace(each) for each in search.bounds.settings())
        return min(bound / pace - 1, MOST_GAIN if pace > GIVEN_UP * to_beat else FAR_BEHIND)

    def _go_on(self, number: int, to_beat: float | None, seconds: float, *, everywhere: bool) -> None:
        """Search for `seconds`; the reason why there is no plan becomes the row."""
        if seconds <= 0:
            return
        self.clock.allow(self.clock.spent + seconds)
        self._borrow(number)
        try:
            self.searches[number].finish(to_beat, everywhere=everywhere)
        except ValueError as error:
            self._found[number] = str(error)

    def _borrow(self, number: int) -> None:
        """Try the plans that led when this phase began, each once; the number of processes makes no difference."""
        kind = kind_of(self.searches[number])
        for loan in sorted(self._loans, key=lambda each: each.kind != kind):  # of equals, the fastest first
            if (number, loan) not in self._borrowed and not self.clock.is_over():
                self._borrowed.add((number, loan))
                borrow(self.searches[number], loan, self.budget.work)

    def _finished(self, number: int) -> Any:
        search = self.searches[number]
        try:
            search.settle()
            plan = search.plan()
            plan = replace(plan, least_bytes=max(plan.least_bytes, self._least.get(number, 0)))
            search.keep_one_frame()
            row = self._row(plan, search.frames)
        except ValueError as error:
            return str(error)
        return replace(row, plan=bare(plan))

    def change(self, what: Callable[..., Any], leaders: Sequence[tuple[int, Tuned]], seconds: float) -> Any:
        """Call a function on some plans.

        Args:
            what: a function of a module, which can be pickled; takes the plans, their frames, the terms, the budget and
                whether time is over.
        """
        self.clock.allow(self.clock.spent + seconds)
        plans = [replace(plan, contender=self.contenders[number]) for number, plan in leaders]
        frames = [  # new ones for contenders of other processes
            self.searches[number].frames if number in self.searches else Frames(self.contenders[number], self.terms)
            for number, _ in leaders
        ]
        return what(plans, frames, self.terms, self.budget, self.clock.is_over)


def bare(plan: Tuned) -> Tuned:
    """A plan without its contender, whose functions cannot be pickled."""
    return replace(plan, contender=None)  # type: ignore[arg-type]


# --- processes -----------------------------------------------------------------------------------------------


class Side:
    """A process with its share; without `apart` this process."""

    def __init__(self, share: Share, stack: ExitStack, *, apart: bool) -> None:
        self.share = share
        # Garbage collection is off: schedules are many small tuples in no circle.
        self._pool = stack.enter_context(forks(1, self._call, gc.disable)) if apart else None

    def _call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.share, method)(*arguments)

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Start a method of the share; the returned function waits for its result."""
        if self._pool is not None:
            return self._pool.submit(inherited, method, *arguments).result
        with uncollected():
            found = self._call(method, *arguments)
        return lambda: found


_compiled: list[Terms] = []  # what this process had its kernels compiled with


def compile_kernels(terms: Terms, basis: Basis) -> None:
    """Compile the simulator's kernels, or read them from their cache, before a clock starts; once a process.

    The first time on a machine takes some ten seconds, which would use up the time of a search.
    """
    if _compiled:
        return
    _compiled.append(terms)
    model = replace(terms.model, num_layers=2, num_dense_layers=min(1, terms.model.num_dense_layers), frozen_layers=0)
    cluster = replace(terms.cluster, num_devices=None, device_speeds=None)
    small = terms_of(model, cluster, basis, num_devices=2, sequences_per_step=4, microbatches=(1,), num_steps=3)
    for contender in contenders(CALLING):
        with suppress(ValueError):  # a search on the real terms reports it
            Search(contender, small, Budget(1, 1_000), is_over=lambda: False).look()  # as with a time limit


def dealt(
    contenders: Sequence[Contender],
    terms: Terms,
    budget: Budget,
    row: Callable[[Tuned, Frames], Any],
    processes: int,
    stack: ExitStack,
) -> list[Side]:
    """Deal the contenders to processes, which end with the stack."""
    apart = processes > 1 and len(contenders) > 1 and hasattr(os, "fork")
    number = min(processes, len(contenders)) if apart else 1
    return [
        Side(Share(contenders, range(each, len(contenders), number), terms, budget, row), stack, apart=apart)
        for each in range(number)
    ]
