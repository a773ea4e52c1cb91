"""Configuration by Hydra: the groups of `conf/`, composing, and errors in words of the command line."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rpbench import registry
from rpbench.config.choices import CheckpointConfig, ConfigError, Duel, OptimizerConfig, check, first_line, is_fraction
from rpbench.config.errors import reworded
from rpbench.config.files import check_own_files, refuse_targets, refuse_what_runs
from rpbench.cost.hardware.basis import counted_numbers
from rpbench.cost.hardware.machine import devices_named
from rpbench.places import CONF, ORDERS, file_of, files_of, places
from rpbench.registry import unknown_name
from rpbench.workload.architecture import OLD_SPELLINGS, unknown_key


@dataclass
class OverlapConfig:
    """Communication hidden behind computation; None: as in the framework's file in `conf/software/`."""

    gradients: bool | None = None  # sums over replicas run beside backwards
    parameters: bool | None = None  # gathers over replicas run beside forwards
    tensor: float | None = None  # fraction of tensor-parallel collectives that is hidden
    expert: float | None = None  # fraction of the exchange between experts that is hidden

    def __post_init__(self) -> None:
        share = "a share, from 0 (nothing is hidden) to 1 (all is)"
        check(self, "mesh.overlap.", share, is_fraction, "tensor", "expert")


@dataclass
class MeshConfig:
    """The keys under `mesh`; `conf/config.yaml` explains them. All None: the run has no mesh."""

    data: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    sequence_parallel: bool | None = None
    shard: str | None = None
    shard_group: int | None = None
    reshard: bool | None = None
    order: list[str] | None = None
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    framework: str | None = None
    precision: str | None = None

    @property
    def is_given(self) -> bool:
        return self != MeshConfig()

    def given(self, *names: str) -> dict[str, Any]:
        """The values of those of these keys that are set."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


GROUPS = (
    *("mode", "schedule", "model", "cluster", "workload", "cost", "software"),
    *("backend", "optimizer", "tracker", "experiment"),
)


@dataclass
class RunConfig:
    """One configuration as Hydra composes it; `conf/config.yaml` explains the keys, `request_of` types it."""

    mode: dict[str, Any] | None = None
    schedule: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)
    software: dict[str, Any] | None = None
    backend: dict[str, Any] | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    num_devices: int | None = None
    num_microbatches: int = MISSING
    num_steps: int = MISSING
    chunks_per_device: int | None = None
    partition: str = MISSING
    dispatch: str = MISSING
    offload: str | None = None
    prefetch: int = 1
    charge: str | None = None
    recompute: str = "all"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    tuning_budget: int | None = None
    schedule_file: str | None = None
    seed: int = MISSING
    dtype: str = "float32"
    verify: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    results_dir: str = MISSING
    save_timeline: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for group, schema in _NESTED.items():  # `+` adds any key to them
            node: Any = attrgetter(group)(self)
            if added := vars(node).keys() - {f.name for f in fields(schema)}:
                raise ConfigError(_unknown_key(f"{group}.{min(added)}", ""))


# Keys of `RunConfig` that hold keys of their own and no option of a group.
_NESTED: dict[str, type[Any]] = {"mesh": MeshConfig, "mesh.overlap": OverlapConfig, "checkpoint": CheckpointConfig}

_FIELDS = frozenset(f.name for f in fields(RunConfig))

BESIDES = ("results_dir", "save_timeline", "force", "tracker")  # keys that are not part of a run's identity


@dataclass(frozen=True)
class Composed:
    """A composed configuration, and how it was requested."""

    node: "DictConfig | RunConfig"  # the values, as Hydra has them or typed already
    choices: Mapping[str, str | None]  # group -> chosen option
    overrides: tuple[str, ...] = ()  # `key=value` of the command line or of a cell of a sweep


class Places(SearchPathPlugin):
    """Lets Hydra read the user's folders as well."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in places():
            search_path.append("rpbench", f"file://{place}")


