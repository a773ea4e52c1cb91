"""Typed choices: the keys of each group of `conf/`, one dataclass a group."""

import copy
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from rpbench.config.errors import ConfigError, reworded
from rpbench.registry import unknown_name

T = TypeVar("T")

# Prefix of a group's keys on the command line, by dataclass.
_PREFIXES = {
    "CostConfig": "cost.",
    "WorkloadConfig": "workload.",
    "BackendConfig": "backend.",
    "OptimizerConfig": "optimizer.",
    "TrackerConfig": "tracker.",
    **dict.fromkeys(("Simulate", "Train", "Predict", "Roofline", "Duel", "TorchDuel", "GpuDuel", "Failures"), "mode."),
}


def typed(schema: type[T], node: DictConfig | dict[str, Any]) -> T:
    """The dataclass of a config node; ConfigError for an unknown key or a value of another type.

    Plain data are cached: cells of a sweep share most groups.
    """
    if isinstance(node, DictConfig):
        return _typed(schema, node)
    key = schema, json.dumps(node, default=repr)
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = _typed(schema, node)
    return copy.deepcopy(_known[key])


_known: dict[tuple[type, str], Any] = {}
_MOST_KNOWN = 1000


def _typed(schema: type[T], node: DictConfig | dict[str, Any]) -> T:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), node)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        prefix = _PREFIXES.get(schema.__name__, "")
        if isinstance(error, ConfigKeyError):
            known = [f"{prefix}{key}" for key in OmegaConf.structured(schema)]
            raise ConfigError(unknown_name("key", f"{prefix}{error.key}", known)) from None
        if isinstance(error, MissingMandatoryValue):
            raise ConfigError(f"{prefix}{error.key}: it needs a value, and ~ has taken it out") from None
        words = [f"{prefix}{key!s}={'null' if value is None else value}" for key, value in node.items()]
        raise ConfigError(reworded(prefix + first_line(error), words)) from None
    except OverflowError:  # a whole number of hundreds of digits in the place of a float
        numbers = ((str(key), value) for key, value in node.items() if isinstance(value, int))
        key, text = next((key, str(value)) for key, value in numbers if abs(value) > sys.float_info.max)
        given = f"{_PREFIXES.get(schema.__name__, '')}{key}={text[:40]}... ({len(text)} digits)"
        raise ConfigError(f"{given}: a finite number, up to 1.8e308") from None


def first_line(error: BaseException) -> str:
    """The first line of an error of omegaconf or Hydra, behind the key that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    return f"{key}: {lines[0]}" if key else (lines[0] if lines else type(error).__name__)


def check(settings: object, prefix: str, rule: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Refuse the first of these settings whose value is against the rule; None is no value."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not holds(value):
            raise ConfigError(f"{prefix}{name}={value}: {rule}")


def at_least_one(settings: object, prefix: str, *names: str) -> None:
    check(settings, prefix, "a whole number of at least 1", lambda value: not value < 1, *names)


def is_above_zero(value: float) -> bool:
    return value > 0


def is_fraction(value: float) -> bool:
    return 0 <= value <= 1


COSTS = ["unit", "constant", "published", "analytic", "profiled"]  # a user's own file is one of them with other values
# Keys of cost that some of them read, and the others would ignore.
OF_COSTS = {
    **dict.fromkeys(
        ("forward_ms", "input_grad_ms", "weight_grad_ms", "recompute_ms", "hop_ms", "head_share"), ("constant",)
    ),
    "split_backward": ("published", "profiled"),
    **dict.fromkeys(("profile", "microbatches_per_device"), ("profiled",)),
    "declared": ("analytic",),
}
BACKENDS = ["virtual", "cpu", "device", "emulated", "torch"]
OF_BACKENDS = {
    "recompute_grain": ("virtual", "cpu", "device"),
    "device_memory_bytes": ("virtual", "cpu", "device"),
    "num_warmup_runs": ("cpu", "device", "torch"),
    "paced_links": ("cpu",),
    "time_scale": ("emulated",),
    "dry_accelerators": ("device",),
    **dict.fromkeys(("device", "data_parallel", "data_mode", "tensor_parallel", "stall_s"), ("torch",)),
}


def _check_owners(settings: Any, group: str, owners: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys that the chosen option of a group would ignore."""
    usual = {each.name: each.default for each in fields(settings)}
    for key, names in owners.items():
        if settings.name not in (MISSING, *names) and (value := getattr(settings, key)) not in (usual[key], {}):
            raise ConfigError(
                f"{group}.{key}={value} with {group}={settings.name}: a key of {group}={' and '.join(names)}; leave "
                "one of both out"
            )


