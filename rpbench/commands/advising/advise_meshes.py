"""Meshes in an answer of `advise`: the ranking on nodes, and compositions on one host.

The contenders of one host pipeline, replicate or shard layers over all devices, each alone. Compositions of these,
ZeRO-1 and Megatron's shards without recomputation are searched as on nodes; the fastest of each schedule is a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, exp, log
from typing import Any, NamedTuple

import numpy as np

from rpbench.advice.interval import Shared, compute_reach, half_width, ratio_reach, shared_errors
from rpbench.advice.limits import More
from rpbench.advice.rows import mesh_misfit, mesh_name, mesh_row, mesh_runs_in, other_orders, parameters, space_of
from rpbench.config.mesh import refuse_frozen
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.hardware.measured import has_engine
from rpbench.mesh.job import Job
from rpbench.mesh.layout import AXES
from rpbench.mesh.memory import fullest
from rpbench.mesh.ordered_step import parts_of_work
from rpbench.mesh.plan_search.closed_forms import Question
from rpbench.mesh.plan_search.plans import SPLIT, Space
from rpbench.mesh.plan_search.search import (
    ORDERS,
    Candidates,
    NothingFits,
    Prediction,
    in_other_orders,
    memory_and_terms,
    search,
)
from rpbench.mesh.software import DEFAULT, software
from rpbench.plan.contest.terms import Terms
from rpbench.predict.prediction import NORMAL
from rpbench.workload.architecture import Architecture

# Assumed: one standard deviation as of a pipeline's unmodelled terms (conf/cost/analytic.yaml), nine of ten errors.
REACH = exp(0.2 * NORMAL)
SHARED = Shared({name: log(REACH) for name in ("hops", "data", "tied")}, log(REACH))
NUM_SIMULATED = 36
NO_MESH = "no plan of it was found that divides, fits and is short enough to be simulated"
FEW = 4  # simulated meshes for another order, where only the fastest counts
BETWEEN = "links between nodes twice as fast"
_CHANGES: Mapping[str, Callable[[Machine], Machine]] = {
    BETWEEN: lambda m: replace(m, inter_bytes_per_s=m.inter_bytes_per_s and 2 * m.inter_bytes_per_s),
    "links inside nodes twice as fast": lambda m: replace(
        m,
        intra_bytes_per_s=2 * (m.intra_bytes_per_s or m.device.link_bytes_per_s),
        collective_bytes_per_s=m.collective_bytes_per_s and 2 * m.collective_bytes_per_s,
    ),
    "twice the device memory": lambda m: replace(m, device_memory_bytes=2 * m.device.memory_bytes),
}


def advise_nodes(
    model: Architecture,
    machine: Machine,
    *,
    seq_len: int,
    global_batch: int,  # sequences of a step
    space: Space,
    others: Sequence[str],  # further orders, timed on the meshes that are found
    names: Sequence[str] | None,  # requested methods; None: all of the space, and `others`
    framework: str | None,  # that rows are written for
    words: Sequence[str],  # of the command line
) -> dict[str, Any]:
    """The ranking of meshes, as JSON-ready data; ValueError if nothing divides.

    If nothing fits, the ranking is empty, and the answer says what the smallest plan lacks, and the smallest change
    with which it fits.
    """
    about: dict[str, Any] = {
        "model": model.name,
        "cluster": machine.name,
        "num_devices": machine.size,
        "parameters": parameters(model),
        "device_memory_bytes": machine.room_bytes,
        "seq_len": seq_len,
        "tokens_per_step": global_batch * seq_len,
        "ranking_late": [],
        "none_found": [],
        "order_turns": [],
        "left_out": {},
        "search": "python -m rpbench plan mesh=search " + " ".join(words),
    }
    question = Question(model, machine, software(DEFAULT), seq_len, global_batch)
    try:
        found = search(question, space, NUM_SIMULATED, of_each=True)
    except NothingFits as nothing:
        return about | {
            "ranking": [],
            "does_not_fit": [mesh_misfit(nothing.smallest)],
            "levers": [],
            "smallest_change": f"the smallest plan {nothing.change}",
            "change": nothing.change.plain(),
        }
    is_asked = partial(_is_asked, names=names, framework=framework)
    every = [each for each in (*found.best, *in_other_orders(found.best, others, is_asked)) if is_asked(each.job)]
    every.sort(key=lambda each: each.step_time_s)
    there = {mesh_name(each.job) for each in every}
    asked = names or (*space.schedules, *others)
    why = NO_MESH if framework is None else f"{NO_MESH}, and that {framework} runs"
    rows = [mesh_row(each, REACH, every[0], SHARED, framework) | {"plan": each.job} for each in every]
    about |= {
        "ranking": _one_each(rows),
        "does_not_fit": [],
        "left_out": {name: why for name in asked if name not in there},
        "num_plans": found.num_plans,
        "num_plans_that_fit": found.num_fitting,
        "levers": levers_of_mesh(question, space, every[0], framework) if every else [],
    }
    return about if every else about | {"smallest_change": f"{', '.join(asked)}: {why}"}


def _is_asked(job: Job, names: Sequence[str] | None, framework: str | None) -> bool:
    """Whether a mesh is one of a method's name, and runs in a framework; None: any."""
    return (names is None or mesh_name(job) in names) and (framework is None or framework in mesh_runs_in(job))


