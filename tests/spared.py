"""Parameters of which the default suite runs a few; the others are slow."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def spared(values: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """All values; those that `keep` does not say yes to are marked slow."""
    return [value if keep(value) else slow(value) for value in values]


def slow(value: Any) -> Any:
    """A parameter of one value, or of several in a tuple, for slow runs alone."""
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
