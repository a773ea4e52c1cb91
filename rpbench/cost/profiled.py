"""Profiled costs: measured layer times as a file, for plans and simulations later."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rpbench.cost.table import OF_LAYERS, LayerTimes
from rpbench.untrusted import parsed
from rpbench.whole_file import read_text

SCHEMA = "rpbench-profile 1"
_PER_LAYER = (*OF_LAYERS, "step")
_LISTS = (*_PER_LAYER, "speeds", "shards", "shards_along")


def to_text(times: LayerTimes) -> str:
    """The times as JSON; `from_text` reads them back exactly."""
    numbers = {name: value for name, value in asdict(times).items() if not isinstance(value, str)}
    return json.dumps({"schema": SCHEMA, **numbers}, indent=1) + "\n"


def from_text(source: str) -> LayerTimes:
    """The times in a text of `to_text`; ValueError for another text."""
    try:
        found: dict[str, Any] = parsed(source)
        if found.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        times: dict[str, Any] = {key: tuple(own) if isinstance(own, list) else own for key, own in found.items()}
        for key, value in times.items():
            is_list, cells = key in _LISTS, value if isinstance(value, tuple) else (value,)
            if isinstance(value, tuple) != is_list or not all(type(cell) in (int, float) for cell in cells):
                raise ValueError(f"{key}={value!r:.80}: {'a list of numbers' if is_list else 'a number'}")
        lengths = {key: len(times[key]) for key in _PER_LAYER if times.get(key)}
        if len(set(lengths.values())) != 1 or "forward" not in lengths:
            raise ValueError(f"a time for each layer in every list, not {lengths}")
        return LayerTimes(**times)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a profile of layer times ({error}); give one that cost=profiled has saved") from None


def read_profile(path: Path) -> LayerTimes:
    """The times in a file; ValueError if it cannot be read or holds no profile."""
    try:
        return from_text(read_text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"cost.profile={path}: {error}; leave it null to measure anew") from None
