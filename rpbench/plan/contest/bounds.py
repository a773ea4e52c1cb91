"""Bounds on the pace of every plan of a contender, whatever its cut and its recomputation, without a timeline.

    computation   every device computes its stages, and all devices together compute the model, once a step
    way           if steps do not overlap: before a device's first forward a microbatch runs down to its stage, and
                  after its last backward one runs back to the first stage
    memory        the bytes that a layer always holds, the activations of one microbatch of a stage, and, unless the
                  order follows from times, the activations in flight of stages that do not recompute; a host's bytes

All three are linear in the layers of each stage, `x`, and in those of them that are not recomputed, `k`. The shortest
step in which the model's layers find room bounds every cut. If every device has one stage, stages are filled one after
the other, with whole layers, and each is recomputed or not; else `x` may be fractions and `k` any part of a stage
(`rpbench.plan.linear`). Transfers add time to a plan, but none to these bounds (`link_loads` bounds them).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import inf, log2

import numpy as np

from rpbench.cost.arrays import Floats
from rpbench.cost.footprint.memory import Footprint
from rpbench.cost.footprint.replicas import least_host_bytes
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Weights
from rpbench.passes.recomputation import check_recompute
from rpbench.plan.contest.contender import Contender, Setting, Space
from rpbench.plan.contest.frame import posed
from rpbench.plan.contest.layer_limits import Limit, least_limit, least_of_whole_layers
from rpbench.plan.contest.link_loads import LinkLoads
from rpbench.plan.contest.terms import Terms
from rpbench.plan.counts import promising_counts
from rpbench.plan.problem import Problem


class Bounds:
    """Bounds on the plans of a contender, each made once; `with_links` counts transfers too, from short orders."""

    def __init__(self, contender: Contender, terms: Terms, space: Space, *, with_links: bool = True) -> None:
        self.contender, self.terms, self.space, self._with_links = contender, terms, space, with_links
        self._paces, self._loose_paces = dict[Setting, float](), dict[Setting, float]()
        self._placed: dict[tuple[object, ...], Schedule] = {}
        self._links = LinkLoads(contender, terms)

    def settings(self) -> Iterator[Setting]:
        """All settings of the space, with the usual recomputation and prefetching."""
        dimensions, usual = self.space.dimensions, ("recompute", "prefetch")
        for values in product(*(tried[:1] if name in usual else tried for name, tried in dimensions.items())):
            yield self.space.setting(dict(zip(dimensions, values, strict=True)))

    def nearest_first(self, best: Setting) -> list[Setting]:
        """The `settings`, sorted by distance of their microbatch size from that of `best`, then by bound.

        Each comes with the usual recomputation, and with that of `best`; if orders follow from times, with every one.
        """
        found = [each.changed("prefetch", best.prefetch) for each in self.settings()]
        needs_costs = self.contender.entry.needs_costs
        others = self.space.dimensions["recompute"] if needs_costs else (best.recompute,)
        again = [each.changed("recompute", other) for other in others for each in found]
        size = best.microbatch_sequences
        return sorted(
            dict.fromkeys(found + again),
            key=lambda each: (abs(log2(each.microbatch_sequences / size)), -self.pace(each)),
        )

    def fastest_first(self, settings: Iterable[Setting]) -> list[Setting]:
        """The settings by the bound on their pace, without those for which no plan fits."""
        return sorted(filter(self.pace, settings), key=self.pace, reverse=True)

    def best_pace(self, is_over: Callable[[], bool]) -> float:
        """Tokens per second that no plan exceeds; after the time limit only `loose_pace` is used."""
        best = 0.0
        for each in sorted(self.settings(), key=self.loose_pace, reverse=True):
            if self.loose_pace(each) <= best:
                break
            best = max(best, self.pace(each) if not is_over() else self.loose_pace(each))
        return best

    def loose_pace(self, setting: Setting) -> float:
        """A looser bound on the pace of a setting from the computation of all devices together, without an order."""
        setting = setting.changed("chunks_per_device", self.space.first.chunks_per_device)
        if setting not in self._loose_paces:
            problem = posed(self.contender, setting, self.terms, 1)
            try:
                orders = _Orders(problem, None, self.terms, frozenset(self.space.dimensions["recompute"]))
                found = self.terms.tokens(setting.microbatch_sequences) * orders.num_microbatches / orders.least_step()
            except ValueError:
                found = 0.0
            self._loose_paces[setting] = found
        return self._loose_paces[setting]

    def pace(self, setting: Setting) -> float:
        """Tokens per second that no plan of a setting exceeds; 0 if none fits or none can be built."""
        key = self._usual(setting.changed("prefetch", self.space.first.prefetch))
        if key not in self._paces:
            try:
                self._paces[key] = self._pace(key)
            except ValueError:  # the schedule does not take the setting
                self._paces[key] = 0.0
        return self._paces[key]

    def _usual(self, setting: Setting) -> Setting:
        """The setting with the usual recomputation, and the usual options if they do not count; bounds are the same."""
        setting = setting.changed("recompute", self.space.first.recompute)
        if self.contender.entry.name in _LOWERED:  # its options only choose which activations move
            setting = replace(setting, options=self.space.first.options)
        return setting

    def least_bytes(self, limit: int | None) -> int:
        """A lower bound on the fullest device's bytes in every plan: with one smallest microbatch, all recomputed.

        It stops at the first setting within the limit, for then it rules nothing out. 0 without a limit.
        """
        return self._least(lambda each: self._orders(each).least_bytes(self._moving(each)), limit)

    def least_host_bytes(self, limit: int | None) -> int:
        """A lower bound on the host's bytes in every plan; stops like `least_bytes`."""
        return self._least(self._least_on_host, limit)

    def _least(self, needs: Callable[[Setting], int], limit: int | None) -> int:
        if limit is None:
            return 0
        found = inf
        for setting in dict.fromkeys(map(self._usual, self.settings())):
            if setting.microbatch_sequences == min(self.terms.microbatches):
                with suppress(ValueError):  # the schedule does not take the setting
                    found = min(found, needs(setting))
                if found <= limit:
                    break
        return int(found) if found < inf else 0

    def _least_on_host(self, setting: Setting) -> int:
        sizes, is_streamed = self.terms.sizes(setting.microbatch_sequences), self.contender.entry.separate_cuts
        moving = self._moving(setting)
        return 0 if moving is None and not is_streamed else least_host_bytes(moving, sizes)

    def _moving(self, setting: Setting) -> Analysis | None:
        """A short order with all its transfers, if stages are shared or streamed."""
        found = (self._links.short(setting, most) for most in (1, 2, 3) if self.moves)
        return next((short[0] for short in found if short), None)

    @property
    def count_links(self) -> bool:
        """Whether bounds count transfers too, not computation alone."""
        return self._with_links and self.moves and not self.contender.entry.separate_cuts and self.terms.problem is None

    @property
    def moves(self) -> bool:
        """Whether stages are shared or streamed."""
        entry = self.contender.entry
        return entry.lower is not None and entry.name not in _LOWERED

    def _pace(self, setting: Setting) -> float:
        orders = self._orders(setting)
        step_s = orders.least_step()
        if self.count_links:
            step_s = max(step_s, self._links.least_seconds(setting, orders.num_microbatches))
            least = orders.least_bytes(self._moving(setting)), self._least_on_host(setting)
            if self.terms.limits.are_below(*least):
                return 0.0
        tokens = self.terms.tokens(setting.microbatch_sequences) * orders.num_microbatches
        return tokens / step_s if step_s < inf else 0.0

    def _orders(self, setting: Setting) -> "_Orders":
        problem, entry = posed(self.contender, setting, self.terms, 1), self.contender.entry
        if entry.separate_cuts:
            return _Orders(problem, None, self.terms, frozenset({"all"}))
        schedule = self._schedule(setting)
        return _Orders(problem, schedule, self.terms, self._recomputes(schedule))

    def _schedule(self, setting: Setting) -> Schedule:
        """A schedule with the setting's placement of stages; its transfers, and its order by times, may differ."""
        entry, sizes = self.contender.entry, [setting.microbatch_sequences]
        if entry.needs_costs:  # few microbatches are faster to order
            sizes = sorted(self.terms.microbatches, reverse=True)
        elif entry.name not in _LOWERED:
            return self._built(setting)
        key = setting.chunks_per_device, None if entry.name in _LOWERED else setting.options
        for size in sizes if key not in self._placed else ():
            try:
                self._placed[key] = self._built(setting.changed("microbatch_sequences", size))
                break
            except ValueError:
                if size == sizes[-1]:
                    raise
        return self._placed[key]

    def _built(self, setting: Setting) -> Schedule:
        problem = posed(self.contender, setting, self.terms, 1)
        return problem.schedule(*promising_counts(problem)[0])

    def _recomputes(self, schedule: Schedule) -> frozenset[str]:
        found = set()
        for recompute in self.space.dimensions["recompute"]:
            try:
                check_recompute(schedule, recompute)
            except ValueError:
                continue
            found.add(recompute)
        return frozenset(found)


