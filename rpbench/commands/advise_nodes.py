"""`advise` over several nodes: the fastest meshes that fit, by the search over meshes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp
from typing import Any

from rpbench.cost.machine import Machine
from rpbench.mesh.job import Job
from rpbench.mesh.plans import Space
from rpbench.mesh.prediction import Prediction
from rpbench.mesh.search import NothingFits, search
from rpbench.mesh.smallest_change import lacking_bytes
from rpbench.predict.prediction import NORMAL
from rpbench.workload.architecture import Architecture

# Assumed: one standard deviation as of a pipeline's unmodelled terms (conf/cost/analytic.yaml), nine of ten errors.
REACH = exp(0.2 * NORMAL)
NUM_SIMULATED = 12


def advise_nodes(
    model: Architecture, machine: Machine, *, seq_len: int, global_batch: int, space: Space, words: Sequence[str]
) -> dict[str, Any]:
    """The ranking of meshes, as JSON-ready data.

    Args:
        global_batch: sequences of a step.
        space: what the search may choose from.
        words: of the command line that asks for it.

    Returns:
        Where nothing fits, an empty ranking, what the smallest plan lacks, and the smallest change that makes it fit.

    Raises:
        ValueError: if nothing divides.
    """
    about = {
        "model": model.name,
        "cluster": machine.name,
        "num_devices": machine.size,
        "seq_len": seq_len,
        "tokens_per_step": global_batch * seq_len,
    }
    try:
        found = search(model, machine, global_batch, seq_len=seq_len, space=space, num_simulated=NUM_SIMULATED)
    except NothingFits as nothing:
        return about | _nothing(nothing)
    best = found.best[0].tokens_per_s_per_device
    command = "python -m rpbench plan mesh=search " + " ".join(words)
    levers: list[dict[str, Any]] = []
    for name, change in _changes().items():
        faster = search(model, change(machine), global_batch, seq_len=seq_len, space=space, num_simulated=1).best
        pace = faster[0].tokens_per_s_per_device if faster else best
        levers.append({"name": name, "tokens_per_s": pace * machine.size, "gain": max(0.0, pace / best - 1)})
    return about | {
        "ranking": [_row(each, command) for each in found.best],
        "does_not_fit": [],
        "num_plans": found.num_plans,
        "num_plans_that_fit": found.num_fitting,
        "levers": sorted(levers, key=lambda lever: -lever["gain"]),
    }


def _nothing(found: NothingFits) -> dict[str, Any]:
    """The answer where no plan fits."""
    job, change = found.smallest, found.change
    lacks = {"device_lacks_bytes": round(lacking_bytes(job)), "host_lacks_bytes": 0}
    return {
        "ranking": [],
        "does_not_fit": [{"schedule": job.schedule, "options": _options(job), **lacks}],
        "levers": [],
        "smallest_change": f"the smallest plan {change}",
        "change": change.plain(),
    }


def _changes() -> Mapping[str, Callable[[Machine], Machine]]:
    return {
        "links between nodes twice as fast": lambda m: replace(
            m, inter_bytes_per_s=m.inter_bytes_per_s and 2 * m.inter_bytes_per_s
        ),
        "links inside nodes twice as fast": lambda m: replace(
            m,
            intra_bytes_per_s=2 * (m.intra_bytes_per_s or m.device.link_bytes_per_s),
            collective_bytes_per_s=m.collective_bytes_per_s and 2 * m.collective_bytes_per_s,
        ),
        "twice the device memory": lambda m: replace(m, device_memory_bytes=2 * m.device.memory_bytes),
    }


def _row(found: Prediction, command: str) -> dict[str, Any]:
    job = found.job
    pace = found.tokens_per_s_per_device * job.machine.size
    return {
        "schedule": job.schedule,
        "options": _options(job),
        "tokens_per_s": pace,
        "tokens_per_s_low": pace / REACH,
        "tokens_per_s_high": pace * REACH,
        "peak_memory_bytes": round(found.peak_memory_bytes),
        "staleness_steps": 0,
        "bubble": None,
        "why": dict(found.terms),
        "command": command,
    }


def _options(job: Job) -> dict[str, Any]:
    """Sizes of a mesh and what is chosen with it."""
    mesh = job.mesh
    return {
        "data": mesh.data,
        "pipeline": mesh.pipeline,
        "tensor": mesh.tensor,
        "context": mesh.context,
        "expert": mesh.expert,
        "shares": mesh.sharing.what,
        "microbatch_sequences": job.sequences,
        "num_microbatches": job.num_microbatches,
        "chunks_per_device": job.chunks,
        "recompute": job.recompute,
    }
