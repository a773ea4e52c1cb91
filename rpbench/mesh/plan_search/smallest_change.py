"""Smallest change: the fewest settings to change so that a run fits its devices.

One setting is changed before two are, two before three, on the same devices and with the same global batch. Changes of
equally many settings are tried in this order, a smaller change before a larger one:

    recompute           selective, per_op, full
    sequences           of a microbatch: the next smaller divisor
    sequence_parallel   where tensor parallelism leaves element-wise work whole
    shard               the next ZeRO level; with a pipeline up to the optimizer's states, as in a search
    tensor              more shards inside a domain, devices taken from data
    pipeline            more stages, devices taken from data
    context             more shards of a sequence, devices taken from data

If no change fits, two, four, ... times as many devices are tried, with every plan of a search. If those do not fit
either, a device lacks memory. Nothing under a mesh is offloaded to the host, so that is no change to try.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import ceil, prod
from typing import Any

from rpbench.ir.partition import divisors
from rpbench.mesh.job import Job
from rpbench.mesh.layers.layer_seconds import RECOMPUTES
from rpbench.mesh.layout import SHARDED, Mesh
from rpbench.mesh.memory import fitted, fullest
from rpbench.mesh.plan_search.closed_forms import Question, fastest_first, nearest, spare_bytes, timed_plans
from rpbench.mesh.plan_search.plans import Space
from rpbench.mesh.step import step_terms

Settings = Mapping[str, Any]
FACTORS = (2, 4, 8, 16, 32, 64)  # times as many devices
CUTS = ("tensor", "pipeline", "context")


@dataclass(frozen=True)
class Change:
    """A change that makes a run fit."""

    lacks_bytes: float  # bytes that a device lacks without the change
    job: Job | None = None  # the changed run; None if no change tried fits
    # changed settings by name: fields of `Job` and `Mesh`, and `shard`
    settings: Settings = field(default_factory=dict)
    num_devices: int = 0  # devices of the changed run if they are more; `settings` are then all of its settings

    def __str__(self) -> str:
        lacks = f"lacks {_giga(ceil(self.lacks_bytes / 1e8) * 1e8)} a device"  # rounded up, so that it is enough
        if self.job is None:
            return f"{lacks}; no setting helps, nor do {FACTORS[-1]} times as many devices"
        words = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        found = fullest(self.job)
        fit = f"{words}: {_giga(found.needed)} of {_giga(found.room)}"
        if self.num_devices:
            return f"{lacks}; no setting helps; fits on {self.num_devices} devices as {fit}"
        return f"{lacks}; fits with {fit}"

    def plain(self) -> dict[str, Any]:
        found = {"text": str(self), "lacks_bytes": round(self.lacks_bytes), "settings": dict(self.settings)}
        if self.job is not None:
            found["num_devices"] = self.job.machine.size
            found["step_time_s"] = sum(step_terms(fitted(self.job)).values())
        return found


def smallest_change(job: Job, space: Space | None = None) -> Change | None:
    """The first change with which a run fits; None if it fits as it is. Plans on more devices are those of `space`."""
    lacks = fullest(job).lacks
    if not lacks:
        return None
    for settings, changed in changes(job):
        if _fits(changed):
            return Change(lacks, changed, settings)
    asked = Question(job.architecture, job.machine, job.software, job.seq_len, job.global_batch, job.precision)
    larger = job_on_more_devices(asked, space or Space(max_context=job.mesh.context))
    return Change(lacks) if larger is None else Change(lacks, larger, settings_of(larger), larger.machine.size)


def changes(job: Job) -> Iterator[tuple[Settings, Job]]:
    """Every possible change on the same devices, in the order in which they are tried."""
    steps = {name: values for name, values in _steps(job).items() if values}
    for count in range(1, len(steps) + 1):
        for names in combinations(steps, count):
            for values in product(*(steps[name] for name in names)):
                settings = dict(zip(names, values, strict=True))
                changed = _changed(job, settings)
                if changed is not None:
                    cut = {"data": changed.mesh.data} if set(settings) & set(CUTS) else {}
                    yield settings | cut, changed


def settings_of(job: Job) -> Settings:
    """The settings that a run's memory depends on."""
    mesh = job.mesh
    return {
        **{name: getattr(mesh, name) for name in ("data", *CUTS, "expert")},
        "shard": mesh.sharing.what,
        "sequences": job.sequences,
        "recompute": job.recompute,
        "schedule": job.schedule,
        "chunks": job.chunks,
    }


