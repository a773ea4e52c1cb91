"""Model source: the model of a Hugging Face `config.json`, or of sizes, as the cost model of schedules takes it."""

import json
import os
import unicodedata
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rpbench.advice.local_cache import cached_config, cached_name
from rpbench.cost.model import Family, Model
from rpbench.mesh.architecture import Architecture
from rpbench.mesh.huggingface import context_of, from_config
from rpbench.registry import unknown_name
from rpbench.strict_json import parsed
from rpbench.whole_file import read_text

FAMILIES: Mapping[str, Family] = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "gpt_oss": "gpt_oss",
    "gpt2": "gpt",
}
SIZES = {
    each.name: each.type for each in fields(Model) if each.name not in ("name", "published_name", "batch_sequences")
}
REQUIRED = ("num_layers", "hidden", "heads", "vocab")
EXAMPLE = "num_layers=28 hidden=3072 heads=24 kv_heads=8 intermediate=8192 vocab=128256"


def config_path(source: str) -> Path | None:
    """The `config.json` that a name stands for: the file, the one in that folder, or in Hugging Face's local cache.

    None if it stands for none of them.
    """
    path = Path(source)
    inside = path / "config.json"
    if inside.is_file():
        return inside
    if path.is_file() and path.suffix == ".json":
        return path
    return cached_config(source)


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a `config.json`.

    Raises:
        ValueError: if it cannot be read, or is no complete JSON object.
    """
    try:
        found = parsed(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"model={path}: line {error.lineno}: {error.msg}; the file is no complete JSON, fetch it again"
        ) from None
    except ValueError as error:
        raise ValueError(f"model={path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"model={path}: a config.json is one JSON object, this is a {type(found).__name__}")
    return found


def architecture_of(path: Path) -> Architecture:
    """The architecture of a `config.json`, named after its folder or `_name_or_path`.

    Raises:
        ValueError: naming the file, and the field that is missing or not modelled.
    """
    values = read_config(path)
    place = Path(os.path.abspath(path))  # files of a cache are links; what they point at has no name
    values["_name_or_path"] = values.get("_name_or_path") or cached_name(place) or place.parent.name
    try:
        return from_config(values)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model={path}: {error}") from None


def context_in(path: Path) -> int | None:
    """Tokens that the model of a `config.json` has positions for; None if it does not say.

    Raises:
        ValueError: as of `architecture_of`.
    """
    values = read_config(path)
    try:
        return context_of(values)
    except ValueError as error:
        raise ValueError(f"model={path}: {error}") from None


def model_of(found: Architecture, kind: str, seq_len: int) -> Model:
    """The model that schedules on one host are timed with.

    Args:
        kind: `model_type` of the config.
        seq_len: tokens of a sequence.

    Raises:
        ValueError: for what only searches over several nodes know: latent attention, layers that differ.
    """
    for has, what in (
        (found.latent is not None, "kv_lora_rank (latent attention)"),
        (found.num_dense_layers > 0, "first_k_dense_replace (first layers without experts)"),
        (found.experts is not None and found.experts.shared_inner > 0, "n_shared_experts"),
        (found.num_prediction_layers > 0, "num_nextn_predict_layers"),
    ):
        if has:
            raise ValueError(
                f"model {found.name}: {what} is not modelled on one host; ask for several nodes, as in num_devices=16 "
                "devices_per_node=8"
            )
    if kind not in FAMILIES:
        raise ValueError(
            f"model {found.name}: model_type={kind!r} is not modelled on one host, where {', '.join(FAMILIES)} are; "
            "ask for several nodes, as in num_devices=16 devices_per_node=8"
        )
    return Model(
        name=_name(found.name),
        num_layers=found.num_layers,
        hidden=found.hidden,
        heads=found.heads,
        vocab=found.vocab,
        kv_heads=found.key_value_heads,
        head_dim=found.head_dim,
        intermediate=found.experts.inner if found.experts else found.inner,
        gated_mlp=found.gated,
        experts_total=found.experts.total if found.experts else 1,
        experts_active=found.experts.active if found.experts else 1,
        tied_embedding=found.tied,
        sliding_window=_window(found, seq_len),
        seq_len=seq_len,
        qk_norm=FAMILIES[kind] == "qwen3",
        biases=found.biases,
        family=FAMILIES[kind],
        dropout=0.1 if found.dropout else 0.0,
    )


def model_of_sizes(given: Mapping[str, str]) -> Model:
    """The model of sizes as typed, such as `num_layers=28`.

    Raises:
        ValueError: for an unknown size, one that is no number, or all that are missing.
    """
    for name in given:
        if name not in SIZES:
            raise ValueError(unknown_name("size of a model", name, list(SIZES)))
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        raise ValueError(
            f"{', '.join(f'{name}=' for name in missing)} missing: whole numbers of at least 1, as in {EXAMPLE}"
        )
    values = {name: typed_value(name, text) for name, text in given.items()}
    # Gated maps came with rotary positions, as the same model's config.json would say.
    values.setdefault("family", "llama" if values.get("gated_mlp", True) else "gpt")
    return Model(f"transformer_{given['num_layers']}x{given['hidden']}", **values)


def typed_value(name: str, text: str) -> Any:
    """A size as typed: a whole number, a number, true or false, or a word.

    Raises:
        ValueError: for a word where a size is needed.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            continue
    if name in ("training_mode", "family"):
        return text
    raise ValueError(f"{name}={text}: a number")


def _name(words: str) -> str:
    """A name without what paths and command lines give a meaning to."""
    plain = unicodedata.normalize("NFKD", words.rsplit("/", 1)[-1]).encode("ascii", "ignore").decode()
    return "".join(letter if letter.isalnum() else "_" for letter in plain).strip("_").lower() or "model"


def _window(found: Architecture, seq_len: int) -> int | None:
    windows = {window for window in found.windows if window is not None and window < seq_len}
    if not windows:
        return None
    if len(windows) == 1 and found.windows[0] is not None and set(found.windows[1::2]) == {None}:
        return windows.pop()
    raise ValueError(
        f"model {found.name}: sliding_window={min(windows)} in other than every second layer is not modelled on one "
        f"host; take seq_len={min(windows)} or less"
    )
