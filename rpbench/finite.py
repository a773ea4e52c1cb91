"""Finite numbers, told from whatever a file or a person may give instead."""

import sys
from typing import TypeGuard

_LARGEST = sys.float_info.max


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a float holds: no bool, no text, neither infinite nor too large a whole one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
