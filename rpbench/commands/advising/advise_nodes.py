"""`advise` over several nodes: the fastest meshes that fit, by the search over meshes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp
from typing import Any

from rpbench.advice.rows import mesh_misfit, mesh_row, parameters
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.plan_search.plans import Space
from rpbench.mesh.plan_search.search import NothingFits, search
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
        "parameters": parameters(model),
        "device_memory_bytes": machine.device.memory_bytes - (machine.reserved_memory_bytes or 0),
        "seq_len": seq_len,
        "tokens_per_step": global_batch * seq_len,
        "ranking_late": [],
        "none_found": [],
        "order_turns": [],
        "left_out": {},
        "search": "python -m rpbench plan mesh=search " + " ".join(words),
    }
    try:
        found = search(model, machine, global_batch, seq_len=seq_len, space=space, num_simulated=NUM_SIMULATED)
    except NothingFits as nothing:
        return about | _nothing(nothing)
    best = found.best[0].tokens_per_s_per_device
    levers: list[dict[str, Any]] = []
    for name, change in _changes().items():
        faster = search(model, change(machine), global_batch, seq_len=seq_len, space=space, num_simulated=1).best
        pace = faster[0].tokens_per_s_per_device if faster else best
        levers.append({"name": name, "tokens_per_s": pace * machine.size, "gain": max(0.0, pace / best - 1)})
    return about | {
        "ranking": [mesh_row(each, REACH) | {"plan": each.job} for each in found.best],
        "does_not_fit": [],
        "num_plans": found.num_plans,
        "num_plans_that_fit": found.num_fitting,
        "levers": sorted(levers, key=lambda lever: -lever["gain"]),
    }


def _nothing(found: NothingFits) -> dict[str, Any]:
    """The answer where no plan fits."""
    change = found.change
    return {
        "ranking": [],
        "does_not_fit": [mesh_misfit(found.smallest)],
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
