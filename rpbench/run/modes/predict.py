"""mode=predict: whole systems on a machine, request -> case -> record fields. Evidence: predicted."""

from typing import Any

from rpbench.advice import published_runs
from rpbench.config.choices import ConfigError, CostConfig, Predict
from rpbench.config.keys import LAYERS, check_figures
from rpbench.config.mesh import refuse_uneven
from rpbench.config.request import Request
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.machine import Machine, machine
from rpbench.mesh.software import Software
from rpbench.predict import SYSTEMS, Prediction, predict
from rpbench.predict.case import Case
from rpbench.predict.settings import Settings, given_settings, published_settings
from rpbench.predict.systems import system
from rpbench.run.layer_times import numbers_on
from rpbench.run.recording import Outcome, Work
from rpbench.run.scheduled import collection_paused
from rpbench.workload.architecture import Architecture


def published_run_fields(case: Case, cluster: Machine) -> dict[str, Any]:
    """A published run simulated action by action and predicted as a system, with the terms of both.

    Raises ValueError for a system without a schedule or a partition.
    """
    found, predicted = published_runs.simulated(case, cluster), predict(case, with_interval=False)
    outcome, setting, settings = found.outcome, found.setting, found.case.settings
    return {
        "status": "ok" if outcome.fits else "infeasible",
        "reason": None if outcome.fits else f"{outcome.misfit:.2f} times the memory that there is",
        "evidence": "predicted",
        "system": found.case.system,
        "generator": found.contender.entry.name,
        "settings": settings.source,
        "tokens_per_step": found.case.tokens_per_step,
        "tokens_per_s": found.tokens_per_s if outcome.fits else None,
        "step_time_s": found.step_time_s,
        "step_terms_s": dict(found.why),
        "lacks": list(found.lacks),
        "microbatch_sequences": setting.microbatch_sequences,
        "num_microbatches": round(settings.global_sequences / setting.microbatch_sequences),
        "recompute": setting.recompute,
        "schedule_options": dict(setting.options),
        "partition_layers": str(found.partition),
        "peak_memory_bytes": [outcome.peak_bytes] * found.case.num_devices,
        "host_memory_bytes": outcome.host_bytes,
        "predicted_status": predicted.status,
        "predicted_tokens_per_s": predicted.tokens_per_s,
        "predicted_terms_s": predicted.terms,
    }


# Schedules that stand for a system of the published tables.
_SYSTEM_OF = {"roundpipe": "roundpipe", "1f1b": "megatron-pp", "looped_bfs": "mobius"}
# The machine on which the layers of published models were timed (`analysis/published/layer_timings.csv`).
_TIMED_ON = "8x_rtx4090"
# Figures that verdicts and times need; a large number stands for one that does not bind.
_NEEDED = ("device_memory_bytes", "host_memory_bytes", "copy_bytes_per_s", "host_bytes_per_s")
_STATUS = {"ok": "ok", "OOM": "oom", "N/A": "infeasible"}


def prepare(request: Request) -> Work:
    """The prediction of a request; ValueError if model, cluster or system lacks something."""
    case, by_action = case_of(request), request.mode_as(Predict).by_action
    with collection_paused():
        outcome = Outcome(published_run_fields(case, request.cluster) if by_action else fields_of(predict(case)))
    return Work({}, lambda: outcome)


def basis_of(cluster: Machine, cost: CostConfig, known: Software | None = None) -> Basis:
    """The numbers of `numbers_on`; ConfigError for another cost than `analytic`."""
    if cost.name != "analytic":
        raise ConfigError(f"mode=predict rests on a model of the machine; set cost=analytic, not {cost.name}")
    return numbers_on(cluster, cost, known)


def case_of(request: Request) -> Case:
    """The published run of a request; ConfigError for a schedule or system without a model of its own."""
    asked, model, cluster = request.mode_as(Predict), request.given_model, request.cluster
    if cluster.num_devices is not None and request.num_devices > cluster.num_devices:
        raise ConfigError(
            f"num_devices={request.num_devices}: cluster {cluster.name} has {cluster.num_devices}; ask for fewer"
        )
    basis = basis_of(cluster, request.cost, request.software)
    check_figures(cluster, (*LAYERS, *_NEEDED), "mode=predict")
    schedule = request.entry.name
    if asked.system is None and schedule not in _SYSTEM_OF:
        raise ConfigError(
            f"schedule={schedule} is no system of the published tables; name one, as in mode.system=fsdp "
            f"({', '.join(SYSTEMS)}), or take mode=simulate"
        )
    name = _SYSTEM_OF[schedule] if asked.system is None else asked.system
    system(name)  # a ValueError if it is unknown
    runs = {published_runs.SYSTEMS[name].schedule, *(each for each, own in _SYSTEM_OF.items() if own == name)}
    if schedule not in runs and any(word.startswith("schedule=") for word in request.overrides):
        raise ConfigError(
            f"schedule={schedule} with mode.system={name}, which runs {published_runs.SYSTEMS[name].schedule}: leave "
            "one of both out"
        )
    refuse_uneven(cluster, "with mode=predict", "mode=simulate")
    settings = _settings(request, asked, name, model)
    is_timed = model.published_name is not None
    timed_on = basis_of(machine(_TIMED_ON), request.cost, request.software) if is_timed else None
    return Case(name, model, basis, settings, request.num_devices, measured_on=timed_on)


def _settings(request: Request, asked: Predict, name: str, model: Architecture) -> Settings:
    if asked.sequences is None and asked.microbatches is None:
        memory = float(request.cluster.device_memory_bytes or "inf")
        platform, devices = request.cluster.published_name, request.num_devices
        return published_settings(name, platform, model.published_name, memory, devices)
    if not (asked.sequences and asked.microbatches and asked.sequences > 0 and asked.microbatches > 0):
        raise ConfigError(
            f"mode.sequences={asked.sequences} with mode.microbatches={asked.microbatches}: give both as whole "
            "numbers of at least 1, or neither for the settings of the scripts"
        )
    return given_settings(name, request.num_devices, asked.sequences, asked.microbatches)


def fields_of(found: Prediction) -> dict[str, Any]:
    case = found.case
    return {
        "status": _STATUS[found.status],
        "reason": found.reason or None,
        "evidence": "predicted",
        "system": case.system,
        "settings": case.settings.source,
        "tokens_per_step": case.tokens_per_step,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_low": found.low,
        "tokens_per_s_high": found.high,
        "step_time_s": sum(found.terms.values()) if found.terms else None,
        "step_terms_s": found.terms,
        "sensitivity": dict(found.sensitivity) if found.sensitivity is not None else None,
        "memory_margin": found.verdict.margin if found.verdict else None,
        "device_bytes_by_class": found.device_bytes,
        "host_bytes_by_class": found.host_bytes,
        "peak_memory_bytes": [round(sum(found.device_bytes.values()))] * case.num_devices,
    }
