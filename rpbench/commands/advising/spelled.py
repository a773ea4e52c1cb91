"""Models and machines spelled as words of a command line, key by key over an option that is there."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from rpbench.cost.hardware.machine import Machine, machine
from rpbench.places import file_of
from rpbench.workload.architecture import Architecture, model_keys


def _values(given: Machine) -> dict[str, Any]:
    return {each.name: getattr(given, each.name) for each in fields(given) if each.name != "ssd"}  # a row says it


def spelled_model(given: Architecture) -> str:
    """A model's keys: what differs from `model=transformer`."""
    file = file_of("model", "transformer")
    usual = {each.name: each.default for each in fields(given)} | (dict(model_keys(file)) if file else {})
    changed = {key: value for key, value in asdict(given).items() if value not in (usual[key], ())}
    return spelled("model", "transformer", changed)


def spelled_machine(given: Machine) -> str:
    """A machine's keys: what differs from so many devices of its kind where they usually stand."""
    if given.gpu is None:
        return spelled("cluster", "local", _values(given))
    base = f"{given.size}x_{given.gpu.name}"
    usual = _values(machine(base))
    changed = {key: value for key, value in _values(given).items() if value != usual[key] and key != "gpu"}
    return spelled("cluster", base, changed)


def spelled(group: str, base: str, values: Mapping[str, Any]) -> str:
    """A group's keys one by one, over an option that is there; where numbers come from is left out."""
    words = [word for key, value in values.items() if key != "declared" for word in _words(f"{group}.{key}", value)]
    return " ".join([f"{group}={base}", *words])


def _words(key: str, value: Any) -> list[str]:
    """Words of a command line that set a key; none for what is not there."""
    if isinstance(value, Mapping):
        return [word for name, each in value.items() for word in _words(f"{key}.{name}", each)]
    if isinstance(value, tuple):
        return [shlex.quote(f"++{key}=[{','.join('null' if each is None else str(each) for each in value)}]")]
    if isinstance(value, str) and not re.fullmatch(r"\w+", value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return [] if value is None else [shlex.quote(f"++{key}={value}")]