def _fits(job: Job) -> bool:
    try:
        return not fullest(job).lacks
    except ValueError:  # the schedule does not take these sizes
        return False


def _steps(job: Job) -> dict[str, tuple[Any, ...]]:
    """Values of each setting beyond the run's own, the nearest first."""
    mesh, machine = job.mesh, job.machine
    more = divisors(mesh.data)[1:]
    domain = machine.domain_devices
    whole = mesh.tensor > 1 and not mesh.sequence_parallel
    return {
        "recompute": RECOMPUTES[RECOMPUTES.index(job.recompute) + 1 : RECOMPUTES.index("full") + 1],
        "sequences": tuple(reversed(divisors(job.sequences)[:-1])),
        "sequence_parallel": (True,) if whole else (),
        "shard": SHARDED[SHARDED.index(mesh.sharing.what) + 1 :],
        "tensor": tuple(mesh.tensor * n for n in more if mesh.tensor * n <= domain),
        "pipeline": tuple(mesh.pipeline * n for n in more if mesh.pipeline * n <= len(job.architecture.layers)),
        "context": tuple(mesh.context * n for n in more if job.seq_len % (mesh.context * n) == 0),
    }


def _changed(job: Job, settings: Settings) -> Job | None:
    """A run with other settings on the same devices, with the same global batch; None if that is impossible."""
    sequences = settings.get("sequences", job.sequences)
    try:
        mesh = _changed_mesh(job.mesh, settings)
        microbatches, rest = divmod(job.global_batch, sequences * mesh.data) if mesh else (0, 0)
        if mesh is None or rest:
            return None
        return replace(
            job,
            mesh=mesh,
            sequences=sequences,
            num_microbatches=microbatches,
            recompute=settings.get("recompute", job.recompute),
            cut=job.cut if mesh.pipeline == job.mesh.pipeline else (),
            kept=(),
        )
    except ValueError:  # sizes that do not divide
        return None


def _changed_mesh(mesh: Mesh, settings: Settings) -> Mesh | None:
    sizes = {name: settings.get(name, getattr(mesh, name)) for name in CUTS}
    data, rest = divmod(mesh.data, prod(size // getattr(mesh, name) for name, size in sizes.items()))
    what = settings.get("shard", mesh.sharing.what)
    held_long = sizes["pipeline"] > 1 and what in ("gradients", "parameters")
    kept = what == mesh.sharing.what and sizes["pipeline"] == mesh.pipeline
    if rest or not data or (held_long and not kept):
        return None
    spread = mesh.sequence_parallel or "sequence_parallel" in settings or sizes["tensor"] > mesh.tensor == 1
    return replace(mesh, data=data, sequence_parallel=spread, sharing=replace(mesh.sharing, what=what), **sizes)


def _giga(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def job_on_more_devices(question: Question, space: Space) -> Job | None:
    """A plan that fits, with the same global batch, on the smallest tried number of devices that has one.

    On n times as many devices, context parallelism up to n is allowed as well.
    """
    for factor in FACTORS:
        machine = question.machine.with_devices(factor * question.machine.size)
        wider = replace(space, max_context=max(space.max_context, factor))
        job = next(_fitting_jobs(question._replace(machine=machine), wider), None)
        if job is not None:
            return job
    return None


def _fitting_jobs(question: Question, space: Space) -> Iterator[Job]:
    """Plans that fit, with memory counted from their orders: by closed forms the fastest first, then the nearest."""
    try:
        plans, timed = timed_plans(question, space)
    except ValueError:  # the batch is too small for so many devices
        return
    spare = spare_bytes(question, timed)
    for number in (*fastest_first(timed, spare).tolist(), *nearest(question, spare).tolist()):
        job = question.job_of(plans, number)
        if not fullest(job).lacks:
            yield job