class _Orders:
    """All cuts of a setting.

    Args:
        schedule: one with the same stages; it has other microbatches if orders follow from times. None: forward and
            backward are cut apart, and only the computation of all devices together is bounded.
        recomputes: the choices of recomputation that the schedule allows.
    """

    def __init__(self, problem: Problem, schedule: Schedule | None, terms: Terms, recomputes: frozenset[str]) -> None:
        self.problem, self.schedule, self.terms, self._recomputes = problem, schedule, terms, recomputes
        self._sizes = terms.sizes(terms.sequences_per_step / max(1, problem.num_microbatches))
        times = problem.times
        self._speeds = np.array(times.speeds or (1,) * problem.num_ranks, float)
        self._forward, self._again, self._backward = (
            float(min(each)) for each in (times.forward, times.recompute, times.backward)
        )
        self._hides = 1 - float(times.overlap_gain) / 2  # two overlapping actions hide at most the shorter one

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a step, as pace counts them."""
        return self.problem.entry.steps(self.problem.num_microbatches, 1, self.problem.options.get("replicas"))[0]

    def least_step(self) -> float:
        """A lower bound on the seconds of a step; infinite if nothing fits."""
        times = self.problem.times
        spared = self._most_fused if self.problem.entry.separate_cuts else 0
        again = sum(sorted(times.recompute)[: len(times.recompute) - spared]) if self._recomputes <= {"all"} else 0
        heads = times.head_forward + times.head_backward
        each = float(sum(times.forward) + again + sum(times.backward) + heads) * self._hides
        together = step = self.num_microbatches * each / float(self._speeds.sum())
        if self._is_plain:
            rows = self._times() + self._memory()
            step = max(step, least_limit(rows, together, self.problem.num_layers))
            if self._has_one_stage_each and step < inf:
                step = least_of_whole_layers(rows, self._device_of, self._keeps(), step, self.problem.num_layers)
        return step / times.units_per_second

    @property
    def _most_fused(self) -> int:
        """The most layers of a fused stage, which never recompute, with the memory of its visit alone."""
        own, limit = self._sizes.added_up, self.terms.limits.device_memory_bytes
        each = min(size.weights + size.gradients + size.activations for size in own.layers)
        if limit is None or not each:
            return self.problem.num_layers
        return min(self.problem.num_layers, max(0, limit - own.head.weights - own.head.gradients) // each)

    def least_bytes(self, moving: Analysis | None) -> int:
        """A lower bound on the bytes of the fullest device; `moving` has transfers that decide which bytes stay."""
        if self.schedule is None:
            return 0
        if self.problem.entry.chooses_placement:  # the mean of all devices; a tied matrix may be on one alone
            own = self._sizes.added_up
            of_all = (*own.layers, own.embedding, *(() if own.tied else (own.head,)))
            return sum(size.weights + size.gradients + size.optimizer for size in of_all) // self.problem.num_ranks
        if moving is not None:
            schedule = moving.schedule
            none = [0] * schedule.shape.num_ranks
            widest = -(-self.problem.num_layers // schedule.shape.num_stages)
            at_once = 1 if self._sizes.by_layer else widest
            running = at_once * min(each.activations for each in self._sizes.layers)
            least = Footprint(schedule, self._sizes, none, keeps=(), analysis=moving).least_bytes
            return least + (0 if schedule.weights is Weights.STREAMED else running)
        if not self._is_plain or self.terms.limits.device_memory_bytes is None:
            return self._footprint.least_bytes
        rows = [replace(row, room=None) for row in self._memory() if not row.of_kept.any()]
        found = least_limit(rows, max(1.0, float(self._footprint.least_bytes)), self.problem.num_layers)
        if self._has_one_stage_each:
            nothing_kept = np.zeros(len(self._device_of))
            found = least_of_whole_layers(rows, self._device_of, nothing_kept, found, self.problem.num_layers)
        return int(found)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether every stage is whole and on one device, with the same cut both ways, and known to be there."""
        found = self.schedule
        return (
            found is not None
            and not self.problem.entry.chooses_placement
            and bool(found.placement)
            and all(len(holders) == 1 for holders in found.placement)
            and found.weights is Weights.BOUND
            and found.shape.num_parts == 1
            and not (found.shape.tensor_parallel or found.shape.num_head_shards)
            and (self.problem.entry.lower is None or self.problem.entry.name in _LOWERED)
        )

    @property
    def _has_one_stage_each(self) -> bool:
        return len(set(self._device_of)) == len(self._device_of)

    @cached_property
    def _footprint(self) -> Footprint:
        assert self.schedule is not None
        return Footprint(self.schedule, self._sizes, [0] * self.schedule.shape.num_ranks, keeps=())

    @cached_property
    def _device_of(self) -> list[int]:
        assert self.schedule is not None
        return [holders[0] for holders in self.schedule.placement]

    def _keeps(self) -> Floats:
        """1 where a stage may skip recomputation, else 0, (stages,)."""
        keeps = np.full(len(self._device_of), float(bool(self._recomputes & {"none", "fitting"})))
        if "except_last" in self._recomputes:
            keeps[-1] = 1
        return keeps

    def _times(self) -> list[Limit]:
        """Limits of time: computation of each device, and the way of the first and the last microbatch."""
        assert self.schedule is not None
        times, num, devices = self.problem.times, self.num_microbatches, self._device_of
        stages = len(devices)
        split = Kind.I in self.schedule.kinds
        back = float(min(times.input_grad)) if split else self._backward
        head = float(times.head_forward), float(times.head_input_grad if split else times.head_backward)
        whole_head = float(times.head_forward + times.head_backward)
        if split and times.weight_grad:
            whole = self._forward + back + float(min(times.weight_grad))
        else:
            whole = self._forward + self._backward
        step, step_at = self._steps()
        keeps, found = self._keeps(), list[Limit]()
        for device in range(self.problem.num_ranks):
            own = np.array([each == device for each in devices], float)
            if not own.any():
                continue
            speed, last = self._speeds[device], own[-1]
            kept = -num * self._again * own * keeps * self._hides / speed
            layers = own * (num * (whole + self._again) * self._hides + step) / speed
            fixed = (num * whole_head * last * self._hides + step_at[0] * own[0] + step_at[1] * last) / speed
            found.append(Limit(layers, kept, fixed, device=device))
            if self.schedule.policy is Policy.FLUSH and not times.overlap_gain:
                first = int(np.flatnonzero(own)[0])
                below = np.arange(stages) < first
                on_way = below * (self._forward + back) / self._speeds[devices]
                layers = on_way + own * num * (self._forward + back + self._again) / speed
                began = np.array([each == devices[0] for each in devices]) * step / self._speeds[devices[0]]
                fixed = num * sum(head) * last / speed + step_at[0] / self._speeds[devices[0]]
                found.append(Limit(layers + began, -num * self._again * own * keeps / speed, fixed, device=device))
        return found

    def _steps(self) -> tuple[float, tuple[float, float]]:
        """Time of the optimizer for a layer, and for embedding and head, in the times' unit."""
        if self.problem.entry.lower is not None:
            return 0.0, (0.0, 0.0)
        pace = self.terms.optimizer.state_bytes_per_s / self.problem.times.units_per_second
        layer = min(each.optimizer for each in self._sizes.layers)
        return layer / pace, (self._sizes.embedding.optimizer / pace, self._sizes.head.optimizer / pace)

    def _memory(self) -> list[Limit]:
        """Limits of memory: resident bytes of each device, activations of one microbatch, and those in flight."""
        if self.terms.limits.device_memory_bytes is None:
            return []
        assert self.schedule is not None
        limit, sizes, devices = float(self.terms.limits.device_memory_bytes), self._sizes, self._device_of
        stay, ends = self._footprint.staying()
        activations = float(min(each.activations for each in sizes.layers))
        in_flight = (
            self.schedule.policy is Policy.FLUSH
            and self.problem.entry.lower is None
            and not self.problem.entry.needs_costs
        )
        unknown = [()] * self.problem.num_ranks
        moments = self._footprint.moments() if in_flight and self._keeps().any() else unknown
        halves = self._footprint.between_halves() if in_flight else unknown
        found, nothing = list[Limit](), np.zeros(len(devices))
        for device in range(self.problem.num_ranks):
            own = np.array([each == device for each in devices], float)
            fixed = ends[0] * own[:1].sum() + ends[1] * own[-1:].sum()
            logits = sizes.logits * own[-1:].sum()
            for stage in np.flatnonzero(own).tolist():
                one = (np.arange(len(devices)) == stage) * activations * (not sizes.by_layer)
                found.append(Limit(own * stay + one, nothing, fixed + logits, limit, device))
            for waiting in _fullest(halves[device] if halves else ()):
                found.append(Limit(own * stay + waiting * activations, nothing, fixed, limit, device))
            for levels in _fullest(moments[device]):
                found.append(Limit(own * stay, levels * activations * self._keeps(), fixed, limit, device))
        return found


_LOWERED = ("pipe_offload", "bpipe")  # methods whose transfers only move activations


def _fullest(moments: object) -> list[Floats]:
    """The moments with the most microbatches in flight, and with the most of each stage."""
    table = np.asarray(moments, float)
    if not table.size:
        return []
    rows = {int(table.sum(axis=1).argmax()), *(int(column.argmax()) for column in table.T if column.any())}
    return [table[row] for row in sorted(rows)]
