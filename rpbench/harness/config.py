"""Typed configuration: what a run may be asked, and how Hydra learns of the registered schedules."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rpbench import registry
from rpbench.registry import unknown_name

CONF = Path(__file__).parents[2] / "conf"

T = TypeVar("T")


class ConfigError(ValueError):
    """A request that cannot be understood: unknown names, misspelt keys, values of the wrong type."""


@dataclass
class CostConfig:
    """Any of `conf/cost/`; a source ignores the keys that are not in its file."""

    name: str = MISSING
    forward_ms: float = 1.0
    input_grad_ms: float = 1.0
    weight_grad_ms: float = 1.0
    recompute_ms: float = 0.0
    hop_ms: float = 0.0
    head_share: float = 0.0
    overlap_gain: float = 0.0
    recompute_ahead: bool | None = None
    fused_ahead: bool = False
    split_backward: bool = False
    profile: str | None = None
    microbatches_per_device: int = 3
    constants: dict[str, Any] = field(default_factory=dict)
    declared: dict[str, Any] = field(default_factory=dict)


@dataclass
class WorkloadConfig:
    """`system`, `sequences` and `microbatches` belong to the workload `paper`."""

    name: str = MISSING
    microbatch_sequences: int = 4
    path: str | None = None  # of `name=text`: any file
    text: str | None = None  # a file of `rpbench/models/text`, without its ending
    system: str | None = None
    sequences: int | None = None
    microbatches: int | None = None


@dataclass
class BackendConfig:
    """`convention` belongs to the roofline: how FLOPs are counted (`rpbench.cost.model`)."""

    name: str = MISSING
    convention: str = "artifact"


@dataclass
class TrackerConfig:
    name: str = MISSING
    project: str = "rpbench"
    group: str | None = None
    init_timeout_s: float = 10.0


@dataclass
class CheckpointConfig:
    """Files: where to leave the state after the last step, and what to go on from."""

    save_to: str | None = None
    resume_from: str | None = None


@dataclass
class RunConfig:
    """One run; `conf/config.yaml` explains the keys."""

    schedule: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    num_devices: int = MISSING
    num_microbatches: int = MISSING
    num_steps: int = MISSING
    chunks_per_device: int | None = None
    partition: str = MISSING
    dispatch: str = MISSING
    offload: str = "none"
    prefetch: int = 1
    charge: str = "hops"
    recompute: str = "all"
    schedule_file: str | None = None
    seed: int = MISSING
    dtype: str = "float32"
    verify: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    results_dir: str = MISSING
    save_timeline: bool = False
    force: bool = False


# What a run is asked for besides its subject: these do not enter its identity.
BESIDES = ("results_dir", "save_timeline", "force", "tracker")


def register() -> None:
    """Offer the schema and every registered schedule to Hydra; safe to call twice."""
    store = ConfigStore.instance()
    store.store(name="rpbench_schema", node=RunConfig)
    for name, entry in registry.entries().items():
        store.store(group="schedule", name=name, node={"name": name, **entry.options}, package="schedule")


def load(overrides: Sequence[str]) -> RunConfig:
    """The configuration of a single run.

    Raises:
        ConfigError: for an unknown name, key or value, with the nearest known one.
    """
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return typed(RunConfig, compose("config", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, overrides) from None


def typed(schema: type[T], node: DictConfig | dict[str, Any]) -> T:
    """The dataclass a config node stands for.

    Raises:
        ConfigError: for a key the dataclass does not have, or a value of another type.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), node)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from None


def resolved(config: RunConfig) -> dict[str, Any]:
    """The part of a configuration that decides what a run measures, as plain data."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in BESIDES}


def choices(group: str) -> list[str]:
    """Options of a config group: its files; of `schedule`, the registered ones first."""
    files = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return [*registry.entries(), *files] if group == "schedule" else files


# --- what went wrong, in a few lines -------------------------------------------------------------------------


def swept(experiment: str, key: str) -> list[Any]:
    """The values an experiment of `conf/experiment/` sweeps a key over, in its order; numbers as numbers."""
    params = OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml").hydra.sweeper.params
    return list(OmegaConf.create(f"[{params[key]}]"))


def explained(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Hydra's error in the words of the person who typed the overrides."""
    message = _first_line(error)
    if isinstance(error, OverrideParseException):
        given = getattr(error, "override", None)
        return ConfigError(
            f"cannot read {given or ' '.join(overrides)!r}: {message}. Write key=value; quote values with spaces, "
            "bars or commas, as in \"partition='2-2|1-1-2-0*'\""
        )
    if isinstance(error, MissingConfigException) and (
        missing := re.search(r"Could not find '([\w/]+)/([^']*)'", str(error))
    ):
        group, name = missing.groups()
        return ConfigError(unknown_name(group, name, choices(group)))
    if isinstance(error, ConfigCompositionException) and (
        missing := re.search(r"Could not override '([^']+)'", str(error))
    ):
        return ConfigError(_unknown_key(missing[1], str(error.__cause__ or "")))
    if message.startswith("Ambiguous value"):
        return ConfigError(f"{message}: several values are a sweep; put -m before the overrides")
    cause = _first_line(error.__cause__) if error.__cause__ else ""
    return ConfigError(f"{message}: {cause}" if cause and cause not in message else message)


def _unknown_key(key: str, cause: str) -> str:
    group, _, name = key.rpartition(".")
    known = [f.name for f in fields(RunConfig)] if not group else []
    if group and (path := CONF / group).is_dir():
        known = sorted({str(k) for file in path.glob("*.yaml") for k in OmegaConf.load(file)})
    if group == "schedule":
        known = sorted({option for entry in registry.entries().values() for option in entry.options})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if name in known:
        return f"{key} is not a key of the chosen {group}; {group} files that have it: {_having(group, name)}"
    hint = f"; did you mean {group + '.' if group else ''}{near[0]}?" if near else ""
    if "Value" in cause and "not" in cause:
        return f"{key}: {cause.splitlines()[0]}"
    return f"unknown key {key!r}{hint} Keys: {', '.join(known) or 'none here'}"


def _having(group: str, name: str) -> str:
    if group == "schedule":
        return ", ".join(entry.name for entry in registry.entries().values() if name in entry.options)
    return ", ".join(path.stem for path in sorted((CONF / group).glob("*.yaml")) if name in OmegaConf.load(path))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    return f"{key}: {lines[0]}" if key else (lines[0] if lines else type(error).__name__)


def as_plain(value: Any) -> Any:
    """Dataclasses and containers as JSON-ready data."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    return value
