"""Strict JSON: what a text stands for that somebody else may have written or changed, or a refusal in words."""

import json
import math
from typing import Any

MOST_DIGITS = 300  # of a whole number; more would not fit a float


def parsed(text: str) -> Any:
    """The value of a JSON text; every number in it is finite, and every key of an object stands once.

    Raises:
        ValueError: for what is no JSON, is nested too deeply, or holds a number that is none or a key twice.
    """
    try:
        return json.loads(
            text, parse_constant=_refuse, parse_float=_finite, parse_int=_short, object_pairs_hook=_keys_once
        )
    except RecursionError:
        raise ValueError("nested too deeply for such a file") from None


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:40]!r} stands twice in one object; nobody can say which is meant")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON; write a finite one, or null")


def _finite(digits: str) -> float:
    found = float(digits)
    if not math.isfinite(found):
        raise ValueError(f"{digits[:40]} is too large a number; write a finite one, or null")
    return found


def _short(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"{digits[:40]}... has {len(digits)} digits; at most {MOST_DIGITS} are read")
    return int(digits)
