"""Config -> schedule -> backend -> record."""

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from rpbench.cost.memory import device_bytes, why_infeasible
from rpbench.cost.profiled import to_text
from rpbench.cost.replicas import host_bytes
from rpbench.cost.sizes import DeviceMemory
from rpbench.harness import provenance, record, tracker
from rpbench.harness.assemble import Assembled, assemble
from rpbench.harness.closed_form import closed_forms
from rpbench.harness.collection import collection_paused
from rpbench.harness.config import ConfigError, RunConfig, as_plain, resolved
from rpbench.harness.offloading import simulate_transfers, transfer_bytes
from rpbench.harness.prediction import predicted
from rpbench.harness.record import Events, Record
from rpbench.ir.timeline import Timeline
from rpbench.sim.graph import Graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.sim.metrics import measure

PROFILE = "profile.json"  # in a run's folder: the layer times its costs were made of


def run(config: RunConfig) -> Record:
    """Run a configuration, or find its record if it has run before; the record is on disk when this returns.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    subject = as_plain(resolved(config))
    for group, key in (("checkpoint", "resume_from"), ("workload", "path")):
        if file := subject[group].get(key):  # another file by that name is another run
            subject[group]["sha256"] = provenance.digest(Path(file))
    name = record.run_id(subject, provenance.code_version())
    folder = Path(config.results_dir) / name
    record.check_writable(Path(config.results_dir), "results_dir")
    if not config.force and config.checkpoint.save_to is None and (known := finished(folder, config)):
        tracker.mirror(config, known, None)
        return known
    if (found := _from_formulas(config)) is not None:
        row = {"run_id": name, **names(config), "config": subject, **origin(), **found}
        record.write(folder, row)
        tracker.mirror(config, row, None)
        return row
    with collection_paused():
        assembled = assemble(config)
    _check_backend(config, assembled)
    row = {"run_id": name, **names(config), **_identity(config, assembled), "config": subject, **origin()}
    events = Events(folder, row["started_at"])
    if assembled.profile is not None:
        record.write_atomically(folder / PROFILE, to_text(assembled.profile))
    try:
        row, timeline = _carried_out(config, row, assembled, events)
        if timeline is not None and config.save_timeline:
            record.write_atomically(folder / "timeline.csv", timeline.to_csv())
    except Exception as error:
        if _out_of_memory(config, error):
            row |= {"status": "oom", "reason": str(error).partition("\n")[0], "evidence": None}
            events.add("oom", reason=str(error))
            record.write(folder, row)
            tracker.mirror(config, row, None)
            return row
        row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}", "evidence": None}
        events.add("failed", traceback=traceback.format_exc())
        record.write(folder, row)
        raise
    finally:
        events.close()
    record.write(folder, row)
    tracker.mirror(config, row, timeline)
    return row


def _out_of_memory(config: RunConfig, error: Exception) -> bool:
    """Whether a run ended because a device or the host had no memory left: a verdict, not a failure."""
    if config.backend["name"] == "sim":
        return isinstance(error, MemoryError)
    from rpbench.engine.state.device_memory import is_out_of_memory  # torch, which a simulation does not need

    return is_out_of_memory(error)


def _from_formulas(config: RunConfig) -> dict[str, Any] | None:
    """The fields of a run that is answered by formulas; None where there is a schedule to run."""
    if config.backend["name"] == "roofline":
        return {"status": "ok", "reason": None, "evidence": "derived", **closed_forms(config)}
    if config.workload["name"] != "paper":
        return None
    with collection_paused():
        return predicted(config)


def _check_backend(config: RunConfig, assembled: Assembled) -> None:
    """Refuse what the backend cannot run, before anything is written."""
    asked = config.checkpoint.save_to or config.checkpoint.resume_from
    if asked and config.backend["name"] not in ("virtual", "cpu"):
        raise ConfigError(
            f"checkpoint: {asked}: backend={config.backend['name']} has no state to keep; use virtual or cpu"
        )
    if config.backend["name"] != "sim":
        from rpbench.harness.train import check_request

        check_request(config, assembled)


def finished(folder: Path, config: RunConfig) -> Record | None:
    """The record of a run that has ended, with its timeline if one is asked for."""
    known = record.read(folder)
    if known is None or known["status"] == "failed":
        return None
    if config.save_timeline and known["status"] == "ok" and not (folder / "timeline.csv").exists():
        return None
    return known


def names(config: RunConfig) -> dict[str, Any]:
    """The choices of a run as plain names and sizes."""
    return {
        "schedule": config.schedule["name"],
        "model": config.model["name"],
        "cluster": config.cluster["name"],
        "workload": config.workload["name"],
        "cost": config.cost["name"],
        "backend": config.backend["name"],
        "partition": config.partition,
        "dispatch": config.dispatch,
        "offload": config.offload,
        "num_devices": config.num_devices,
        "num_microbatches": config.num_microbatches,
        "num_steps": config.num_steps,
        "seed": config.seed,
    }


def _identity(config: RunConfig, assembled: Assembled) -> dict[str, Any]:
    """What the request turned into: stages, cuts and updates, and the sizes of a schedule read from a file."""
    shape = assembled.schedule.shape
    given = {"num_microbatches": shape.num_microbatches, "num_steps": shape.num_steps} if config.schedule_file else {}
    return {
        "schedule": assembled.schedule.name,
        "partition_layers": str(assembled.choice.partition),
        "num_devices": shape.num_ranks,
        "num_stages": shape.num_stages,
        "num_backward_stages": shape.num_backward_stages,
        "num_updates": shape.num_steps,  # more than num_steps where a schedule updates after every microbatch
        **given,
    }


def origin() -> dict[str, Any]:
    """Where and with what a record is made."""
    return {
        "code_version": provenance.code_version(),
        "git_commit": provenance.git_commit(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
        "started_at": provenance.now(),
    }


def _carried_out(
    config: RunConfig, row: Record, assembled: Assembled, events: Events
) -> tuple[Record, Timeline | None]:
    """The row with what the backend found, and the timeline; without one where the plan does not fit."""
    began = time.perf_counter()
    versions = assembled.versions
    row = row | {"status": "ok", "reason": None, **_plan_facts(assembled)}
    row |= {"weight_versions": versions.max_live, "staleness_steps": versions.max_staleness}
    graph = assembled.graph
    memory, reason = _memory(assembled, graph)
    row["peak_memory_bytes"] = memory
    row |= transfer_bytes(assembled.schedule, assembled.sizes)
    if assembled.sizes is not None:
        row["host_memory_bytes"] = host_bytes(assembled.schedule, assembled.sizes)
    if reason:
        events.add("infeasible", reason=reason)
        return row | {"status": "infeasible", "reason": reason, "evidence": assembled.evidence}, None
    if config.backend["name"] == "sim":
        fields, timeline = _simulated(graph, assembled)
        if config.cost["name"] == "unit":
            fields |= _slots(fields)
    else:
        from rpbench.harness.train import execute  # torch, which a simulation does not need

        fields, timeline = execute(config, assembled)
    row |= fields
    if assembled.tokens_per_step is not None:
        row["tokens_per_s"] = assembled.tokens_per_step / row["step_time_s"]
    events.add("finished", seconds=time.perf_counter() - began, makespan_s=row["makespan_s"])
    return row, timeline


def _memory(assembled: Assembled, graph: Graph) -> tuple[list[int] | None, str]:
    """Bytes on each device where the model has a shape, and why they do not fit, if they do not."""
    if assembled.sizes is None:
        return None, ""
    in_flight, limit = peak_in_flight(graph), assembled.cluster.device_memory_bytes
    needed = device_bytes(assembled.schedule, assembled.sizes, in_flight)
    if limit is None or max(needed) <= limit:
        return needed, ""
    return needed, why_infeasible(assembled.schedule, DeviceMemory(assembled.sizes, limit), in_flight)


def _simulated(graph: Graph, assembled: Assembled) -> tuple[dict[str, Any], Timeline]:
    costs, after_last = assembled.costs, assembled.switch_after_last_forward
    more: dict[str, Any] = {}
    if assembled.transfers is None:
        timeline = simulate_graph(graph, costs)
    else:
        timeline, more = simulate_transfers(graph, costs)
    fields = measure(graph, timeline, costs, switch_after_last_forward=after_last)
    return {"evidence": assembled.evidence, **fields, **more}, timeline


def _slots(fields: dict[str, Any]) -> dict[str, Any]:
    """Bubbles in chunk slots, where every F, I and W of a chunk takes one: time less the work of a device."""
    work = sum(fields["busy_s"]) / len(fields["busy_s"])
    return {"bubble_slots": fields["makespan_s"] - work, "bubble_span_slots": fields["span_s"] - work}


def _plan_facts(assembled: Assembled) -> dict[str, Any]:
    return {
        "num_plans_evaluated": assembled.choice.num_evaluated,
        "tokens_per_step": assembled.tokens_per_step,
        "tokens_per_s": None,
        "peak_memory_bytes": None,
    }


def describe(row: Record) -> str:
    """One line for people about a record."""
    if row["backend"] == "roofline":
        return f"closed forms of {row['model']} on {row['cluster']} ({row['convention']})"
    if row["backend"] == "duel":
        return _describe_contender(row)
    what = f"{row['schedule']} {row['model']} {row['num_devices']}x{row['num_microbatches']} {row['partition']}"
    if row["workload"] == "paper":
        what = f"{row['system']} {row['model']} on {row['num_devices']} of {row['cluster']}, predicted"
    if row["status"] != "ok":
        return f"{what}: {row['status']}, {row['reason']}"
    if row["workload"] == "paper":
        rate, low, high = (row[f"tokens_per_s{end}"] for end in ("", "_low", "_high"))
        return f"{what}: {rate:,.0f} tokens/s ({low:,.0f} to {high:,.0f}), {row['memory_margin']:.0%} of memory left"
    text = f"{what}: makespan {row['makespan_s']:.6g} s, bubble {100 * row['bubble_makespan']:.2f} %"
    if "grad_max_abs_diff" in row:
        text += f", gradients within {row['grad_max_abs_diff']:g} of plain training"
    return text


def _describe_contender(row: Record) -> str:
    what = f"duel {row['model']} {row['contender']}"
    if row["status"] != "ok":
        return f"{what}: {row['status']}, {row['reason']}"
    return f"{what}: {row['makespan_s']:.3f} s, replay {row['replay_makespan_s']:.3f} s, {row['partition_layers']}"


def emit(row: Record) -> None:
    """The record to stdout, one line of JSON; what it says to stderr."""
    sys.stdout.write(json.dumps(row, allow_nan=False) + "\n")
    sys.stdout.flush()
    print(describe(row), file=sys.stderr)
