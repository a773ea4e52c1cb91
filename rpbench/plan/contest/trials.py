"""Trials: the settings and cuts that a search has timed, each once, with its bounds and sketches."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from rpbench.ir.partition import Partition
from rpbench.passes.recomputation import Recompute
from rpbench.plan.contest.bounds import Bounds
from rpbench.plan.contest.contender import Contender, Setting, Space, space_of, terms_for
from rpbench.plan.contest.frame import FRAME, Frame, Frames
from rpbench.plan.contest.plans import PROVEN, Budget, Tried, beats
from rpbench.plan.contest.sketch import WORTH, Sketcher
from rpbench.plan.contest.terms import Terms
from rpbench.plan.counts import Counts
from rpbench.sim.kernels import compile_orders

FEW_STEPS = 2  # steps timed while searching, if steps do not overlap; the pace is that of the second
OVERLAPPING_STEPS = 6  # least number of steps timed if steps overlap; the middle three give the pace
LACKS = 0.1  # fraction of the memory that it may lack
EVERYWHERE = 0.5  # fraction of the memory that devices may lack on average, if each cut has its own order
GAINS = 0.01  # least gain in pace that another microbatch size must promise to be timed
FINALISTS = 3  # most plans timed with all steps at the end
RESERVED = FINALISTS * (FRAME + 1)  # work reserved for them
ATTEMPTS = 3  # cuts tried to relieve full devices


class Trials:
    """The settings that a search has tried. Arguments are those of `rpbench.plan.contest.search.tune`."""

    def __init__(
        self,
        contender: Contender,
        terms: Terms,
        budget: Budget,
        space: Space | None = None,
        *,
        frames: Frames | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        if contender.entry.needs_costs and terms.problem is None:  # a posed problem makes few orders
            compile_orders()
        terms = terms_for(contender, terms)
        self.contender, self.terms, self.budget = contender, terms, budget
        self.space = space or space_of(contender, terms)
        self.frames = frames or Frames(contender, terms)
        self.sketcher = Sketcher(contender, terms, budget.climb_work, is_over=is_over)
        self.bounds = Bounds(contender, terms, self.space, with_links=is_over is None)  # links take long
        self.tried: dict[Setting, Tried] = {}
        self.num_timed, self._may_spend = 0, budget.work
        self.is_over = is_over
        self._cut_short: set[Setting] = set()  # settings that did not fit when time ran out
        self._counts: dict[Setting, set[Counts]] = defaultdict(set)  # numbers of stages that were tried beside others
        self._refused: dict[tuple[Recompute, tuple[tuple[str, Any], ...]], str] = {}

    @property
    def work(self) -> int:
        """The part of the budget that has been spent."""
        return self.num_timed + self.frames.each * self.frames.num_made

    @cached_property
    def least(self) -> tuple[int, int]:
        """Lower bounds on the bytes of the fullest device and of the host in every plan; 0 without a limit."""
        bounds, limits = self.bounds, self.terms.limits
        return bounds.least_bytes(limits.device_memory_bytes), bounds.least_host_bytes(limits.host_memory_bytes)

    @property
    def is_ruled_out(self) -> bool:
        """Whether a bound shows that no plan fits."""
        return self.terms.limits.are_below(*self.least)

    def cannot_fit(self) -> bool:
        """Whether no plan found fits, and a bound shows that none can."""
        return not self.best().timed.fits and self.is_ruled_out

    def best(self) -> Tried:
        return max(self._found(), key=lambda each: each.score)

    def best_pace(self) -> float:
        """Tokens per second of the best plan so far; 0 if none fits."""
        return max(0.0, self.best().score)

    def close(self) -> list[Tried]:
        """Plans close to the best so far, and plans that lack little memory and that no bound rules out."""
        near, best = (each for each in self._found() if self._is_near(each, WORTH)), self.best_pace()
        return [each for each in near if each.timed.fits or self.bounds.pace(each.setting) > best]

    def _is_near(self, tried: Tried, behind: float) -> bool:
        outcome = tried.timed
        return outcome.tokens_per_s >= self.best_pace() * (1 - behind) and outcome.misfit <= 1 + LACKS

    def time_is_over(self) -> bool:
        return self.is_over is not None and self.is_over()

    def is_spent(self) -> bool:
        """Whether only the work reserved for the finalists is left, or time is over."""
        return self.work + RESERVED > self._may_spend or self.time_is_over()

    def _look_at(self, setting: Setting) -> Tried:
        """The best cut of a setting, timed; or the reason why there is none."""
        if setting not in self.tried and self._is_covered(setting):
            self.tried[setting] = Tried(setting, remark="covered by recompute=fitting")
        if not self._is_tried(setting):
            if remark := self._refused.get((setting.recompute, setting.options)):
                return self.tried.setdefault(setting, Tried(setting, remark=remark))
            self._cut_short.discard(setting)
            try:
                self.tried[setting] = self._best_of(setting, self.sketcher.of(setting).cuts)
                self._make_room(setting)
                if self.time_is_over() and not self.tried[setting].timed.fits:
                    self._cut_short.add(setting)
            except ValueError as error:
                self.tried[setting] = Tried(setting, remark=f"refused: {error}")
        return self.tried[setting]

    def _look_at_cut(self, setting: Setting, cut: Partition) -> None:
        known = self.tried.get(setting)
        if known is not None and known.outcome is not None and known.outcome.fits:
            return
        with suppress(ValueError):  # the schedule does not take it
            found = self._timed(setting, cut)
            self.tried[setting] = found if known is None or beats(found, known) else known
            self._make_room(setting)

    def _look_at_own_cuts(self, setting: Setting) -> None:
        """Time the cuts of a setting's sketch as well, unless time is over or no cut can fit."""
        if not (self.time_is_over() or self._is_hopeless(setting)):
            with suppress(ValueError):  # a schedule that takes no sketch
                cuts = [cut for cut in self.sketcher.of(setting).cuts if cut != self.tried[setting].partition]
                own = self._best_of(setting, cuts) if cuts else self.tried[setting]
                self.tried[setting] = own if beats(own, self.tried[setting]) else self.tried[setting]
                self._make_room(setting)

    def _is_tried(self, setting: Setting) -> bool:
        """Whether a setting was tried, and need not be tried again because time cut it short before it fit."""
        again = setting in self._cut_short and not self.time_is_over() and not self.tried[setting].timed.fits
        return setting in self.tried and not again

    def _is_covered(self, setting: Setting) -> bool:
        """Whether the setting with `recompute=fitting`, which is at least as fast, has been timed.

        It may be slower in two cases: where activations move, recomputed ones take no time on a link; and an order that
        follows from times may hold less without recomputation. Where all fits, `fitting` has that order too, which
        is enough under a time limit.
        """
        entry = self.contender.entry
        fitting = self.tried.get(setting.changed("recompute", "fitting"))
        if setting.recompute == "fitting" or fitting is None or fitting.outcome is None or entry.lower is not None:
            return False
        is_same_order = self.is_over is not None and fitting.outcome.keeps == fitting.cut.backward
        if setting.recompute == "none" and entry.needs_costs and not is_same_order:
            return False
        return not self.sketcher.of(fitting.setting).moves

    def _best_of(self, setting: Setting, cuts: Sequence[Partition]) -> Tried:
        timed = list[Tried]()
        for cut in cuts:
            if timed and (self.time_is_over() or self._lacks_everywhere(timed[-1])):
                break
            timed.append(self._timed(setting, cut))
        return max(timed, key=lambda each: each.score)

    @property
    def orders_follow_times(self) -> bool:
        """Whether each cut has an order of its own, which costs more than a timeline under another's."""
        return self.contender.entry.needs_costs and not self.contender.entry.separate_cuts

    def _lacks_everywhere(self, tried: Tried) -> bool:
        """Whether devices lack so much on average that it is not worth making the orders of other cuts.

        Under a time limit anything: other settings are tried sooner.
        """
        most = 1 + (EVERYWHERE if self.is_over is None else 0)
        if not self.orders_follow_times or tried.timed.misfit <= most:
            return False
        frame, recompute = self._frame(tried.setting, tried.cut), tried.setting.recompute
        mean = frame.mean_misfit(tried.cut, tried.timed.keeps, recompute)
        return mean > most and not self.is_ruled_out  # if no plan can fit, the best cut is the answer

    def _other_sizes(self, begun: Setting) -> Setting:
        """The setting with the fastest microbatch size near its own, all with the same cut, then with their own.

        Larger sizes are tried first, for fewer microbatches are timed sooner; smaller ones if these are no faster.
        """
        sizes, own, best = sorted(self.space.dimensions["microbatch_sequences"]), begun.microbatch_sequences, begun
        if self.contender.entry.separate_cuts:  # a cut serves one size
            for changed in self.sketcher.close_sizes(begun, self.space):
                best = changed if not self.time_is_over() and beats(self._look_at(changed), self.tried[best]) else best
            return best
        tried = list[Setting]()
        for way in ([size for size in sizes if size > own], [size for size in reversed(sizes) if size < own]):
            for changed in (begun.changed("microbatch_sequences", size) for size in way):
                if self.time_is_over() or not self._may_gain(changed, best):
                    break
                self._look_at_cut(changed, self.tried[best].cut)
                tried.append(changed)
                if changed not in self.tried or not beats(self.tried[changed], self.tried[best]):
                    break
                best = changed
            if best != begun:
                break
        for close in (each for each in tried if each in self.tried and self.tried[each] in self.close()):
            self._look_at_own_cuts(close)
            best = close if beats(self.tried[close], self.tried[best]) else best
        return best

    def _may_gain(self, changed: Setting, current: Setting) -> bool:
        """Whether another microbatch size may be faster.

        Larger ones change weights less often. A step of a drained pipeline has three parts: computation; the fill,
        which is as long as one microbatch in one stage of all devices of a pipeline but one and so grows with the
        microbatch; and uneven stages, which do not. If memory is short, smaller microbatches also recompute less: then
        everything beside computation counts as fill.
        """
        pace, fewer = self.best_pace(), current.microbatch_sequences / changed.microbatch_sequences
        if self.bounds.pace(changed) <= pace * (1 + PROVEN):
            return False
        entry = self.contender.entry
        if entry.separate_cuts or entry.steps_each_microbatch:
            return fewer < 1
        if self.bounds.moves or self.sketcher.is_blind(current):
            return True
        at_best, there = (self.bounds.loose_pace(each) for each in (current, changed))
        if self.sketcher.overlaps(current) or not (at_best and there):
            return False
        outcome, cut = self.tried[current].timed, self.tried[current].cut
        beside = at_best / outcome.tokens_per_s - 1  # as a share of all computation
        stages = self.terms.num_microbatches(current.microbatch_sequences) * (current.chunks_per_device or 1)
        pipelines = len(next(iter(self.sketcher.placement(current)), (0,)))  # side by side, each with a part of a step
        fill = min(beside, (self.terms.num_devices / pipelines - 1) / stages)
        if fewer > 1 and outcome.keeps != cut.backward:
            fill = beside
        return there / (1 + beside - fill + fill / fewer) > pace * (1 + GAINS)

    def _other_chunks(self, begun: Setting) -> None:
        """Look at settings with more stages on a device as long as more are faster; if none is, with fewer.

        The best number may have another best microbatch size.
        """
        own, best = begun.chunks_per_device or 0, begun
        numbers = sorted(filter(None, self.space.dimensions["chunks_per_device"]))
        for way in ([each for each in numbers if each > own], [each for each in reversed(numbers) if each < own]):
            for changed in (begun.changed("chunks_per_device", number) for number in way):
                if self.time_is_over() or not beats(self._look_at(changed), self.tried[best]):
                    break
                best = changed
            if best != begun:
                if self.sketcher.is_blind(best):
                    self._other_sizes(best)
                    return
                sized = self.sketcher.first_size(best, self.space)
                if not self.time_is_over() and sized not in self.tried and self.bounds.pace(sized) > self.best_pace():
                    self._look_at(sized)
                return

    def try_other_counts(self) -> None:
        """Go on from the best plan to near numbers of stages until none is faster, if both directions are cut apart."""
        best, improved = self.best(), self.contender.entry.separate_cuts
        while improved and not self.is_spent():
            improved = False
            for cut in self.sketcher.with_other_counts(best.setting, best.cut, self._counts[best.setting]):
                with suppress(ValueError):  # the schedule does not take it
                    found = self._timed(best.setting, cut)
                    improved = beats(found, best)
                if improved or self.is_spent():
                    break
            if improved:
                best = self.tried[best.setting] = found

    def _make_room(self, setting: Setting) -> None:
        """If the best cut does not fit, try plain cuts, then cuts with layers moved off the full devices.

        If orders follow from times, every cut has its own order, so several attempts may be needed.
        """
        cut, seen = self.tried[setting].cut, set[Partition]()
        if self._lacks_everywhere(self.tried[setting]) or (self.is_over is not None and self._is_hopeless(setting)):
            return
        if not self.tried[setting].timed.fits and self._frame(setting).serves_any_cut and not self.time_is_over():
            plain = self._best_of(setting, self.sketcher.plain_cuts(setting, cut))
            self.tried[setting] = plain if beats(plain, self.tried[setting]) else self.tried[setting]
        while not self.tried[setting].timed.fits and len(seen) < ATTEMPTS:
            seen.add(cut)
            frame = self._frame(setting, cut)
            if frame.serves_any_cut or not self.time_is_over():  # else it takes another frame after the time limit
                cut = frame.emptier(cut, setting.recompute)
            if cut in seen:
                return
            again = self._timed(setting, cut)
            if beats(again, self.tried[setting]):
                self.tried[setting] = again

    def _lighter(self, setting: Setting) -> list[Setting]:
        """Single changes of a setting that may take less memory, the likeliest first."""
        if self.bounds.count_links:
            return self.bounds.fastest_first(each for _, each in self.space.changes(setting))
        frame, limits = self._frame(setting), self.terms.limits
        helps = not limits.are_below(frame.least_bytes, 0)
        found = self.space.lighter(setting, smaller=helps, options=self.sketcher.moves_each_time(setting))
        if self.is_over is None or not self.sketcher.moves_each_time(setting):
            return found
        cut, sizes = self.tried[setting].cut, {each.microbatch_sequences for each in self.space.smaller(setting)}
        too_large = {size for size in sizes if limits.are_below(frame.peak_at(size, cut), 0)}
        return sorted(found, key=lambda each: each.microbatch_sequences in too_large)

    def _is_hopeless(self, setting: Setting) -> bool:
        """Whether a setting lacks much with every cut: all cuts are alike, or a bound shows it."""
        lacks_much = self.tried[setting].timed.misfit > 1 + LACKS
        return lacks_much and (self.sketcher.moves_each_time(setting) or self.is_ruled_out)

    def _timed(self, setting: Setting, cut: Partition, *, all_steps: bool = False) -> Tried:
        frame = self.frames.of(setting, cut, self._num_steps(setting, all_steps=all_steps))
        try:
            frame.check(setting.recompute)
        except ValueError as error:  # the same for all microbatch sizes
            self._refused[setting.recompute, setting.options] = f"refused: {error}"
            raise
        self.num_timed += 1
        return Tried(setting, cut, frame.outcome(cut, setting.recompute))

    def in_full(self, setting: Setting, cut: Partition) -> Tried | None:
        """A cut of a posed problem timed with all steps; None if it was timed with as many, or no order takes it.

        A number of stages that no number on each device makes is none of the setting's, and timed as well.
        """
        chunks, rest = divmod(len(cut.forward), self.terms.num_devices)
        of_cut = setting
        if setting.chunks_per_device is not None:
            of_cut = setting.changed("chunks_per_device", None if rest else chunks)
        if not rest and self._num_steps(of_cut) == self._num_steps(of_cut, all_steps=True):
            return None
        with suppress(ValueError):
            return self._timed(of_cut, cut, all_steps=True)
        return None

    def _frame(self, setting: Setting, cut: Partition | None = None) -> Frame:
        """The frame of few steps for a cut; None: the best cut found for the setting."""
        return self.frames.of(setting, cut or self.tried[setting].cut, self._num_steps(setting))

    def _num_steps(self, setting: Setting, *, all_steps: bool = False) -> int:
        asked = self.terms.num_steps
        if self.sketcher.overlaps(setting):  # the pace of a posed problem is that of the whole run
            to_fill = self.terms.steps_to_fill(setting.microbatch_sequences)
            return asked if self.terms.problem is not None else max(OVERLAPPING_STEPS, asked) * to_fill
        return asked if all_steps else min(FEW_STEPS, asked)

    def _found(self) -> list[Tried]:
        return [each for each in self.tried.values() if each.outcome is not None]
