"""Architecture: a decoder-only transformer, layer by layer, and how it is trained."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

from rpbench.places import CONF
from rpbench.registry import check_known, unknown_name
from rpbench.untrusted import is_finite
from rpbench.workload.counts import FUSED, Counts, Experts, Family, Latent

FAMILIES: tuple[Family, ...] = get_args(Family)

LARGEST = 10**9  # larger sizes are typing errors, and sums of them leave 64 bits
MOST_LAYERS = 1000  # of DeepNet, the deepest transformer that was trained (Wang et al., arXiv 2203.00555)
OLD_SPELLINGS: Mapping[str, str] = {
    "kv_heads": "key_value_heads",
    "intermediate": "inner (of one expert: experts.inner)",
    "gated_mlp": "gated",
    "tied_embedding": "tied",
    "experts_total": "experts.total",
    "experts_active": "experts.active",
    "sliding_window": "windows, a list in turn over the layers, such as [128,null]",
}

_SIZES = ("num_layers", "hidden", "heads", "vocab", "seq_len")
_OPTIONAL_SIZES = ("key_value_heads", "head_dim", "inner", "lora_rank", "context", "batch_sequences")
_OPTIONAL_COUNTS = ("layer_vectors", "end_vectors")
_COUNTS = ("num_dense_layers", "learned_positions", "num_prediction_layers", "attention_gate", "frozen_layers")
_PARTS: Mapping[str, type] = {"experts": Experts, "latent": Latent}


@dataclass(frozen=True)
class Architecture(Counts):
    """The shape of a transformer, and how it is trained; `Counts` has the fields, this class checks them.

    ValueError for a size below 1, heads that do not divide, an unknown family, a number out of its range, or options
    that contradict each other.
    """

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            if isinstance(given := getattr(self, name), Mapping):
                object.__setattr__(self, name, _part(name, kind, given))
        object.__setattr__(self, "windows", _windows(self.windows))
        object.__setattr__(self, "lora_targets", _names("lora_targets", self.lora_targets, "[q_proj,v_proj]"))
        object.__setattr__(self, "fused", _names("fused", self.fused, "[qkv_proj]"))
        _check_sizes(self)
        _check_numbers(self)
        derived = {"key_value_heads": self.heads, "head_dim": _head_dim(self), "inner": 4 * self.hidden}
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check_options(self)


def why_not_built(model: Architecture) -> str:
    """Why the modules of this project cannot build a model; empty if its shape is one of theirs."""
    parts = {
        "latent attention": model.latent is not None,
        "shared experts": bool(model.experts and model.experts.shared_inner),
        "first layers without experts": bool(model.experts and model.num_dense_layers),
        "learned positions": model.learned_positions > 0,
        "layers that predict further tokens": model.num_prediction_layers > 0,
        "gates or linear maps of their own in attention": model.attention_gate > 0,
        "adapters beside some of its linear maps": bool(model.lora_targets),
        "weights in 4 bits": model.training_mode == "qlora",
    }
    if missing := [part for part, has in parts.items() if has]:
        return (
            f"model {model.name} has {' and '.join(missing)}, which the modules of this project cannot build; it is "
            "simulated and planned, and trained by none of its backends"
        )
    if model.head_dim % 2:
        return f"model.head_dim={model.head_dim}: rotary positions need an even number of values a head"
    return ""


@cache
def architecture(name: str) -> Architecture:
    """The architecture of `conf/model/<name>.yaml`; ValueError for an unknown name, with the nearest."""
    path = CONF / "model" / f"{name}.yaml"
    check_known("model", name, sorted(each.stem for each in path.parent.glob("*.yaml") if each.stem != "abstract"))
    return Architecture(**model_keys(path))


def model_keys(path: Path) -> dict[str, Any]:
    """The keys of a model's file, over those of the files that its `defaults` name."""
    from rpbench.yaml_file import read_keys  # the browser's page of schedules has no YAML

    own = read_keys(path)
    others = [each for each in own.pop("defaults", ()) if each != "_self_"]
    found: dict[str, Any] = {}
    for each in others:
        found |= model_keys(path.with_name(f"{each}.yaml"))
    return found | own


def unknown_key(key: str, known: list[str], what: str = "key of model") -> str:
    """The error for an unknown key: its new spelling if it was renamed, or the nearest key."""
    if key in OLD_SPELLINGS:
        return f"{what} {key!r} is spelled {OLD_SPELLINGS[key]} now"
    return unknown_name(what, key, known)


def _part(name: str, kind: type, given: Mapping[str, Any]) -> Any:
    known = [each.name for each in fields(kind)]
    for key in given:
        check_known(f"key of model.{name}", key, known)
    missing = [each.name for each in fields(kind) if each.name not in given and each.default is MISSING]
    if missing:
        raise ValueError(f"model.{name} has no {', '.join(missing)}; it takes {', '.join(known)}")
    return kind(**given)


def _windows(given: Any) -> tuple[int | None, ...]:
    found = () if given is None else given
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
        raise ValueError(f"model.windows={given!r:.60}: a list in turn over the layers, such as [128,null]")
    for each in (found := tuple(found)):
        if each is not None and (type(each) is not int or each < 1):
            raise ValueError(f"model.windows has {each!r:.60}: a window is a whole number of at least 1, or null")
    return found


