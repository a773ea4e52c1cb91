"""Strict JSON: what a stranger's text stands for, or a refusal in words."""

import json
import math
from typing import Any

MOST_DIGITS = 300  # of a whole number; more would not fit a float


def parsed(text: str) -> Any:
    """The value of a JSON text; every number in it is finite.

    Raises:
        ValueError: for what is no JSON, is nested too deeply, or holds a number that is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_short)
    except RecursionError:
        raise ValueError("nested too deeply for such a file") from None


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
