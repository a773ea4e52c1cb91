"""Search: the best plan of a contender, over every dimension of its space, within a budget.

The search begins at the usual setting, or at the highest bound if bounds count links. It changes one dimension at a
time: it tries every other value and takes the best, until no single change helps. Each setting is sketched first
(`rpbench.plan.contest.sketch`); a promising one is timed with all its transfers over a few steps. Layers then move
between stages one by one; if another setting is better with the cut that was found, the search goes on there. Close
settings with other numbers of stages are searched in the same way; where both directions are cut apart, near numbers
of either are tried. The finalists run as many steps as the terms say.
Every contender has the same budget of timelines. With a time limit, recomputation comes first.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf, isclose
from typing import NamedTuple

from rpbench.ir.partition import Partition
from rpbench.ir.waits.moves import has_transfers
from rpbench.plan.contest.contender import OPTION, Contender, Setting, Space
from rpbench.plan.contest.frame import Frames, uncollected
from rpbench.plan.contest.plans import NONE, PROVEN, TOLERANCE, Budget, Outcome, Tried, Tuned, beats, leaders, rank
from rpbench.plan.contest.restarts import climbed, restart
from rpbench.plan.contest.sketch import WORTH
from rpbench.plan.contest.terms import Terms
from rpbench.plan.contest.trials import FINALISTS, LACKS, RESERVED, Trials
from rpbench.sim.metrics import rotation_of

OWED = 0.02  # a setting whose sketch is faster by more is timed even after the time limit
CLOSE = 0.02  # how far behind the best a plan may be that is timed with all steps at the end
FAR = 0.25  # a restart that begins further behind the best is dropped
GIVEN_UP = 0.5  # a contender below this fraction of the pace to beat is dropped
TIME_OVER = "the time was over; give more seconds"
OUT_OF_TIME = f"not searched: {TIME_OVER}"


def tune(
    contender: Contender,
    terms: Terms,
    budget: Budget | None = None,
    space: Space | None = None,
    *,
    to_beat: float | None = None,
    frames: Frames | None = None,
    is_over: Callable[[], bool] | None = None,
) -> Tuned:
    """The best plan found.

    Raises ValueError if the schedule takes no setting, or the time limit passed before one was found.

    Args:
        space: None: the full space.
        to_beat: tokens per second of another contender; a search that stays under half of it stops once it has chosen
            its microbatch size. None: it runs to the end.
        frames: empty frames to fill, for later use; None: they are dropped after the search.
        is_over: whether the time limit has passed; None: no limit.
    """
    search = Search(contender, terms, budget or Budget(), space, frames=frames, is_over=is_over)
    with uncollected():
        search.look()
        search.finish(to_beat)
        search.settle()
        return search.plan()


class Known(NamedTuple):
    """A plan of another contender to begin near; a search below its pace, in tokens/s, also tries its own options."""

    setting: Setting
    cut: Partition
    pace: float
    is_alike: bool = True  # whether its stages are placed as this contender places them


class Search(Trials):
    """The search of one contender: `look`, then `finish`. Arguments are those of `tune`."""

    _restarted, _to_beat, has_ended = NONE, 0.0, False
    _final: Tried | None = None  # timed with all steps
    _moved: Tried | None = None  # the last plan that a climb ended with

    def look(self, known: Sequence[Known] = ()) -> Outcome:
        """The best outcome near the usual setting, or near known plans of other contenders; ValueError as of `tune`."""
        begun = self._best_known(known)
        if begun is None or self.bounds.moves:  # where weights move, plans of others say little
            begun = max(filter(None, (begun, self._start())), key=lambda each: self.tried[each].score)
        begun, best = self._fitting(begun), self.best()
        if self.is_over is None:
            return best.timed
        if known:
            if self.best_pace():
                self._other_chunks(self.best().setting)
            return self.best().timed
        for value in self.space.dimensions["recompute"] if begun.recompute != "fitting" else ():
            changed = begun.changed("recompute", value)
            if not self.time_is_over() and beats(self._look_at(changed), self.tried[begun]):
                begun = changed
        if self.tried[begun].timed.fits:
            # Else a sketch, which counts no updates, has chosen the microbatch size.
            if self.sketcher.is_blind(begun) or self.contender.entry.steps_each_microbatch:
                begun = self._other_sizes(begun)
                self._look_beside(begun, self.tried[begun].cut, inf)
            self._other_chunks(self.best().setting)
            self.try_other_counts()
        return self.best().timed

    def _fitting(self, setting: Setting) -> Setting:
        """The setting, or one near it that fits or lacks least memory: single changes until none lacks less."""
        best, improved = setting, not self.cannot_fit()
        while improved and not self.time_is_over() and not self.tried[best].timed.fits:
            improved, heavier = False, set[str]()  # options with a value that lacks much more
            for changed in self._lighter(best):
                option = changed.option_beside(best)
                if self.time_is_over() or option in heavier:
                    continue
                found = self._look_at(changed)
                if beats(found, self.tried[best]):
                    best, improved = changed, True
                    if self.tried[best].timed.fits or (option and self.is_over is not None):
                        break
                elif self.is_over is not None and option and found.outcome is not None:
                    heavier |= {option} if found.timed.misfit > self.tried[best].timed.misfit + LACKS else set()
        return best

    def finish(self, to_beat: float | None = None, *, everywhere: bool = True, recuts: bool = True) -> Tried:
        """Search on from the best plan so far, to the end or the time limit; may be called again.

        Args:
            to_beat: as in `tune`.
            everywhere: also try settings that no single change leads to, and random restarts.
            recuts: also move single layers.
        """
        self._to_beat = to_beat or 0.0
        can_fit, seen = not self.cannot_fit(), list[Setting]()
        if self.is_over is not None and can_fit:  # time may have ended before a setting that fits was found
            self._fitting(self.best().setting)
            self._try_options(self.best())
        setting = self._descend(self.best().setting) if can_fit and not self.has_ended else None
        while can_fit and recuts:
            if setting is None and everywhere:
                setting = self._further()
            if setting is None or self._is_beaten(setting):
                break
            self._improve_cut(setting)
            seen.append(setting)
            near = self._better_with_its_cut(setting)
            setting = self._runner_up(seen) if near is None else self._descend(near)
        if can_fit and recuts and everywhere:
            self._move_far()
            self._move_far_beside()
        if everywhere and not self.time_is_over() and not self._is_beaten(self.best().setting):
            self._restarted = restart(self, self.budget.restarts)
        if not self.time_is_over():
            self._final, self.has_ended = self._last(FINALISTS), True
        return self._final or self.best()

    def _try_options(self, best: Tried) -> None:
        """Time other options with the same cut, if a sketch says little about them."""
        for setting in self.space.other_options(best.setting) if self.sketcher.is_blind(best.setting) else ():
            if not self.time_is_over() and setting not in self.tried:
                self._look_at_cut(setting, best.cut)

    def begin_at(self, setting: Setting, work: int) -> None:
        """Search from a setting as from the first one, and move single layers too."""
        if self.bounds.pace(setting) <= self.best_pace() * (1 + PROVEN):
            return
        self._may_spend = self.work + RESERVED + work
        if self._look_at(setting) in self.close():
            self._improve_cut(setting)
        found = self._descend(setting) if self.tried[setting].outcome is not None else setting
        if found != setting and self.tried[found] in self.close():
            self._improve_cut(found)

    def climb_from(self, setting: Setting, cut: Partition, work: int) -> None:
        """Move single layers from a cut close to the best; keep the result if it beats the setting's known plan."""
        known, begun = self.tried.get(setting), None
        with suppress(ValueError):  # the schedule does not take it
            begun = self._timed(setting, cut)
        if begun is None or not self._is_near(begun, FAR):
            return
        self._may_spend, self.tried[setting] = self.work + RESERVED + work, begun
        self._improve_cut(setting)
        if known is not None and not beats(self.tried[setting], known):
            self.tried[setting] = known

    def move_layers(self) -> None:
        """Try other numbers of stages; then move single layers, to distant stages too, unless a climb ended there."""
        self.try_other_counts()
        if self.best().timed.fits:
            self._other_chunks(self.best().setting)
        best = self.best()
        if best.timed.fits and best != self._moved:
            self._may_spend = self.work + RESERVED + self.budget.work
            for far in (False, True):
                self._improve_cut(best.setting, far=far)

    def keep_one_frame(self) -> None:
        """Drop all frames except that of the best plan so far."""
        best = self._final or self.best()
        num_steps = self._num_steps(best.setting, all_steps=self._final is not None)
        self.frames.keep_only(best.setting, best.cut, num_steps)

    def settle(self) -> None:
        """Time the best plan with all steps if time ended the search, unless its second step is as any other."""
        best = self.best()
        if self._final is None and best.timed.fits and not self._is_steady(best):
            self._final = self._last(1)

    def plan(self) -> Tuned:
        """The best plan so far, with what was spent on it."""
        best = self._final or self.best()
        fits = best.timed.fits
        return Tuned(
            self.contender,
            best.setting,
            best.cut,
            best.timed,
            tuple(self.tried.values()),
            self.budget,
            self.work,
            self.num_timed,
            self.sketcher.tally.num_evaluated,
            self._num_steps(best.setting, all_steps=self._final is not None),
            self.has_ended,
            self.bounds.best_pace(self.time_is_over) if fits else inf,
            *((0, 0) if fits else self.least),
            self._restarted,
        )

    # --- settings ---

    def _best_known(self, known: Sequence[Known]) -> Setting | None:
        slow = self.orders_follow_times  # every cut takes an order of its own
        fastest = max((plan.pace for plan in known), default=0.0)
        alike = fastest if slow else max((plan.pace for plan in known if plan.is_alike), default=0.0)
        for plan in (each for each in known if each.pace >= (alike if each.is_alike else fastest) * (1 - WORTH)):
            if self.time_is_over() or (self._found() and self._is_hopeless(self.best().setting)):
                break
            self._look_at_cut(plan.setting, plan.cut)
            self._look_beside(plan.setting, plan.cut, plan.pace * (1 - WORTH))
        if not self._found():
            return None
        of_chunks = dict[int | None, Setting]()
        for tried in sorted(self._found(), key=lambda each: -each.score):
            of_chunks.setdefault(tried.setting.chunks_per_device, tried.setting)
        for setting in [*of_chunks.values()][: 1 if slow else None]:  # cuts of other contenders say little
            self._look_at_own_cuts(setting)
        best = self.best()
        if best.timed.fits and self.sketcher.is_blind(best.setting):  # activations that stay may take time on a link
            for recompute in self.space.dimensions["recompute"]:
                self._look_at_cut(best.setting.changed("recompute", recompute), best.cut)
        best = self.best()
        return self._other_sizes(best.setting) if best.timed.fits else best.setting

    def _look_beside(self, begun: Setting, cut: Partition, enough: float) -> None:
        """Time other options with a cut until the pace is enough; each option until one of its values is no faster."""
        useless = set[str]()
        for setting in self.space.other_options(begun):
            option, before = setting.option_beside(begun), self.best_pace() if self._found() else 0.0
            if before >= enough or self.time_is_over():
                return
            if option not in useless:
                self._look_at_cut(setting, cut)
            if before and self.best_pace() <= before * (1 + PROVEN):
                useless.add(option)

    def _start(self) -> Setting:
        """The usual setting, or one near it that the schedule takes; tried and timed."""
        best = self.bounds.fastest_first(self.bounds.settings()) if self.bounds.count_links and not self.is_over else ()
        first, refused = next(iter(best), self.space.first), ""
        recomputes = () if self.is_over is None else self.space.dimensions["recompute"]
        if recomputes and not self.sketcher.pace(first) and self.is_ruled_out:
            recomputes = ()
        for recompute in sorted(recomputes, key=lambda each: each != "fitting"):  # `fitting` covers the others
            first = self.sketcher.first_size(self.space.first.changed("recompute", recompute), self.space)
            if self._look_at(first).outcome or (recompute, first.options) not in self._refused:
                break
        near = [first, *(changed for _, changed in self._changes(first))]
        for setting in dict.fromkeys([*near, *(far for one in near for _, far in self._changes(one))]):
            if refused and self.time_is_over():
                raise ValueError(f"{refused}; before another setting could be tried {TIME_OVER}")
            found = self._look_at(setting)
            if found.outcome is not None:
                return setting
            refused = refused or found.remark
        raise ValueError(f"{self.contender.name}: no setting can be built; {refused}")

    def _changes(self, setting: Setting) -> list[tuple[str, Setting]]:
        """Every setting one change away; under a time limit, those that need no other frame first."""
        return sorted(self.space.changes(setting), key=lambda change: bool(self.is_over) and change[0] != "recompute")

    def _descend(self, current: Setting) -> Setting:
        """The setting reached by single changes, judged by sketches, until none improves it."""
        improved = True
        while improved:
            improved = False
            for dimension, values in self.space.dimensions.items():
                if self.time_is_over() or (dimension != "microbatch_sequences" and self._is_beaten(current)):
                    return current
                changes = [changed for value in values if (changed := current.changed(dimension, value)) != current]
                if dimension.startswith(OPTION):  # another option may allow the usual recomputation again
                    usual = self.space.first.recompute
                    changes = list(dict.fromkeys(each.changed("recompute", usual) for each in changes)) + changes
                    sizes = self.space.dimensions["microbatch_sequences"] if self.is_over and self.bounds.moves else ()
                    larger = [size for size in sizes if size > current.microbatch_sequences]  # move weights less often
                    changes += [each.changed("microbatch_sequences", size) for each in changes for size in larger]
                if dimension == "microbatch_sequences" and self.is_over is not None:
                    changes = self.sketcher.by_promise(current, self.space)
                for changed in sorted(changes, key=self.sketcher.pace, reverse=True):  # of equals, the usual first
                    if self._is_worth(changed, current) and beats(self._look_at(changed), self.tried[current]):
                        current, improved = changed, True
                    elif self._is_owed(changed):  # the last one: time is over
                        return changed if beats(self._look_at(changed), self.tried[current]) else current
        return current

    def _is_owed(self, setting: Setting) -> bool:
        """Whether time ended before a setting was timed whose sketch promises more than the best setting's."""
        is_untimed = self.time_is_over() and setting not in self.tried and not self._is_covered(setting)
        if self.sketcher.is_blind(setting):  # transfers decide, which only timelines count
            return is_untimed and self.sketcher.pace(setting) > self.best_pace() * (1 + WORTH)
        return is_untimed and self.sketcher.pace(setting) > self.sketcher.pace(self.best().setting) * (1 + OWED)

    def _is_beaten(self, current: Setting) -> bool:
        """Whether a setting fits but is far below the pace to beat."""
        outcome = self.tried[current].outcome
        return outcome is not None and outcome.fits and rank(outcome) < GIVEN_UP * self._to_beat

    def _is_worth(self, changed: Setting, current: Setting) -> bool:
        if self._is_tried(changed) or self._is_covered(changed):
            return False
        if self.is_spent():
            if not self.time_is_over():
                self.tried.setdefault(changed, Tried(changed, remark="not timed: the budget was spent"))
            return False
        if (bound := self.bounds.pace(changed)) <= self.best_pace() * (1 + PROVEN):
            remark = f"bounded: at most {bound:,.0f} tokens/s; not timed"
            self.tried.setdefault(changed, Tried(changed, remark=remark))  # a setting cut short keeps its outcome
            return False
        outcome, estimate = self.tried[current].outcome, self.sketcher.pace(changed)
        if outcome is None or not outcome.fits or estimate >= self.sketcher.pace(current) * (1 - WORTH):
            return True
        if estimate and self.sketcher.overlaps(changed):  # filling is a large part of a few steps only
            return True
        if estimate:
            share = estimate / self.sketcher.pace(current)
            self.tried.setdefault(changed, Tried(changed, remark=f"sketched: {share:.2f} of the pace; not timed"))
            return False
        # The sketch does not fit. But an order that follows from times may hold less memory without recomputation, and
        # so fit without it.
        return changed.value("recompute") != "none" or outcome.keeps == self.tried[current].cut.backward

    # --- cuts ---

    def _improve_cut(self, setting: Setting, *, far: bool = False, own_orders: bool = False) -> None:
        enough, recut = self.bounds.pace(setting) / (1 + PROVEN), partial(self._recut, own_order=own_orders)
        self.tried[setting] = climbed(self.tried[setting], recut, self.is_spent, enough, far=far)
        self._moved = self._moved if self.is_spent() else self.tried[setting]

    def _recut(self, current: Tried, cut: Partition, *, own_order: bool) -> Tried | None:
        """The plan with another cut; None if its order is refused, or without `own_order`, if it promises less."""
        with suppress(ValueError):
            return self._timed(current.setting, cut) if own_order or self._is_promising(current, cut) else None
        return None

    def _move_far(self) -> None:
        """Move layers of the best plan to distant stages too, and search on from there."""
        self.try_other_counts()
        near: Setting | None = self.best().setting
        while near is not None and not self.is_spent() and not self._is_beaten(near):
            setting = self._descend(near)
            self._improve_cut(setting)
            self._improve_cut(setting, far=True)
            if self.orders_follow_times:  # the order of one cut may tell little of another
                self._improve_cut(setting, own_orders=True)
            near = self._better_with_its_cut(setting)

    def _move_far_beside(self) -> None:
        """Move layers far in the best plan of each other microbatch size too, if it is close enough to win."""
        if self.is_over is not None or self._is_beaten(self.best().setting):
            return
        seen = {self.best().setting.microbatch_sequences}
        while not self.is_spent():
            worth = self.best_pace() * (1 + PROVEN)
            others = (each for each in self._found() if each.setting.microbatch_sequences not in seen)
            able = [each for each in others if self._is_near(each, FAR) and self.bounds.pace(each.setting) > worth]
            if not able:
                return
            setting = max(able, key=lambda each: each.score).setting
            seen.add(setting.microbatch_sequences)
            self._improve_cut(setting, far=True)
            if self.best_pace() > worth:
                self._move_far()

    def _is_promising(self, current: Tried, cut: Partition) -> bool:
        """Whether a cut is worth its own order, if orders follow from times: it is better under the current order."""
        setting = current.setting
        if not self.orders_follow_times:
            return True
        self.num_timed += 1
        known = self._frame(setting, current.cut)
        return beats(current._replace(outcome=known.outcome(cut, setting.recompute)), current)

    def _better_with_its_cut(self, setting: Setting) -> Setting | None:
        """A setting one change away that beats this one with the same cut; only settings with a frame are tried."""
        cut = self.tried[setting].cut
        for _, near in self.space.changes(setting):
            known = self.tried.get(near, Tried(near))
            if known.partition == cut or self.is_spent():
                continue
            with suppress(ValueError):  # the schedule, or its order for this cut, does not take the setting
                if self.frames.has(near, cut, self._num_steps(near)):
                    recut = self._timed(near, cut)
                    self.tried[near] = recut if beats(recut, known) else known
                    if beats(recut, self.tried[setting]):
                        return near
        return None

    def _runner_up(self, seen: Sequence[Setting]) -> Setting | None:
        """The best setting with a number of stages whose cut was not improved yet, if it is close to the best."""
        counts = {each.chunks_per_device for each in seen}
        worth = max(self.tried[each].score for each in seen) * (1 - WORTH)
        others = (each for each in self._found() if each.setting.chunks_per_device not in counts)
        best = max(others, key=lambda each: each.score, default=None)
        return None if best is None or best.score <= worth or self.is_spent() else best.setting

    def _further(self) -> Setting | None:
        """The end of a descent from the first setting, not ruled out by a bound, that beats the best; else None."""
        best = self.best().setting
        for each in () if self.is_spent() or self._is_beaten(best) else self.bounds.nearest_first(best):
            if not self.is_spent() and self._is_worth(each, best) and beats(self._look_at(each), self.tried[best]):
                return self._descend(each)
        return None

    def _is_steady(self, tried: Tried) -> bool:
        """Whether all steps after the first are alike: nothing moves between them, or a third is as the second."""
        graph, found = self._frame(tried.setting, tried.cut).graph, tried.timed
        if not has_transfers(graph.schedule):
            return True
        if self.sketcher.overlaps(tried.setting) or rotation_of(graph.columns, graph.schedule.shape) > 1:
            return False
        with suppress(ValueError):  # an order that follows from times may differ in more steps
            third = self.frames.of(tried.setting, tried.cut, 3).outcome(tried.cut, tried.setting.recompute)
            kept = (third.peak_bytes, third.host_bytes) == (found.peak_bytes, found.host_bytes)
            return kept and isclose(third.step_time_s, found.step_time_s, rel_tol=TOLERANCE)
        return False

    def _last(self, most: int) -> Tried:
        """The best of the finalists, at most so many, each timed with all steps."""
        again = list[Tried]()
        for each in leaders(self._found(), FINALISTS, CLOSE):
            if len(again) == most:
                break
            with suppress(ValueError):  # an order that follows from times may differ in more steps
                again.append(self._timed(each.setting, each.cut, all_steps=True))
        if not again:
            raise ValueError(f"{self.contender.name}: no setting takes {self.terms.num_steps} steps; ask for fewer")
        return max(again, key=lambda each: each.score)
