"""What if: every row of an advice at other microbatch sizes, recomputation and numbers of devices, each with a new cut.

A step keeps its number of sequences and a row its other settings. Cuts come from sketches
(`rpbench.plan.contest.sketch`), from the row itself and from neighbouring points; the best of them is kept, or the one
that lacks least. Single layers are not moved from there on, so a row's own point, found by a search, may be better than
the points around it.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from rpbench.advice.rows import RECOMPUTE_WORD
from rpbench.advice.side_searches import Clock
from rpbench.cost.hardware.machine import Machine
from rpbench.ir.partition import Partition
from rpbench.mesh.job import Job
from rpbench.mesh.layers.layer_seconds import Recompute as MeshRecompute
from rpbench.mesh.plan_search.plans import microbatch_sizes
from rpbench.mesh.plan_search.search import memory_and_terms
from rpbench.passes.recomputation import RECOMPUTES, Recompute
from rpbench.plan.contest.contender import Setting
from rpbench.plan.contest.frame import Frame, Frames
from rpbench.plan.contest.plans import Outcome, Tuned, rank
from rpbench.plan.contest.sketch import Sketcher
from rpbench.plan.contest.terms import Terms
from rpbench.plan.contest.trials import ATTEMPTS
from rpbench.side_processes import forks, inherited
from rpbench.sim.kernels import compile_orders

SKETCHED = 20_000  # actions timed in one sketch
OUT_OF_TIME = "not computed: the time was over"
On = Mapping[int, Terms | Machine | str]  # number of devices -> terms or machine, or why there is none


class Point(NamedTuple):
    """A row at a microbatch size, a recomputation and a number of devices."""

    num_devices: int
    microbatch_sequences: float
    recompute: str
    num_microbatches: int = 0
    data: int = 1  # replicas of a mesh
    tokens_per_s: float = 0.0
    step_time_s: float = 0.0
    peak_memory_bytes: int = 0
    host_memory_bytes: int = 0
    fits: bool = False
    partition: str = ""  # the best cut; if none fits, the one that lacks least
    why: str = ""  # why there is no plan; other fields then keep their defaults


# --- plans of one host ---------------------------------------------------------------------------------------


def points_of(plan: Tuned, on: On, is_over: Callable[[], bool]) -> Iterator[Point]:
    """The points of a plan, most devices first.

    Args:
        on: terms; those of the largest number of devices are the plan's own.
        is_over: whether the time is over; points that are not computed then say so.
    """
    own = on[max(on)]
    assert isinstance(own, Terms)
    recomputes = ("all",) if plan.contender.entry.separate_cuts else RECOMPUTES
    for count in sorted(on, reverse=True):
        terms = on[count]
        around = Around(plan, terms, count == max(on)) if isinstance(terms, Terms) else None
        for size, recompute in product(sorted({*own.microbatches, plan.setting.microbatch_sequences}), recomputes):
            if around is None:
                yield Point(count, size, recompute, why=str(terms))
            else:
                yield around.point(replace(plan.setting, microbatch_sequences=size, recompute=recompute), is_over)


class Around:
    """The points around a plan on one number of devices.

    Args:
        is_own: whether that is the plan's own number of devices.
    """

    def __init__(self, plan: Tuned, terms: Terms, is_own: bool) -> None:
        self.plan, self.terms, self._is_own = plan, terms, is_own
        self._frames, self._sketcher = Frames(plan.contender, terms), Sketcher(plan.contender, terms, SKETCHED)
        self._cuts: dict[float, list[Partition]] = {}  # microbatch size -> cuts of known points
        self._refused: dict[Recompute, str] = {}  # for any size

    def point(self, setting: Setting, is_over: Callable[[], bool]) -> Point:
        at = Point(self.terms.num_devices, setting.microbatch_sequences, setting.recompute)
        if self._is_own and setting == self.plan.setting:
            return self._told(at, self.plan.outcome, self.plan.partition)
        if is_over():
            return at._replace(why=OUT_OF_TIME)
        try:
            cut, outcome = self._best(setting)
        except ValueError as error:
            return at._replace(why=str(error))
        return self._told(at, outcome, cut)

    def _told(self, at: Point, outcome: Outcome, cut: Partition) -> Point:
        return at._replace(
            num_microbatches=self.terms.num_microbatches(at.microbatch_sequences),
            tokens_per_s=outcome.tokens_per_s,
            step_time_s=self.terms.tokens(self.terms.sequences_per_step) / outcome.tokens_per_s,
            peak_memory_bytes=outcome.peak_bytes,
            host_memory_bytes=outcome.host_bytes,
            fits=outcome.fits,
            partition=str(cut),
        )

    def _best(self, setting: Setting) -> tuple[Partition, Outcome]:
        """The best known cut.

        Raises ValueError if the schedule does not take the setting.
        """
        if setting.recompute in self._refused:
            raise ValueError(self._refused[setting.recompute])
        beside = self._cuts.setdefault(setting.microbatch_sequences, [])
        if beside:
            self._frame(setting, beside[0])  # raises before sketching what the schedule refuses
        cuts = [*self._sketcher.of(setting).cuts, *beside]
        if self.plan.contender.entry.needs_costs:  # each cut has its own order, which takes ten times as long
            cuts = cuts[:1]
        own = self.plan.partition
        if self._is_own or len(own.forward) == len(cuts[0].forward):
            cuts.append(own)
        known, refused = dict[Partition, Outcome](), ""
        for cut in dict.fromkeys(cuts):
            try:
                known[cut] = self._timed(setting, cut)
            except ValueError as error:  # an order that follows from times may take one cut and not another
                refused = str(error)
        if not known:
            raise ValueError(refused)
        best = max(known, key=lambda cut: rank(known[cut]))
        cut = best
        for _ in range(ATTEMPTS):
            if known[best].fits:
                break
            cut = self._frame(setting, cut).emptier(cut, setting.recompute)
            if cut in known:
                break
            known[cut] = self._timed(setting, cut)
            best = max(best, cut, key=lambda each: rank(known[each]))
        beside[:] = list(dict.fromkeys([best, *beside]))[:2]
        return best, known[best]

    def _timed(self, setting: Setting, cut: Partition) -> Outcome:
        return self._frame(setting, cut).outcome(cut, setting.recompute)

    def _frame(self, setting: Setting, cut: Partition) -> Frame:
        """The frame of a setting that can time a cut, checked.

        Raises ValueError if the schedule does not take the setting.
        """
        steps = self.terms.num_steps * self.terms.steps_to_fill(setting.microbatch_sequences)
        frame = self._frames.of(setting, cut, steps)
        try:
            frame.check(setting.recompute)
        except ValueError as error:
            self._refused[setting.recompute] = str(error)
            raise
        return frame


# --- meshes --------------------------------------------------------------------------------------------------


def mesh_points(job: Job, on: On, is_over: Callable[[], bool]) -> Iterator[Point]:
    """The points of a mesh with as many replicas as the devices allow, most devices first.

    Args:
        on: machines; that of the largest number of devices is the mesh's own.
        is_over: as in `points_of`.
    """
    for count in sorted(on, reverse=True):
        for size, (recompute, word) in product(microbatch_sizes(job.global_batch), RECOMPUTE_WORD.items()):
            at = Point(count, size, word)
            machine = on[count]
            if not isinstance(machine, Machine) or is_over():
                yield at._replace(why=OUT_OF_TIME if isinstance(machine, Machine) else str(machine))
                continue
            try:
                yield _mesh_point(at, job, machine, recompute)  # type: ignore[arg-type]  # one of them
            except ValueError as error:
                yield at._replace(why=str(error))


def _mesh_point(at: Point, job: Job, machine: Machine, recompute: MeshRecompute) -> Point:
    """A point of a mesh.

    Raises ValueError for sizes that do not divide.
    """
    mesh, size = job.mesh, round(at.microbatch_sequences)
    each = mesh.num_devices // mesh.data
    data, rest = divmod(at.num_devices, each)
    if rest or not data:
        raise ValueError(f"replicas of {each} devices do not divide {at.num_devices}")
    microbatches, rest = divmod(job.global_batch, data * size)
    if rest or not microbatches:
        raise ValueError(f"{data} replicas of {size} sequences do not divide the {job.global_batch} of a step")
    if data == 1 and mesh.sharing.what != "none":
        raise ValueError(f"one replica shares no {mesh.sharing.what} with another")
    changed = replace(
        job,
        machine=machine,
        mesh=replace(mesh, data=data),
        sequences=size,
        num_microbatches=microbatches,
        recompute=recompute,
    )
    changed, memory, terms = memory_and_terms(changed)
    step_s = sum(terms().values())
    return at._replace(
        num_microbatches=microbatches,
        data=data,
        tokens_per_s=changed.tokens / step_s,
        step_time_s=step_s,
        peak_memory_bytes=round(sum(memory.classes.values())),
        fits=not memory.lacks,
        partition="-".join(map(str, changed.cut)),
    )


# --- side by side --------------------------------------------------------------------------------------------

Ons = Mapping[type, On]  # by type of row: plans of one host, meshes


def around_all(
    rows: Sequence[Tuned | Job], ons: Ons, processes: int, seconds: float, told: Callable[[int], None]
) -> list[list[Point]]:
    """The points of every row.

    Args:
        ons: as in `points_of` and `mesh_points`, by the type of a row.
        seconds: processor time of each process; the first rows come first.
        told: is called with the number of finished rows.
    """
    found: list[list[Point]] = []
    apart = processes > 1 and hasattr(os, "fork")
    if any(isinstance(row, Tuned) and row.contender.entry.needs_costs for row in rows):
        compile_orders()  # before a clock begins, and before processes part
    clock = cache(partial(Clock, seconds))  # of each process, from its first row on

    def points(number: int) -> list[Point]:
        row, is_over = rows[number], clock().is_over
        on = ons[type(row)]
        return list(points_of(row, on, is_over) if isinstance(row, Tuned) else mesh_points(row, on, is_over))

    with ExitStack() as stack:
        waiting: Iterator[list[Point]] = map(points, range(len(rows)))
        if apart:
            pool = stack.enter_context(forks(processes, points, gc.disable))  # as in searches
            waiting = pool.map(inherited, range(len(rows)))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for own in waiting:
            found.append(own)
            told(len(found))
    return found
