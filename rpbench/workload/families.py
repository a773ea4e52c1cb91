"""Families: properties of the model types of Hugging Face besides their sizes, from `families.yaml`.

Source: the modules and the usual values of the configuration classes in `transformers` 5;
`tests/workload/test_families.py` builds every type and counts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rpbench.yaml_file import read_keys

QKV = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EVERY = (*QKV, "o_proj", *MLP)
_MAPS = {"qkv": QKV, "qkvo": (*QKV, "o_proj"), "mlp": MLP, "every": EVERY}


@dataclass(frozen=True)
class Family:
    """The properties of a Hugging Face model type."""

    modules: Literal["gpt", "llama", "qwen3", "gpt_oss"] = "llama"  # our modules' activation and norms for it
    # fields that a `config.json` may leave out, as the configuration class sets them
    usual: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = True  # three matrices in an MLP, whatever its activation is
    norms: int = 2  # norms of a layer over its hidden values; the final one stands in `end_norms`
    norm_values: int = 1  # values that a norm has for each channel: 1, a scale; 2, with a bias; 0, none
    # which linear maps have one, and the field that switches them on; None: always
    biases: tuple[tuple[tuple[str, ...], str | None], ...] = ()
    head_bias: str | bool = False  # the same of the output matrix; False: never
    # norms of queries and keys, for a head or for all together, and the field that switches them on
    query_key_norms: tuple[Literal["head", "all"], str | None] | None = None
    fused: tuple[str, ...] = ()  # linear maps that are one, as an adapter sees them
    sinks: bool = False  # one number a head
    shared_gate: bool = False  # one map from hidden to a number, which weighs the shared experts
    positions: int | None = None  # learned positions beside those that sequences have; None: none are learned
    end_norms: int = 1  # norms at both ends of the model
    # where a window is given, one of this many layers sees all keys; 1: none does; 0: windows are off
    window_period: int = 0
    encoder: bool = False  # every token sees all others
    # sizes that the configuration class sets where a file has no such field
    left_out: Mapping[str, int] = field(default_factory=dict)


class Known(NamedTuple):
    """The contents of `families.yaml`."""

    families: Mapping[str, Family]  # by model type
    unknown: Family  # what a type that is not there is read as
    spellings: Mapping[str, str]  # a field's name in some families -> the name used here
    same_as: Mapping[str, str]  # a type -> the one that it is read as
    # read, silent: names of fields that are read, and of those that change neither bytes nor the time of a step
    read: re.Pattern[str]
    silent: re.Pattern[str]
    assumed: Mapping[str, str]  # a field that is not modelled -> the assumption made instead


@cache
def known() -> Known:
    """The contents of `families.yaml`, read at the first call."""
    found = read_keys(Path(__file__).with_suffix(".yaml"))
    spellings = {own: name for name, others in found["spellings"].items() for own in others}
    read, silent = (re.compile(found[name], re.VERBOSE) for name in ("read", "silent"))
    families = {name: _family(row) for name, row in found["families"].items()}
    return Known(families, _family(found["unknown"]), spellings, found["same_as"], read, silent, found["assumed"])


def _family(row: Mapping[str, Any]) -> Family:
    biases = tuple((_MAPS.get(maps, tuple(maps.split())), switch) for maps, switch in row.get("biases", {}).items())
    return Family(**{**row, "biases": biases})
