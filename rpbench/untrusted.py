"""Untrusted texts and numbers: strict JSON, finite numbers, and printing without control characters."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

_LARGEST = sys.float_info.max
MOST = 2000  # characters of a message
MOST_DIGITS = 300  # of a whole number; more do not fit a float


def parsed(text: str) -> Any:
    """The value of a JSON text; ValueError for wrong or deeply nested JSON, infinite or huge numbers, repeated keys."""
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


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number, no bool, that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def positive(key: str, text: str) -> float:
    """The number of `key=text`, finite and above 0; ValueError for anything else."""
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = 0.0
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}={text}: a number above 0")
    return value


def whole(key: str, text: str, other: str = "") -> int:
    """The whole number of `key=text`, at least 1; the message of a ValueError ends with `other`."""
    if not text.replace("_", "").isdecimal() or int(text) < 1:
        raise ValueError(f"{key}={text}: a whole number of at least 1{other}")
    return int(text)


def not_finite(tree: object, name: str = "") -> Iterator[str]:
    """The numbers in nested values that are infinite or not a number, as `key.key=value`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from not_finite(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from not_finite(value, name)
    elif isinstance(tree, float) and not is_finite(tree):
        yield f"{name}={tree}"


def plain(text: str, most: int = MOST) -> str:
    """The text with unprintable characters escaped, except ends of lines, and without the middle of a long one."""
    if len(text) > most:
        text = f"{text[: most // 2]} [...] {text[-most // 2 :]}"
    return "".join(
        mark if mark.isprintable() or mark == "\n" else mark.encode("unicode_escape").decode() for mark in text
    )