def levers_of_mesh(
    question: Question, space: Space, first: Prediction, framework: str | None = None
) -> list[dict[str, Any]]:
    """The gain of the fastest mesh from changes of the machine, with the same plan or a new search."""
    machine, levers, job, best = question.machine, list[dict[str, Any]](), first.job, first.tokens_per_s_per_device
    for name, change in _CHANGES.items():
        if name == BETWEEN and machine.num_nodes == 1:
            continue
        changed = question._replace(machine=change(machine))
        again = [name for name in ORDERS if name == job.schedule]
        faster = list(search(changed, space, FEW if again else 1).best)
        faster += in_other_orders(faster, again, partial(_is_asked, names=None, framework=framework))
        same = replace(job, machine=changed.machine)
        faster.append(replace(first, job=same, terms=memory_and_terms(same)[-1]()))
        pace = max(each.tokens_per_s_per_device for each in faster)
        levers.append({"name": name, "tokens_per_s": pace * machine.size, "gain": max(0.0, pace / best - 1)})
    return sorted(levers, key=lambda lever: -lever["gain"])


def _one_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest row of every method and mesh, whatever its other settings."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        options = row["options"]
        found.setdefault((row["schedule"], options["shares"], *(options[axis] for axis in (*AXES, "expert"))), row)
    return list(found.values())


# --- beside the contenders of one host -----------------------------------------------------------------------


class OnHost(NamedTuple):
    """Search for meshes on one host, with further orders for the meshes that are found."""

    question: Question
    space: Space
    others: tuple[str, ...]
    framework: str | None  # that rows are written for

    def rows(self, terms: Terms, basis: Basis, names: Sequence[str] | None) -> list[dict[str, Any]]:
        """The fastest row of every schedule in `names` (None: all), each with its job as `plan`."""
        try:
            found = Candidates(self.question, self.space).best_of_each()
        except ValueError:  # nothing divides
            return []
        is_asked = partial(_is_asked, names=names, framework=self.framework)
        found += in_other_orders(found, self.others, is_asked)
        return [_row_on_host(each, terms, basis, self.framework) for each in found if is_asked(each.job)]

    def least_more(self, names: Sequence[str] | None) -> More | None:
        """The memory of a device that the smallest plan lacks; None if nothing divides, or it is of no asked method."""
        try:
            plans = Candidates(self.question, self.space)
        except ValueError:
            return None
        smallest = plans.job(int(np.argmax(plans.spare)))
        name, lacks = mesh_name(smallest), ceil(fullest(smallest).lacks)
        return More("device_memory_bytes", lacks, name) if lacks > 0 and (names is None or name in names) else None

    def levers(self, first: Job) -> list[dict[str, Any]]:
        """The gain from changes of the machine, for a mesh that is the first row."""
        return levers_of_mesh(
            self.question, self.space, Prediction(first, memory_and_terms(first)[-1](), {}), self.framework
        )


def on_host(
    terms: Terms, machine: Machine, names: Sequence[str] | None, framework: str | None, *, is_plain: bool
) -> OnHost | str:
    """The search for meshes of `names` (None: all) that a framework runs (None: any), or why there is none.

    `is_plain`: whether all sequences have one length.
    """
    if machine.size == 1:
        return "one device has nothing to compose"
    if not is_plain or machine.device_speeds is not None:
        return "microbatches of a mesh are alike, and so are its devices"
    if machine.gpu is None:
        return "nobody knows the collectives of this machine"
    if has_engine(machine.measured):
        return "layers were timed on this machine, and their shards were not"
    try:
        refuse_frozen(terms.model)
        space = space_of(names, framework)
    except ValueError as error:
        return str(error)
    question = Question(terms.model, machine, software(DEFAULT), terms.model.seq_len, terms.sequences_per_step)
    return OnHost(question, replace(space, alone=False), other_orders(names, framework), framework)


def _row_on_host(found: Prediction, terms: Terms, basis: Basis, framework: str | None) -> dict[str, Any]:
    """A mesh as a row of one host, with the causes of such rows."""
    row, job = mesh_row(found, 1.0, found, SHARED, framework), found.job
    given = {name: row["why"].get(name, 0.0) for name in (*row["why"], "bubble", "hops")}
    work = found.terms  # of an order that was simulated as it is
    if "kernels" not in work:
        work = parts_of_work(job, given["work"], splits=job.schedule in SPLIT and job.mesh.pipeline > 1)
    why = {
        "computation": work["kernels"] + work["host"],
        "recomputation": work["recompute"],
        "optimizer": given["optimizer"] + given["fixed"],  # as one host charges it
        "collectives": work["collectives"] + given["data"] + given["tied"],
        "transfers": given["hops"],
        "bubble": given["bubble"],
    }
    reach, pace = half_width(why, compute_reach(terms, terms.tokens(job.sequences), basis), basis), row["tokens_per_s"]
    return row | {"why": why, "tokens_per_s_low": pace / reach, "tokens_per_s_high": pace * reach, "plan": job}


def beside(rows: Sequence[dict[str, Any]], meshes: Sequence[dict[str, Any]], terms: Terms, basis: Basis) -> list[Any]:
    """The rows of one host and of meshes, the fastest first; of two rows of a method the faster one."""
    found = dict[str, dict[str, Any]]()
    every = sorted([*rows, *meshes], key=lambda row: -row["tokens_per_s"])
    for row in every:
        composed = "data" in row["options"] and sum(row["options"][axis] > 1 for axis in (*AXES, "expert")) > 1
        found.setdefault(f"{row['schedule']}, composed" if composed else row["schedule"], row)
    first, *others = found.values()
    shared = shared_errors(terms, terms.tokens(first["options"]["microbatch_sequences"]), basis)
    again = [row | {"ratio_reach": ratio_reach(first["why"], row["why"], shared)} for row in others]
    return [first | {"ratio_reach": 1.0}, *again]
