"""Profiled costs: layer times that were measured, as a file to plan and simulate with again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rpbench.cost.table import LayerTimes
from rpbench.strict_json import parsed

SCHEMA = "rpbench-profile 1"


def to_text(times: LayerTimes) -> str:
    """The times as JSON; `from_text` reads them back exactly."""
    return json.dumps({"schema": SCHEMA, **asdict(times)}, indent=1) + "\n"


def from_text(source: str) -> LayerTimes:
    """The times a text stands for.

    Raises:
        ValueError: if it is not what `to_text` writes.
    """
    try:
        found: dict[str, Any] = parsed(source)
        if found.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        times: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in found.items()
        }
        return LayerTimes(**times)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a profile of layer times ({error}); give one that cost=profiled has saved") from None


def read_profile(path: Path) -> LayerTimes:
    """The times in a file.

    Raises:
        ValueError: if the file cannot be read, or holds no profile.
    """
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cost.profile={path}: {error}; leave it null to measure anew") from None