def _names(key: str, given: Any, example: str) -> tuple[str, ...]:
    found = given.split(",") if isinstance(given, str) else given or ()
    if isinstance(found, Mapping) or not hasattr(found, "__iter__") or not all(isinstance(x, str) for x in found):
        raise ValueError(f"model.{key}={given!r:.60}: names of linear maps, such as {example}")
    return () if tuple(found) == ("all",) else tuple(found)


def _check_sizes(model: Architecture) -> None:
    optional = _OPTIONAL_SIZES + _OPTIONAL_COUNTS
    for name in _SIZES + optional + _COUNTS:
        value = getattr(model, name)
        if value is None and name in optional:
            continue
        least = 0 if name in _COUNTS + _OPTIONAL_COUNTS else 1
        if type(value) is not int or value < least:
            way_out = ", or null to leave it out" if name in optional else ""
            raise ValueError(f"model.{name}={value!r:.60}: a size is a whole number of at least {least}{way_out}")
        if value > LARGEST:
            raise ValueError(f"model.{name}={value!r:.60}: at most {LARGEST:,}; no model has more")
    if model.num_layers > MOST_LAYERS:
        raise ValueError(f"model.num_layers={model.num_layers}: at most {MOST_LAYERS:,}; the deepest that was trained")


def _check_numbers(model: Architecture) -> None:
    rules = {
        "rope_theta": ("a finite number above 1, e.g. 10000", lambda x: x > 1),
        "norm_eps": ("a finite number above 0, e.g. 1e-5", lambda x: x > 0),
        "dropout": ("a share of at least 0 and below 1, e.g. 0.1", lambda x: 0 <= x < 1),
    }
    for name, (rule, holds) in rules.items():
        value = getattr(model, name)
        if not is_finite(value) or not holds(value):
            raise ValueError(f"model.{name}={value!r}: {rule}")


def _head_dim(model: Architecture) -> int:
    given: int | None = model.head_dim
    if given is None and model.latent is None and model.hidden % model.heads:
        raise ValueError(
            f"model.heads={model.heads} does not divide model.hidden={model.hidden}; "
            "give the width of a head as well: model.head_dim"
        )
    return given or model.hidden // model.heads


def _check_options(model: Architecture) -> None:
    if model.heads % model.key_value_heads:
        raise ValueError(
            f"model.key_value_heads={model.key_value_heads} does not divide model.heads={model.heads}; "
            f"every key head serves equally many query heads; try model.key_value_heads={model.heads}"
        )
    if model.num_dense_layers > model.num_layers:
        raise ValueError(f"model.num_dense_layers={model.num_dense_layers} of model.num_layers={model.num_layers}")
    if model.context is not None and model.seq_len > model.context:
        raise ValueError(
            f"model.seq_len={model.seq_len}: {model.name} has positions for {model.context} tokens; "
            "take shorter sequences, or lift the limit with model.context=null"
        )
    if model.family not in FAMILIES:
        raise ValueError(f"model.family={model.family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    for name in model.fused:
        check_known("name in model.fused", name, FUSED)
    if model.frozen_layers > model.num_layers:
        raise ValueError(
            f"model.frozen_layers={model.frozen_layers} of model.num_layers={model.num_layers}: freeze as many at most"
        )
    if model.optimizer_bits not in (8, 32):
        raise ValueError(f"model.optimizer_bits={model.optimizer_bits!r:.60}: Adam's moments have 8 or 32 bits")
    _check_adapters(model)


def _check_adapters(model: Architecture) -> None:
    if model.training_mode not in ("full", "lora", "qlora"):
        raise ValueError(f"model.training_mode={model.training_mode!r} is unknown; choose full, lora or qlora")
    if (model.training_mode == "full") != (model.lora_rank is None):
        raise ValueError(
            f"model.training_mode={model.training_mode} with model.lora_rank={model.lora_rank}: "
            "lora needs a rank, full takes none; set both, e.g. training_mode=lora lora_rank=32 (advise: finetune=lora)"
        )
    if model.lora_rank is not None and model.frozen_layers:
        raise ValueError(
            f"model.frozen_layers={model.frozen_layers} with adapters, beside which all is frozen: leave it out"
        )
    maps = [each for routed in model.kinds for each in model.linear_maps(routed)]
    known = list(dict.fromkeys(["all", "attention", "mlp", *(each.name for each in maps)]))
    for name in model.lora_targets:
        if model.lora_rank is None:
            way_out = "set training_mode=lora (advise: finetune=lora) and lora_rank too"
            raise ValueError(f"model.lora_targets without adapters: {way_out}")
        check_known("name in model.lora_targets", name, known)
    # A router has as many outputs as there are experts, often fewer than a usual rank.
    beside = [each for each in maps if model.adapted(each) and each.part != "router"]
    least, name = min(((min(each.inputs, each.outputs), each.name) for each in beside), default=(LARGEST, ""))
    if model.lora_rank is not None and model.lora_rank > least:
        raise ValueError(
            f"model.lora_rank={model.lora_rank}: an adapter is thinner than the map beside it, and {name} is {least} "
            f"wide; take at most {least}"
        )
