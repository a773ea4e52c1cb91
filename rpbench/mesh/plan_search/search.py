"""Search: the fastest plan that fits: closed forms for all plans, the real schedule and simulator for the best.

The best plan of every order on every mesh then gets the cut that `rpbench.plan.search` finds.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from rpbench.cost.arrays import Ints
from rpbench.ir.partition import divisors, filled, symmetric
from rpbench.mesh.exact import exact, exact_terms, problem_of
from rpbench.mesh.job import Job
from rpbench.mesh.layout import SHARDED, Mesh
from rpbench.mesh.memory import Bytes, Fullest, fitted, fullest
from rpbench.mesh.plan_search.closed_forms import DOUBTED, Question, fastest_first, nearest, spare_bytes, timed_plans
from rpbench.mesh.plan_search.plans import Space
from rpbench.mesh.plan_search.smallest_change import smallest_change
from rpbench.mesh.step import Terms
from rpbench.plan.search import plan_search
from rpbench.registry import entry

SIMULATED = 50
RECUT = 2_000_000  # actions timed in the search of one cut
LONG = 8192  # stages times microbatches; the cut of a longer order is not searched
BESIDE = 4  # cuts tried beside one with empty stages
# Orders without a closed form. They are timed on the fastest meshes of other orders: the number of these meshes, and
# most stages times microbatches.
ORDERS, MESHES, LARGEST = ("zb_v", "dualpipe_v", "v_half", "interleaved_zb", "combined_1f1b"), 8, 2048
TRIED, OF_EACH = 16, 6  # plans of a kind: memory counted; simulated, with their cuts searched


@dataclass(frozen=True)
class Prediction:
    """A plan that fits, with the seconds of its step by cause, and the bytes of its fullest rank by class."""

    job: Job
    terms: Terms
    memory: Bytes

    @property
    def step_time_s(self) -> float:
        return sum(self.terms.values())

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.job.tokens / self.step_time_s / self.job.machine.size


@dataclass(frozen=True)
class Found:
    """The best simulated plans, fastest first; the number of plans timed by closed forms, and of those that fit."""

    best: tuple[Prediction, ...]
    num_plans: int
    num_fitting: int


class NothingFits(ValueError):
    """No plan of a search fits; `change` is the smallest change that makes the plan fit that needs least memory."""

    def __init__(self, smallest: Job, space: Space) -> None:
        change = smallest_change(smallest, space)
        assert change is not None
        self.smallest, self.change, machine, found = smallest, change, smallest.machine, fullest(smallest)
        super().__init__(
            f"{smallest.architecture.name} does not fit on {machine.size} x {machine.device.name}: the smallest "
            f"plan needs {found.needed / 1e9:.0f} GB of {found.room / 1e9:.0f} GB; it {change}"
        )


class Candidates:
    """The plans of a question, timed by closed forms and simulated at most once; ValueError if no plan divides."""

    def __init__(self, question: Question, space: Space) -> None:
        self._question = question
        self.plans, timed = timed_plans(question, space)
        self.spare = spare_bytes(question, timed)
        self.order = fastest_first(timed, self.spare, DOUBTED * question.machine.device.memory_bytes)
        self._known: dict[int, Prediction | None] = {}

    def job(self, number: int) -> Job:
        return self._question.job_of(self.plans, number)

    def simulated(self, order: Ints, most: int) -> tuple[Prediction, ...]:
        """The first plans of an order that fit, simulated, fastest first."""
        found: list[Prediction] = []
        for number in order.tolist():
            if len(found) == most:
                break
            if number not in self._known:
                self._known[number] = simulate_job(self.job(number))
            if (prediction := self._known[number]) is not None:
                found.append(prediction)
        return tuple(sorted(found, key=lambda each: each.step_time_s))

    def best_of_each(self) -> list[Prediction]:
        """The fastest plan that fits of every schedule, and without a pipeline, of every sharding."""
        plans, found = self.plans, list[Prediction]()
        alone = np.where(plans.data == 1, len(SHARDED), plans.shared)
        kinds = np.where(plans.pipeline > 1, len(SHARDED) + 1 + plans.schedule, alone)[self.order]
        for kind in np.unique(kinds):
            of_kind = self.order[kinds == kind]
            own = self.simulated(of_kind[:TRIED], 1 if _is_long(self.job(int(of_kind[0]))) else OF_EACH)
            own = tuple(map(_with_its_cut, own)) if own and own[0].job.mesh.pipeline > 1 else own
            found += sorted(own, key=lambda each: each.step_time_s)[:1]
        return found


def search(
    question: Question, space: Space | None = None, num_simulated: int = SIMULATED, *, of_each: bool = False
) -> Found:
    """The fastest plans of a model on a machine; with `of_each` also those of every schedule, and of every sharding
    without a pipeline.

    ValueError if no plan divides; NothingFits, which says what the smallest needs and what makes it fit, if none does.
    """
    plans = Candidates(question, space or Space())
    best = plans.simulated(plans.order, num_simulated)
    if not best:
        best = plans.simulated(nearest(question, plans.spare), num_simulated)
    if not best:
        raise NothingFits(plans.job(int(np.argmax(plans.spare))), space or Space())
    # the first of every order on every mesh gets the best cut that is found
    firsts = {(each.job.schedule, each.job.mesh): each for each in reversed(best) if each.job.mesh.pipeline > 1}
    recut = {id(each): _with_its_cut(each) for each in firsts.values()}
    best = tuple(recut.get(id(each), each) for each in best) + tuple(plans.best_of_each() if of_each else ())
    fitting = max(int((plans.spare >= 0).sum()), len(best))
    return Found(tuple(sorted(best, key=lambda each: each.step_time_s)), plans.plans.count, fitting)


def in_other_orders(
    found: Iterable[Prediction], names: Iterable[str], is_asked: Callable[[Job], bool] = lambda job: True
) -> list[Prediction]:
    """The fastest plan that is asked for of each of these orders, which have no closed form.

    They are tried on the meshes of the `MESHES` fastest pipelines, with their microbatches and recomputation; then the
    best one with the next sizes of a microbatch and numbers of chunks, as long as these are faster.
    """
    jobs = dict[tuple[Mesh, int], Job]()
    for each in sorted(found, key=lambda each: each.step_time_s):
        if each.job.mesh.pipeline > 1:
            jobs.setdefault((each.job.mesh, each.job.sequences), each.job)
    best = list[Prediction]()
    for name in names:
        left = [(job, entry(name).chunks or max(2, job.chunks)) for job in [*jobs.values()][:MESHES]]
        tried, fastest, before = set[tuple[Mesh, int, int]](), list[Prediction](), list[Prediction]()
        while left:
            tried |= {(job.mesh, job.sequences, chunks) for job, chunks in left}
            fastest += [each for job, chunks in left for each in _in_order(job, name, chunks) if is_asked(each.job)]
            fastest = sorted(fastest, key=lambda each: each.step_time_s)[:1]
            near = _near(fastest[0].job) if fastest != before else ()
            left = [(job, chunks) for job, chunks in near if (job.mesh, job.sequences, chunks) not in tried]
            before = fastest
        best += fastest
    return best


def _near(job: Job) -> Iterator[tuple[Job, int]]:
    """The job with the next smaller and larger microbatch that divides its sequences, or number of chunks."""
    sequences, only = job.sequences * job.num_microbatches, entry(job.schedule).chunks
    sizes = divisors(sequences)
    place = sizes.index(job.sequences)
    for size in (*sizes[max(0, place - 1) : place], *sizes[place + 1 : place + 2]):
        yield replace(job, sequences=size, num_microbatches=sequences // size), job.chunks
    for chunks in (job.chunks - 1, job.chunks + 1) if only is None and job.chunks > 1 else ():
        yield job, chunks


def _in_order(job: Job, name: str, chunks: int) -> Iterator[Prediction]:
    """The job in another order, if that takes the sizes and fits."""
    if job.mesh.pipeline * chunks * job.num_microbatches > LARGEST:
        return
    with suppress(ValueError):  # the order, or the cut, does not take the sizes
        for found in _recuts(replace(job, schedule=name, chunks=chunks, cut=())):
            yield found
            if len(found.job.kept) == len(job.architecture.layers):  # the order may follow from times without any
                plain = simulate_job(replace(found.job, recompute="none"))
                yield from [plain] if plain else []


def _is_long(job: Job) -> bool:
    """Whether an order takes so long to simulate that its cut is not searched."""
    return job.num_stages * job.num_microbatches > LONG


def _with_its_cut(found: Prediction) -> Prediction:
    return found if _is_long(found.job) else min((found, *_recuts(found.job)), key=lambda each: each.step_time_s)


def _recuts(job: Job) -> Iterator[Prediction]:
    """The job with the cuts that are found, if they fit; inner stages have layers, as frameworks need it."""
    job = replace(job, kept=())  # of another order or cut, if any
    cut, _ = plan_search(problem_of(job), [symmetric(job.cut)], budget=RECUT)
    for counts in islice(filled(cut.forward), BESIDE) if 0 in cut.forward[1:-1] else (cut.forward,):
        if (found := simulate_job(replace(job, cut=counts))) is not None:
            yield found


def simulate_job(job: Job) -> Prediction | None:
    """A simulated job; None if its memory, counted from its order, does not fit."""
    job, memory, terms = memory_and_terms(job)
    return None if memory.lacks else Prediction(job, terms(), memory.classes)


def memory_and_terms(job: Job) -> tuple[Job, Fullest, Callable[[], Terms]]:
    """A job of any order as it fits, its fullest rank, and a function that simulates its seconds by cause."""
    job = replace(job, kept=())  # on another machine, other layers may stay
    if job.schedule not in ORDERS:
        job = fitted(job)
        return job, fullest(job), partial(exact_terms, job)
    job, terms, ranks = exact(job)
    return job, fullest(job, ranks), lambda: terms