@dataclass
class CostConfig:
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
    split_penalty: float = 1.0
    max_freeze_ratio: float = 0.0
    profile: str | None = None
    microbatches_per_device: int = 3
    constants: dict[str, Any] = field(default_factory=dict)
    declared: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in (MISSING, *COSTS):
            raise ConfigError(unknown_name("cost.name", self.name, COSTS))
        check(self, "cost.", "a fraction, from 0 (nothing is hidden) to 1 (all is)", is_fraction, "overlap_gain")
        halves = "kernels of two halves over those of one backward; at least 1"
        check(self, "cost.", halves, lambda value: math.isfinite(value) and value >= 1, "split_penalty")
        ratio = "a mean ratio of a stage, from 0 (all weight gradients are made) to 1 (none is)"
        check(self, "cost.", ratio, is_fraction, "max_freeze_ratio")
        at_least_one(self, "cost.", "microbatches_per_device")
        _check_owners(self, "cost", OF_COSTS)


@dataclass
class WorkloadConfig:
    """Any of `conf/workload/`: the sequences of a microbatch, and where their tokens come from."""

    name: str = MISSING
    microbatch_sequences: int = 4
    path: str | None = None  # of `name=text`: any file
    text: str | None = None  # a file of `rpbench/models/text`, without its suffix
    held_out: float = 0.0  # fraction of the text, at its end, for validation
    validate_every: int = 50  # batches between two validations
    lengths: Any = None  # tokens of every sequence of a step, where they differ: a list of numbers, or a file of them

    def __post_init__(self) -> None:
        at_least_one(self, "workload.", "microbatch_sequences", "validate_every")
        check(self, "workload.", "a share of the text, from 0 to below 1", lambda value: 0 <= value < 1, "held_out")

    @property
    def by_microbatch(self) -> tuple[tuple[int, ...], ...]:
        """Lengths of the sequences of each microbatch of a step; empty where all are the same."""
        given, size = self.lengths or (), self.microbatch_sequences
        return tuple(tuple(given[first : first + size]) for first in range(0, len(given), size))

    @property
    def microbatch_tokens(self) -> tuple[int, ...]:
        """Tokens of each microbatch of a step; empty where all are the same."""
        return tuple(map(sum, self.by_microbatch))


@dataclass
class BackendConfig:
    """Any of `conf/backend/`: what executes a schedule in mode train."""

    name: str = MISSING
    recompute_grain: str = "stage"
    device_memory_bytes: int | None = None
    num_warmup_runs: int = 0
    time_scale: float = 1.0
    paced_links: bool = False
    device: str = "cpu"
    data_parallel: int = 1
    data_mode: str = "plain"
    tensor_parallel: int = 1
    stall_s: float = 40.0
    dry_accelerators: int | None = None

    def __post_init__(self) -> None:
        if self.name not in (MISSING, *BACKENDS):
            raise ConfigError(unknown_name("backend.name", self.name, BACKENDS))
        check(self, "backend.", "a factor above 0; 1 is real time", is_above_zero, "time_scale")
        check(self, "backend.", "seconds above 0", is_above_zero, "stall_s")
        runs = "a whole number from 0 to 1,000"
        check(self, "backend.", runs, lambda value: 0 <= value <= 1000, "num_warmup_runs")
        at_least_one(self, "backend.", "device_memory_bytes", "data_parallel", "tensor_parallel")
        made_up = "how many to make up, 1 or more; null for real ones"
        check(self, "backend.", made_up, lambda value: value >= 1, "dry_accelerators")
        _check_owners(self, "backend", OF_BACKENDS)


@dataclass
class OptimizerConfig:
    name: str = MISSING
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    momentum: float = 0.0
    num_warmup_steps: int = 0
    clip_norm: float | None = None
    loss_scale: float = 65536.0
    loss_scale_growth_steps: int = 2000

    def __post_init__(self) -> None:
        rates = ("learning_rate", "weight_decay", "momentum")
        check(self, "optimizer.", "a finite number", math.isfinite, *rates, "loss_scale")
        check(self, "optimizer.", "a number of at least 0", lambda value: value >= 0, *rates, "num_warmup_steps")
        above_0 = ("clip_norm", "loss_scale")
        check(self, "optimizer.", "a number above 0", lambda value: value > 0 and math.isfinite(value), *above_0)
        at_least_one(self, "optimizer.", "loss_scale_growth_steps")