# Schedules that Hydra knows, by name; storing all of them again takes an eighth of a composition.
_stored: dict[str, dict[str, Any]] = {}


def register(overrides: Sequence[str] = ()) -> None:
    """Offer Hydra the schema, all schedules, the user's folders and machines that overrides describe; also again."""
    refuse_targets(overrides)
    check_own_files(GROUPS, overrides)
    refuse_what_runs()
    Plugins.instance().register(Places)
    store = ConfigStore.instance()
    if not _stored:
        store.store(name="rpbench_schema", node=RunConfig)
    for name, entry in registry.offered().items():
        if _stored.get(name) != (node := schedule_node(entry)):
            store.store(group="schedule", name=name, node=node, package="schedule")
            _stored[name] = node
    named = (item.removeprefix("cluster=").split(",") for item in overrides if item.startswith("cluster="))
    for name in chain.from_iterable(named):
        if file_of("cluster", name) is None and (keys := devices_named(name)) is not None:
            store.store(group="cluster", name=name, node=keys, package="cluster")


def schedule_node(entry: registry.Entry) -> dict[str, Any]:
    """A registered schedule as an option of its group: its name and default options."""
    return {"name": entry.name, **entry.options}


def composed(overrides: Sequence[str]) -> Composed:
    """The configuration of a single run; ConfigError for an unknown name, key or value, with the nearest known one."""
    refuse_old_spellings(overrides)
    register(overrides)
    GlobalHydra.instance().clear()
    with in_our_words(overrides), initialize_config_dir(str(CONF), version_base="1.3"):
        node = compose("config", overrides=with_orders(overrides), return_hydra_config=True)
        hydra = node.hydra
        with open_dict(node):
            del node["hydra"]
        return replace(composed_of(node, hydra), overrides=asked_for(overrides))


def with_orders(overrides: Sequence[str]) -> list[str]:
    """The overrides with `schedule_file=` where a file takes the place of a schedule's name."""
    is_file = re.compile(rf"schedule=.*({'|'.join(map(re.escape, ORDERS))})")
    return [item.replace("=", "_file=", 1) if is_file.fullmatch(item) else item for item in overrides]


# Errors of Hydra, omegaconf and PyYAML over malformed files.
BROKEN_FILES = (YAMLError, OSError, RecursionError, TypeError, AttributeError, LookupError, AssertionError)


@contextmanager
def in_our_words(overrides: Sequence[str]) -> Iterator[None]:
    """Turn errors of Hydra inside the block into ConfigErrors."""
    try:
        yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explained(error, overrides) from None
    except BROKEN_FILES as error:
        if "Unexpected type for root" in str(error):  # keys beneath a group without an option
            groups = ("mode.", "backend.", "software.")
            keys = " ".join(item for item in overrides if item.lstrip("+").startswith(groups))
            ways = "mode=failures, backend=cpu or software=megatron_core"
            raise ConfigError(f"{keys}: choose what has such keys first, as in {ways}") from None
        is_circle = isinstance(error, RecursionError)
        what = "its defaults lead back to it" if is_circle else f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"cannot compose {' '.join(overrides)}: a file of it is none that Hydra reads ({what})"
        ) from None


def composed_of(node: DictConfig, hydra: DictConfig) -> Composed:
    """The composed node with its choices and overrides, from Hydra's runtime."""
    chosen = hydra.runtime.choices
    choices = {group: None if chosen.get(group) in (None, "null") else str(chosen[group]) for group in GROUPS}
    for key in node:
        if key not in _FIELDS:
            raise ConfigError(_unknown_key(str(key), ""))
    return Composed(node, choices, asked_for([str(item) for item in hydra.overrides.task]))


