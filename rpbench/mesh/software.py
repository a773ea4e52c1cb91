"""Software: the traits of a framework, from `conf/software/`, and the constants of its speed.

A trait is read off the framework, such as its attention and what overlaps. A constant is a number with a prior that may
be fitted on published runs: `conf/software/constants.csv`, made by `python -m analysis.predictions.clusters fit`.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from rpbench.cost.hardware.device import CONF, names, read
from rpbench.cost.hardware.measured import has_engine
from rpbench.registry import check_known, unknown_name

DEFAULT = "megatron_core"  # the software of a run that names none
Attention = Literal["unfused", "flash1", "flash2", "flash3"]
Kernels = Literal["tiled", "eager", "fused", "engine"]


class Prior(NamedTuple):
    """A constant before anything is fitted: its value, and one standard deviation of its logarithm."""

    value: float
    log_sd: float
    meaning: str


PRIORS: Mapping[str, Prior] = {
    "matmul": Prior(1.0, 0.10, "rate of products over that of the device's file"),
    "matmul_low": Prior(1.0, 0.12, "the same in 8 or 4 bits"),
    "attention": Prior(1.0, 0.25, "rate of fused attention over that of the device's file"),
    "elementwise": Prior(1.0, 0.30, "seconds of element-wise work over bytes / bandwidth"),
    "loss": Prior(1.0, 0.30, "seconds of the loss over bytes / bandwidth"),
    "narrow": Prior(100.0, 0.70, "min(m, n) at which a product reaches half its rate"),
    "shallow": Prior(80.0, 0.50, "k at which a product reaches half its rate"),
    "tokens": Prior(300.0, 0.8, "tokens of a microbatch at which a layer's products reach half their rate"),
    "layer_s": Prior(1.0e-4, 1.0, "seconds a layer loses on every way through it: synchronisation with the host"),
    "again": Prior(1.0, 0.15, "seconds of full recomputation over what the framework's file says"),
    "head_alignment": Prior(3.0, 0.30, "power of the alignment of the head size in unfused attention"),
    "intra": Prior(0.75, 0.20, "share of the fast links that collectives reach"),
    "inter": Prior(0.80, 0.40, "share of the network that collectives reach"),
    "launch_s": Prior(4.5e-6, 0.70, "seconds of a kernel's launch: the least a kernel takes"),
    "microbatch_s": Prior(5.0e-4, 1.0, "seconds a stage loses with every microbatch"),
    "step_s": Prior(0.02, 1.0, "seconds of a step beside its computation: norm, logging, data"),
    "optimizer_bytes": Prior(30.0, 0.30, "bytes the optimizer moves for a parameter it owns"),
    "jitter": Prior(0.01, 0.80, "loss for each doubling of nodes"),
    "beside": Prior(0.05, 0.50, "loss of kernels that run beside a collective"),
    "dispatch_s": Prior(5.0e-4, 1.0, "host seconds of an expert layer, one way"),
    "grouped": Prior(0.85, 0.20, "rate of grouped products of experts over plain ones"),
    "imbalance": Prior(1.1, 0.15, "tokens of the busiest expert's device over the mean"),
    "broadcast_s": Prior(1.0e-5, 1.0, "seconds of a step when owners broadcast in turn beyond their node"),
    "hop_s": Prior(1.0e-6, 1.0, "the same for each further node: hops of all their broadcasts' rings"),
    "session": Prior(1.0, 0.10, "seconds of the earlier sessions over the later ones"),
}


@dataclass(frozen=True)
class Software:
    """Traits of a framework, and its constants; ValueError for a constant that is not known or not above 0."""

    name: str
    # how kernels are counted: `tiled` by tiles and waves of each product (`rpbench.mesh.layers.layer_seconds`), `eager`
    # and `fused` by FLOPs and bytes (`eager_kernels`), `engine` by the same and a calibration of this project's own
    # engine (`engine_kernels`)
    kernels: Kernels = "tiled"
    attention: Attention = "flash2"  # generation of the attention kernels
    passes: float = 14.0  # 16-bit passes over the hidden state of one layer's forward (element-wise kernels)
    loss_bytes: float = 14.0  # bytes moved for a logit, forward and backward together
    recompute: float = 1.0  # seconds of full recomputation over those of a forward
    gradient_bytes: int = 4  # of a gradient when it is reduced over replicas
    accumulate_bytes: int = 4  # of a gradient between microbatches
    blocking_hops: bool = False  # whether a stage waits for its neighbours' transfers
    # hidden_tensor, hidden_expert: fractions of these collectives that computation hides
    hidden_tensor: float = 0.0
    hidden_expert: float = 0.0
    # gradients_beside, parameters_beside: whether data parallelism's collectives run beside computation
    gradients_beside: bool = True
    parameters_beside: bool = True
    reduce_volumes: int = 2  # tensor sizes sent in a step; 3 if gradients are all-reduced and parameters then gathered
    zigzag: bool = True  # whether context parallelism balances causal attention
    deduplicates: bool = False  # whether a token is sent once to a node, however many of its experts live there
    pad_vocab: int = 128  # rows of the vocabulary on each tensor shard are a multiple of this
    split_penalty: float = 1.03  # seconds of the kernels of a split backward over those of a whole one
    softmax_passes: float = 6.0  # passes over the scores of unfused attention, forward
    dispatch_bytes: int = 2  # of a value that is sent to an expert
    # scale, reserve_bytes, logit_bytes: memory: tensors x scale + reserve; bytes kept for a logit
    scale: float = 1.0
    reserve_bytes: float = 0.0
    logit_bytes: float = 8.0
    optimizer_bytes: float = 12.0  # state of a parameter: 12 for Adam with a master copy
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)  # see `PRIORS`
    source: str = ""
    # for kernels that are not tiled (`rpbench.cost.hardware.basis`); `declared` has the origin of each
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        for name, known in (("kernels", get_args(Kernels)), ("attention", get_args(Attention))):
            check_known(name, getattr(self, name), known)
        for name, value in self.constants.items():
            if name not in PRIORS:
                raise ValueError(f"software.{self.name}: {unknown_name('constant', name, list(PRIORS))}")
            if not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"software.{self.name}.{name}={value!r}: constants are above 0")
        values = {name: self.constants.get(name, prior.value) for name, prior in PRIORS.items()}
        object.__setattr__(self, "constants", values)

    def with_constants(self, values: Mapping[str, float]) -> "Software":
        return replace(self, constants={**self.constants, **values})


def usual_software(measured: Iterable[str]) -> Software:
    """The software of a run that names none: our engine if the machine's `measured` constants include it."""
    return software("engine" if has_engine(measured) else DEFAULT)