@dataclass
class TrackerConfig:
    name: str = MISSING
    project: str = "rpbench"
    group: str | None = None
    init_timeout_s: float = 10.0


@dataclass
class CheckpointConfig:
    """Folders: where to save the state after the last step, and where to resume from."""

    save_to: str | None = None
    resume_from: str | None = None


@dataclass
class Simulate:
    """`mode=simulate`: times of a schedule from given costs, without tensors."""

    name: str = "simulate"


@dataclass
class Train:
    """`mode=train`: the schedule runs on the engine, on a backend."""

    name: str = "train"


@dataclass
class Predict:
    """`mode=predict`: a whole system on a machine, by default with the sizes of its published scripts."""

    name: str = "predict"
    system: str | None = None
    sequences: int | None = None
    microbatches: int | None = None
    by_action: bool = False


@dataclass
class Roofline:
    """`mode=roofline`: closed forms. `convention`: how FLOPs are counted (`rpbench.workload.counts`)."""

    name: str = "roofline"
    convention: str = "artifact"


@dataclass
class Duel:
    """`mode=duel`: every contender in real time on this machine."""

    name: str = "duel"
    contenders: str = "all"
    num_starts: int = 2
    budget_s: float = 720.0
    half_width: float = 0.02
    search_budget: int = 400
    run_off_s: float = 480.0
    plans: str | None = None
    recompute: str = "except_last"
    parity_seq_len: int = 16
    timeout_s: float = 120.0
    calibrate: bool = True

    def __post_init__(self) -> None:
        at_least_one(self, "mode.", "num_starts", "search_budget", "parity_seq_len")
        check(self, "mode.", "a number above 0", lambda value: not value <= 0, "budget_s", "half_width", "run_off_s")
        check(self, "mode.", "all or except_last", ("all", "except_last").__contains__, "recompute")


@dataclass
class Turns:
    """Keys common to duels without plans of their own."""

    num_starts: int = 2
    budget_s: float = 122.0
    half_width: float = 0.02
    parity_seq_len: int = 16
    stall_s: float = 40.0

    def __post_init__(self) -> None:
        at_least_one(self, "mode.", "num_starts", "parity_seq_len")
        check(self, "mode.", "a number above 0", lambda value: not value <= 0, "budget_s", "half_width", "stall_s")


@dataclass
class TorchDuel(Turns):
    """`mode=torch_duel`: torch's runtime with our table, torch's own schedules and our threads, in real time."""

    name: str = "torch_duel"
    schedules: list[str] = field(default_factory=lambda: ["1f1b", "zb_v"])


@dataclass
class GpuDuel(Turns):
    """`mode=gpu_duel`: a schedule of ours, FSDP2, DeepSpeed and the released library on accelerators, in real time."""

    name: str = "gpu_duel"


POLICIES = ("checkpoint", "gemini", "recycle", "bamboo", "varuna")


@dataclass
class Failures:
    """`mode=failures`: the cost of ranks that die in a run, under a policy."""

    name: str = "failures"
    policy: str = "checkpoint"
    run: str = "simulated"
    failures: Any = field(default_factory=list)  # pairs of a rank and a second
    mean_between_s: float | None = None
    horizon_s: float | None = None
    horizon_steps: int = 100
    pipelines: int = 1
    checkpoint_every: int = 10
    copies: int = 2
    dies: str = "machine"
    detect_s: float = 0.0
    restart_s: float = 0.0
    store_bytes_per_s: float | None = None
    net_bytes_per_s: float | None = None
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.failures, list):
            given = "null" if self.failures is None else self.failures
            raise ConfigError(
                f"mode.failures={given}: a list of ranks and seconds, as in [[1,30.5]]; mode.mean_between_s=SECONDS "
                "draws them, each rank living so long on average"
            )
        at_least_one(self, "mode.", "horizon_steps", "pipelines", "checkpoint_every", "copies")
        known_words = {"policy": POLICIES, "run": ("simulated", "processes"), "dies": ("machine", "process")}
        for name, known in known_words.items():
            check(self, "mode.", f"one of {', '.join(known)}", known.__contains__, name)
        check(self, "mode.", "seconds above 0", is_above_zero, "stall_s")


AnyDuel = Duel | TorchDuel | GpuDuel
Mode = Simulate | Train | Predict | Roofline | Duel | TorchDuel | GpuDuel | Failures
MODES: dict[str, type[Mode]] = {mode.name: mode for mode in get_args(Mode)}
