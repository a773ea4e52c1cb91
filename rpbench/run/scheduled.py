"""Runs of a schedule: what simulating and training have in common - the plan's facts, its memory, whether it fits.

A large schedule is millions of small tuples in no circle. Each time enough of them are new, the collector walks all
that are there: with 1,024 devices and as many microbatches this takes as long as the checks themselves. Afterwards
the first walk would still go through every one of them, so that many are set aside until the next tables are made.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rpbench.config.request import Request
from rpbench.cost.footprint.memory import device_bytes, why_infeasible
from rpbench.cost.footprint.replicas import host_bytes, ssd_bytes
from rpbench.cost.footprint.sizes import DeviceMemory
from rpbench.cost.profiled import to_text
from rpbench.ir.analysis import Analysis
from rpbench.records.describe import clock
from rpbench.run.assemble import Assembled, assemble, transfer_bytes
from rpbench.run.recording import Fields, Outcome, Work
from rpbench.run.tuned import TRIED, plan_fields, tried_csv, tuned, why_not
from rpbench.sim.memory import peak_in_flight

# So many new objects are worth setting aside: a walk through them takes a tenth of a second.
MANY = 500_000


@contextmanager
def collection_paused() -> Iterator[None]:
    """Look for no circles of garbage inside, nor, where much was made inside, later in that.

    What nothing refers to is freed at once all the same. What was set aside before is looked through first.
    """
    was_on = gc.isenabled()
    gc.disable()
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY:
            gc.freeze()
        if was_on:
            gc.enable()


PROFILE = "profile.json"  # in a run's folder: the layer times its costs were made of


def assembled_of(request: Request) -> Assembled:
    """Everything a request's schedule needs, checked."""
    with collection_paused():
        return assemble(request) if request.tuning_budget is None else tuned(request)


def scheduled(
    request: Request,
    assembled: Assembled,
    execute: Callable[[], Outcome],
    is_out_of_memory: Callable[[BaseException], bool],
) -> Work:
    """The work of a schedule: a verdict on its memory, and if it fits, what `execute` finds."""
    files = {} if assembled.profile is None else {PROFILE: to_text(assembled.profile)}
    if assembled.plan is not None:
        files[TRIED] = tried_csv(assembled.plan)
    return Work(_shape(request, assembled), lambda: _outcome(request, assembled, execute), files, is_out_of_memory)


def _outcome(request: Request, assembled: Assembled, execute: Callable[[], Outcome]) -> Outcome:
    facts = _facts(assembled)
    memory, reason = memory_of(assembled)
    facts["peak_memory_bytes"] = memory
    if reason:
        return Outcome({**facts, "status": "infeasible", "reason": reason, "evidence": assembled.evidence})
    found = execute()
    fields = facts | found.fields
    fields["clock"] = clock({"cost": request.cost.name, **fields})
    if fields["clock"] == "seconds" and assembled.tokens_per_step is not None and fields.get("step_time_s"):
        fields["tokens_per_s"] = assembled.tokens_per_step / fields["step_time_s"]
    return Outcome(fields, found.timeline)


def _shape(request: Request, assembled: Assembled) -> Fields:
    """What the request turned into: stages, cuts and updates, and the sizes of a schedule read from a file."""
    shape = assembled.schedule.shape
    fields: dict[str, Any] = {
        "partition_layers": str(assembled.choice.partition),
        "num_devices": shape.num_ranks,
        "num_stages": shape.num_stages,
        "num_backward_stages": shape.num_backward_stages,
        "num_updates": shape.num_steps,  # more than num_steps where a schedule updates after every microbatch
    }
    if request.schedule.file is not None:
        fields |= {"schedule": assembled.schedule.name, "generator": None}
        fields |= {"num_microbatches": shape.num_microbatches, "num_steps": shape.num_steps}
    if assembled.keeps is not None:
        fields["keeping_stages"] = list(assembled.keeps)
    return fields if assembled.plan is None else fields | plan_fields(assembled)


def _facts(assembled: Assembled) -> Fields:
    versions, sizes, analysis = assembled.versions, assembled.sizes, _analysis(assembled)
    facts: Fields = {
        "num_plans_evaluated": assembled.choice.num_evaluated,
        "tokens_per_step": assembled.tokens_per_step,
        "tokens_per_s": None,
        "peak_memory_bytes": None,
        "weight_versions": versions.max_live,
        "staleness_steps": versions.max_staleness,
        **transfer_bytes(analysis, sizes, assembled.costs, assembled.keeps),
        **assembled.schedule.told,
    }
    if sizes is None:
        return facts
    if assembled.schedule.on_ssd:
        facts["ssd_bytes"], facts["ssd_written_bytes"] = ssd_bytes(assembled.schedule.on_ssd, sizes)
    return facts | {"host_memory_bytes": host_bytes(assembled.schedule, sizes, analysis)}


def _analysis(assembled: Assembled) -> Analysis:
    """What is known of the schedule that runs."""
    known = assembled.graph.analysis
    return known if known.schedule is assembled.schedule else Analysis(assembled.schedule)


def memory_of(assembled: Assembled) -> tuple[list[int] | None, str]:
    """Bytes on each device where the model has a shape, and why they, or those on SSDs, do not fit, if they do not."""
    if assembled.sizes is None:
        return None, ""
    in_flight, limit = peak_in_flight(assembled.graph), assembled.cluster.usable_memory_bytes
    plan = assembled.plan
    needed = device_bytes(assembled.schedule, assembled.sizes, in_flight, assembled.keeps, _analysis(assembled))
    if plan is not None:
        return needed, why_not(plan, assembled.cluster)
    ssd = assembled.cluster.ssd
    if ssd is not None and (held := ssd_bytes(assembled.schedule.on_ssd, assembled.sizes).held) > ssd.bytes:
        return needed, (
            f"{ssd.name} holds {ssd.bytes / 1e9:.1f} GB and is to hold {held / 1e9:.1f} GB: name more SSDs, as in "
            f"cluster.ssd=4x_samsung_990_pro_4tb"
        )
    if limit is None or max(needed) <= limit:
        return needed, ""
    return needed, why_infeasible(assembled.schedule, DeviceMemory(assembled.sizes, limit), in_flight, assembled.keeps)