@cache
def software(name: str) -> Software:
    """The framework of `conf/software/<name>.yaml`, constants fitted; ValueError for an unknown name or field."""
    check_known("software", name, names("software"))
    return declared_software(name).with_constants(fitted(name))


def software_of(values: Mapping[str, Any]) -> Software:
    """The framework of a file's keys, which win over fitted constants; ValueError for wrong fields or values."""
    _check_traits(values)
    name = str(values["name"])
    own = read(CONF / "software" / f"{name}.yaml").get("constants", {}) if name in names("software") else {}
    changed = {key: value for key, value in (values.get("constants") or {}).items() if own.get(key) != value}
    return Software(**{**values, "constants": {**own, **fitted(name), **changed}})


def _check_traits(values: Mapping[str, Any]) -> None:
    """Refuse unknown names, and values of another kind than their field's default."""
    known = [each.name for each in fields(Software)]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"software: {unknown_name('trait', unknown[0], known)}")
    usual = {each.name: each.default for each in fields(Software) if each.default is not MISSING}
    for name, value in values.items():
        default, number = usual.get(name), isinstance(value, int | float) and not isinstance(value, bool)
        if name in ("constants", "numbers", "declared"):
            is_one, rule = isinstance(value, Mapping), "names with their values, {} for none"
        elif isinstance(default, bool):
            is_one, rule = isinstance(value, bool), "true or false"
        elif isinstance(default, int):
            is_one, rule = isinstance(value, int) and number and value >= 1, "a whole number of at least 1"
        elif isinstance(default, float):
            is_one, rule = number and value >= 0, "a number of at least 0"
        else:
            is_one, rule = isinstance(value, str), "text"
        if not is_one:
            raise ValueError(f"software.{name}={value!r:.80}: {rule}; a line that is left out has its usual value")


def declared_software(name: str) -> Software:
    """The framework without fitted constants; ValueError for an unknown field."""
    values = read(CONF / "software" / f"{name}.yaml")
    _check_traits(values)
    return Software(**values)


def fitted(name: str) -> dict[str, float]:
    """Constants that were fitted for a framework."""
    path = CONF / "software" / "constants.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["constant"]: float(row["value"]) for row in csv.DictReader(file) if row["software"] == name}
