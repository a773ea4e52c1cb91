"""Whole systems predicted: config -> case -> record fields. Evidence: predicted."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from rpbench.cost.basis import Basis, make_basis
from rpbench.cost.hardware import Cluster
from rpbench.cost.model import Model
from rpbench.harness.config import CONF, ConfigError, CostConfig, RunConfig, WorkloadConfig, typed
from rpbench.predict import SYSTEMS, Prediction, predict
from rpbench.predict.case import Case
from rpbench.predict.settings import Settings, given_settings, published_settings
from rpbench.predict.systems import system

# Schedules that stand for a system of the published tables.
_SYSTEM_OF = {"roundpipe": "roundpipe", "1f1b": "megatron-pp", "looped_bfs": "mobius"}
# The machine on which the layers of published models were timed (`analysis/published/layer_timings.csv`).
_TIMED_ON = "8x_rtx4090"
# Figures without which there is no verdict or no time; where they do not bind, a large number says so.
_NEEDED = ("device_memory_bytes", "host_memory_bytes", "copy_bytes_per_s", "host_bytes_per_s")
_STATUS = {"ok": "ok", "OOM": "oom", "N/A": "infeasible"}


def basis_of(cluster: Cluster, cost: Mapping[str, Any]) -> Basis:
    """The numbers behind `cost=analytic` on a cluster.

    Raises:
        ConfigError: for another source of costs.
        ValueError: for a constant that cannot be.
    """
    given = typed(CostConfig, dict(cost))
    if given.name != "analytic":
        raise ConfigError(
            f"workload=paper is predicted from a model of the machine; set cost=analytic, not {given.name}"
        )
    return make_basis(cluster, given.constants, given.declared)


def predicted(config: RunConfig) -> dict[str, Any]:
    """Record fields of a prediction: verdict, throughput with its interval, seconds and bytes by cause.

    Raises:
        ValueError: if model, cluster or system lacks what is needed.
    """
    case = case_of(config)
    return fields_of(predict(case))


def case_of(config: RunConfig) -> Case:
    """What a configuration with `workload=paper` asks for.

    Raises:
        ConfigError: for a schedule or system without a model of its own, or a model without a shape.
    """
    if config.model["name"] == "abstract":
        raise ConfigError("workload=paper trains a model with a shape; choose one, as in model=qwen3_1p7b")
    if config.backend["name"] != "sim":
        raise ConfigError(f"workload=paper is predicted, not run on backend={config.backend['name']}; use backend=sim")
    model, cluster = Model(**config.model), Cluster(**config.cluster)
    if cluster.num_devices is not None and config.num_devices > cluster.num_devices:
        raise ConfigError(
            f"num_devices={config.num_devices}: cluster {cluster.name} has {cluster.num_devices}; ask for fewer"
        )
    basis = basis_of(cluster, config.cost)
    for figure in _NEEDED:
        basis[figure]
    name = _system(config)
    settings = _settings(config, name, model, cluster)
    return Case(name, model, basis, settings, config.num_devices, measured_on=_measured_on(model, config))


def _measured_on(model: Model, config: RunConfig) -> Basis | None:
    """The constants on the machine where a published model's layers were timed."""
    if model.published_name is None:
        return None
    figures: Any = OmegaConf.to_container(OmegaConf.load(CONF / "cluster" / f"{_TIMED_ON}.yaml"))
    return basis_of(Cluster(**figures), config.cost)


def _settings(config: RunConfig, name: str, model: Model, cluster: Cluster) -> Settings:
    asked = typed(WorkloadConfig, config.workload)
    if asked.sequences is None and asked.microbatches is None:
        memory = float(cluster.device_memory_bytes or "inf")
        return published_settings(name, cluster.published_name, model.published_name, memory)
    if not (asked.sequences and asked.microbatches and asked.sequences > 0 and asked.microbatches > 0):
        raise ConfigError(
            f"workload.sequences={asked.sequences} with workload.microbatches={asked.microbatches}: give both as whole "
            "numbers of at least 1, or neither for the settings of the scripts"
        )
    return given_settings(name, config.num_devices, asked.sequences, asked.microbatches)


def _system(config: RunConfig) -> str:
    asked = typed(WorkloadConfig, config.workload).system
    if asked is not None:
        system(asked)
        return asked
    schedule = config.schedule["name"]
    if schedule not in _SYSTEM_OF:
        raise ConfigError(
            f"schedule={schedule} is no system of the published tables; name one, as in workload.system=fsdp "
            f"({', '.join(SYSTEMS)}), or take workload=synthetic"
        )
    return _SYSTEM_OF[schedule]


def fields_of(found: Prediction) -> dict[str, Any]:
    """A prediction as record fields."""
    case = found.case
    fields: dict[str, Any] = {
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
    return fields
