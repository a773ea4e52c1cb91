"""Finite numbers, told from whatever a file or a person may give instead."""

import sys
from collections.abc import Iterator, Mapping
from typing import TypeGuard

_LARGEST = sys.float_info.max


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a float holds: no bool, no text, neither infinite nor too large a whole one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def not_finite(tree: object, name: str = "") -> Iterator[str]:
    """The numbers in nested values that are infinite or none, as `key.key=value`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from not_finite(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from not_finite(value, name)
    elif isinstance(tree, float) and not is_finite(tree):
        yield f"{name}={tree}"