def asked_for(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides that are part of a run's identity."""
    return tuple(item for item in overrides if re.split("[.=]", item)[0] not in BESIDES and not is_of_hydra(item))


def is_of_hydra(override: str) -> bool:
    """Whether an override is of Hydra's own keys and groups, such as `hydra/launcher=joblib`."""
    return override.partition("=")[0].lstrip("+~").replace("/", ".").split(".")[0] == "hydra"


def options_of(group: str) -> list[str]:
    """Options of a config group: its files, behind the registered schedules in `schedule`."""
    files = [path.stem for path in files_of(group)]
    return [*registry.offered(), *files] if group == "schedule" else files


def swept(experiment: str, key: str) -> list[Any]:
    """The values over which an experiment sweeps a key."""
    return list(OmegaConf.create(f"[{_swept(experiment)[key]}]"))


def not_swept(experiment: str, overrides: Sequence[str]) -> list[str]:
    """The keys over which an experiment sweeps and that no override sets, as a single run leaves them."""
    given = {item.lstrip("+~").partition("=")[0] for item in overrides}
    return [str(key) for key in _swept(experiment) if key not in given]


def _swept(experiment: str) -> Mapping[str, Any]:
    path = file_of("experiment", experiment)
    if path is None:
        raise ConfigError(unknown_name("experiment", experiment, options_of("experiment")))
    return OmegaConf.select(OmegaConf.load(path), "hydra.sweeper.params") or {}


# --- spellings of earlier versions ---------------------------------------------------------------------------

_OLD_CHOICES = {
    ("backend", "sim"): "a simulation is what runs where no backend is chosen: leave it out",
    ("backend", "roofline"): "closed forms are a mode: mode=roofline",
    ("backend", "duel"): "the duel is a mode: mode=duel",
    ("workload", "paper"): "whole systems are predicted in a mode of their own: mode=predict",
    ("backend.optimizer", "sgd"): "the optimizer is a group of its own: optimizer=sgd",
    ("backend.optimizer", "adamw"): "the optimizer is a group of its own: optimizer=adamw",
}
_MOVED_KEYS = {
    **{f"workload.{key}": f"mode.{key}" for key in ("system", "sequences", "microbatches")},
    "backend.convention": "mode.convention",
    **{f"backend.{f.name}": f"mode.{f.name}" for f in fields(Duel) if f.name != "name"},
    **{f"backend.{f.name}": f"optimizer.{f.name}" for f in fields(OptimizerConfig) if f.name != "name"},
    "method": "schedule",
}


_BEYOND_ASCII = re.compile(r"([+\w./@]+)=([^'\"\[\](){},$]*[^\x00-\x7f'\"\[\](){},$][^'\"\[\](){},$]*)")


def quoted(overrides: Sequence[str]) -> list[str]:
    """The overrides with quotes around values that hold letters beyond ASCII, which Hydra's grammar asks for."""
    return [f"{found[1]}='{found[2]}'" if (found := _BEYOND_ASCII.fullmatch(item)) else item for item in overrides]


def refuse_old_spellings(arguments: Sequence[str]) -> None:
    """Refuse spellings of earlier versions, naming the present ones."""
    for item in arguments:
        key, equals, value = item.lstrip("+~").partition("=")
        if not equals:
            continue
        for word in map(str.strip, value.split(",")):
            if key == "schedule" and word in registry.RENAMED and word not in registry.offered():
                raise ConfigError(registry.renamed(word))
            if (key, word) in _OLD_CHOICES:
                raise ConfigError(f"{key}={word}: {_OLD_CHOICES[key, word]}")
        if key in _MOVED_KEYS:
            raise ConfigError(f"{key} is now {_MOVED_KEYS[key]}: write {_MOVED_KEYS[key]}={value}")


# --- what went wrong, in a few lines -------------------------------------------------------------------------


def explained(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Hydra's error in words of the overrides as typed."""
    message = first_line(error)
    if nameless := [item for item in overrides if item.startswith("=")]:
        return ConfigError(f"{nameless[0]}: a key is missing before =; write key=value")
    if isinstance(error, OverrideParseException):
        given = getattr(error, "override", None)
        if given == "" or str(given).startswith("="):
            return ConfigError(reworded("Could not override ''", overrides))
        return ConfigError(
            f"cannot read {given or ' '.join(overrides)!r}: write key=value, and brackets and quotes in pairs; quote "
            "values with commas or other marks, as in \"results_dir='a;b'\""
        )
    if isinstance(error, MissingConfigException) and (
        missing := re.search(r"Could not find '([\w/]+)/([^']*)'", str(error))
    ):
        group, name = missing.groups()
        if group.startswith("hydra/"):
            return ConfigError(
                f"{group}={name}: none of this name is installed; leave it out, or install the package that brings it, "
                "such as hydra-joblib-launcher or hydra-submitit-launcher"
            )
        return ConfigError(unknown_name(group, name, options_of(group)))
    if isinstance(error, ConfigCompositionException) and (
        missing := re.search(r"Could not override '([^']+)'", str(error))
    ):
        return ConfigError(
            reworded(message) if not missing[1] else _unknown_key(missing[1], str(error.__cause__ or ""))
        )
    if found := _IN_FILE.match(str(error)):
        return ConfigError(f"{found[1]}: {_about_file(found[1], str(error)[found.end() :])}")
    cause = first_line(error.__cause__) if error.__cause__ else ""
    return ConfigError(reworded(f"{message}: {cause}" if cause and cause not in message else message, overrides))


_IN_FILE = re.compile(r"In '([^']+)': \w+ raised while composing config:\n")


def _about_file(name: str, said: str) -> str:
    """The fault of a file of a group, from Hydra's message."""
    key = re.search(r"Key '([^']*)' not in 'RunConfig'", said)
    if key is None:
        return reworded(first_line(ValueError(said)))
    if key[1] == name.partition("/")[0]:
        return "its keys are those of a whole run; begin the file with the line # @package _global_"
    return _unknown_key(key[1], "")


def _unknown_key(key: str, cause: str) -> str:
    group, _, name = key.rpartition(".")
    known = _known_keys(group)
    if key == "architecture":
        return "architecture= is spelled model= now: every model is a file of conf/model/"
    if group == "model" and name in OLD_SPELLINGS:
        return unknown_key(name, known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if group == "cost.constants" and name in counted_numbers()[0]:
        return f"{key} is a number of a software now: write +{key}=, or software.numbers.{name}= with its software="
    if name in known:
        return f"{key} is not a key of the chosen {group}; {group} files that have it: {_having(group, name)}"
    hint = f"; did you mean {group + '.' if group else ''}{near[0]}?" if near else ""
    if "Value" in cause and "not" in cause:
        return f"{key}: {cause.splitlines()[0]}"
    return f"unknown key {key!r}{hint or '.'} Keys: {', '.join(known) or 'none here'}"


def _known_keys(group: str) -> list[str]:
    if not group or group in _NESTED:
        return [f.name for f in fields(_NESTED.get(group, RunConfig))]
    return sorted({key for keys in _keys_of_options(group).values() for key in keys} - {"defaults", "_target_"})


def _having(group: str, name: str) -> str:
    return ", ".join(option for option, keys in _keys_of_options(group).items() if name in keys)


def _keys_of_options(group: str) -> dict[str, list[str]]:
    """The keys of each option of a group; those of launchers that packages bring are in Hydra's store."""
    if group == "schedule":
        return {entry.name: list(entry.options) for entry in registry.offered().values()}
    found = {path.stem: list(map(str, OmegaConf.load(path))) for path in files_of(group.replace(".", "/"))}
    if group == "hydra.launcher":
        store, folder = ConfigStore.instance(), "hydra/launcher"
        found |= {file.removesuffix(".yaml"): [*store.load(f"{folder}/{file}").node] for file in store.list(folder)}
    return found


def as_plain(value: Any) -> Any:
    """Dataclasses and containers as JSON-ready data."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    return value
