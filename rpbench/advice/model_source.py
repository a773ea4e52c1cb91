"""Model source: the architecture of a Hugging Face `config.json`, or of sizes on the command line."""

import json
import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rpbench.untrusted import parsed
from rpbench.whole_file import read_text
from rpbench.workload.architecture import LARGEST, Architecture, unknown_key
from rpbench.workload.counts import Experts, Latent
from rpbench.workload.huggingface import assumed, context_of, from_config

# Local cache: configs that Hugging Face's tools fetched earlier. Nothing is downloaded.
#
# The cache's layout is that of huggingface_hub: `models--ORG--NAME/refs/main` holds a revision, and
# `snapshots/REVISION/config.json` the file. Source: huggingface_hub's guide "Understand caching".


PREFIX = "models--"
NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")


def cache_folder() -> Path:
    """The folder of the cache, as the environment says it."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.path.expanduser("~")  # unlike Path.home, it works for a user without a home
    general = os.environ.get("XDG_CACHE_HOME") or Path(home) / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(general) / "huggingface") / "hub"


def cached_config(name: str) -> Path | None:
    """The cached `config.json` of a name such as `meta-llama/Llama-3.2-3B`; None if it was never fetched.

    The revision is that of branch `main`, or without one the only revision in the cache.
    """
    if not NAME.fullmatch(name) or ".." in name:
        return None
    folder = cache_folder() / (PREFIX + name.replace("/", "--"))
    main = folder / "refs" / "main"
    if os.path.isfile(main):
        found = [folder / "snapshots" / main.read_text(encoding="ascii", errors="replace").strip() / "config.json"]
    else:
        found = list((folder / "snapshots").glob("*/config.json"))
    return found[0] if len(found) == 1 and os.path.isfile(found[0]) else None


def cached_name(path: Path) -> str | None:
    """The name, without its organisation, of a config in such a cache; None for other files."""
    folder = path.parent.parent.parent.name
    if path.parent.parent.name != "snapshots" or not folder.startswith(PREFIX):
        return None
    return folder.removeprefix(PREFIX).rsplit("--", 1)[-1]


PARTS: Mapping[str, type] = {"experts": Experts, "latent": Latent}
_NOT_TYPED = ("name", "published_name", "batch_sequences", *PARTS)
SIZES = (
    *(each.name for each in fields(Architecture) if each.name not in _NOT_TYPED),
    *(f"{part}.{each.name}" for part, kind in PARTS.items() for each in fields(kind)),
)
REQUIRED = ("num_layers", "hidden", "heads", "vocab")
# How a model is trained, which its config.json leaves open; on the command line the first is `finetune`.
TRAINING = ("training_mode", "lora_rank", "lora_targets", "frozen_layers", "optimizer_bits")
USUAL_RANK = 16  # of adapters, where none is given; as in PEFT's own examples
EXAMPLE = "num_layers=28 hidden=3072 heads=24 key_value_heads=8 inner=8192 vocab=128256"


def config_path(source: str) -> Path | None:
    """The `config.json` that a name stands for: the file, one in that folder, or one in Hugging Face's local cache."""
    path = Path(source)
    inside = path / "config.json"
    if os.path.isfile(inside):  # unlike Path.is_file, it accepts names that are too long
        return inside
    if os.path.isfile(path) and path.suffix == ".json":
        return path
    return cached_config(source)


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a `config.json`.

    Raises ValueError if it cannot be read, or is not a complete JSON object.
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
        raise ValueError(f"model={path}: a config.json is one JSON object in braces, this is another value")
    return found


def architecture_of(path: Path) -> Architecture:
    """The architecture of a `config.json`, named after its folder or `_name_or_path`.

    Raises ValueError naming the file, and the field that is missing or not modelled.
    """
    values = read_config(path)
    place = Path(os.path.abspath(path))  # files of a cache are links to files without a model's name
    values["_name_or_path"] = _plain_name(values.get("_name_or_path") or cached_name(place) or place.parent.name)
    try:
        return from_config(values)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model={path}: {error}") from None


def context_in(path: Path) -> int | None:
    """Tokens that the model of a `config.json` has positions for; None if it does not say.

    Raises ValueError as `architecture_of`.
    """
    values = read_config(path)
    try:
        return context_of(values)
    except ValueError as error:
        raise ValueError(f"model={path}: {error}") from None


def assumed_in(path: Path) -> tuple[str, ...]:
    """What is assumed where a `config.json` says more than is modelled, a sentence each."""
    return assumed(read_config(path))


def trained(model: Architecture, given: Mapping[str, str]) -> Architecture:
    """The model with settings of its training as typed: `training_mode`, `lora_rank`, `lora_targets`, ...

    Raises ValueError as `Architecture`.
    """
    return replace(model, **_with_rank({name: typed_value(name, text) for name, text in given.items()}))


def _with_rank(values: dict[str, Any]) -> dict[str, Any]:
    if values.get("training_mode") in ("lora", "qlora"):
        values.setdefault("lora_rank", USUAL_RANK)
    return values


def model_of_sizes(given: Mapping[str, str]) -> Architecture:
    """The model of sizes as typed, such as `num_layers=28`.

    Raises ValueError for an unknown size, one that is not a number, or missing sizes.
    """
    for name in given:
        if name not in SIZES:
            raise ValueError(unknown_key(name, list(SIZES), "size of a model"))
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        raise ValueError(
            f"{', '.join(f'{name}=' for name in missing)} missing: whole numbers of at least 1, as in {EXAMPLE}"
        )
    values: dict[str, Any] = {}
    for name, text in given.items():
        part, dot, key = name.partition(".")
        if dot:
            values.setdefault(part, {})[key] = typed_value(name, text)
        else:
            values[name] = typed_value(name, text)
    # Gated maps came with rotary positions, as the same model's config.json would say.
    values.setdefault("family", "llama" if values.get("gated", True) else "gpt")
    return Architecture(f"transformer_{given['num_layers']}x{given['hidden']}", **_with_rank(values))


def typed_value(name: str, text: str) -> Any:
    """A size as typed: a whole number, a number, true or false, a word, or a list of windows or of names.

    Raises ValueError for a word where a size is needed.
    """
    if name == "windows":
        return [None if each == "null" else typed_value("", each) for each in text.strip("[]").split(",") if each]
    if name in ("lora_targets", "fused"):
        return [each.strip() for each in text.strip("[]").split(",") if each.strip()]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            value = kind(text.replace("_", ""))
        except ValueError:
            continue
        if value > LARGEST:
            raise ValueError(f"{name}={text}: at most {LARGEST:,}")
        return value
    if name in ("training_mode", "family"):
        return text
    raise ValueError(f"{name}={text}: a number")


def _plain_name(words: str) -> str:
    """A name without characters that are special in paths and command lines."""
    plain = unicodedata.normalize("NFKD", words.rsplit("/", 1)[-1]).encode("ascii", "ignore").decode()
    return "".join(letter if letter.isalnum() else "_" for letter in plain).strip("_").lower() or "model"
