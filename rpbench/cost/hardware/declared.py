"""Declared: origin and uncertainty of a constant."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpbench.registry import check_known

# vendor: data sheet. published: from figures of the paper's artifact. counted: operators of an implementation, one by
# one. assumed: our judgement, not tested here. fitted: set, or solved for, to meet the named cells of
# analysis/published/, timings of layers included. measured: by `python -m rpbench calibrate`. chosen: a size we set.
ORIGINS = ("vendor", "published", "counted", "assumed", "fitted", "measured", "chosen")


@dataclass(frozen=True)
class Declared:
    """The origin of one constant.

    Raises ValueError for an unknown origin, a negative deviation, no source, or a fit without cells.
    """

    origin: str  # one of `ORIGINS`
    source: str  # document or reasoning, for readers
    within: float = 0.0  # one standard deviation of the constant, relative to its value
    cells: tuple[str, ...] = ()  # for a fitted constant, the cells it was fitted to, as `table/system/platform/model`

    def __post_init__(self) -> None:
        check_known("origin", self.origin, ORIGINS)
        if not self.source:
            raise ValueError(f"a constant of origin {self.origin} needs a source: name the document or the reasoning")
        if not (isinstance(self.within, int | float) and 0 <= self.within < 10):
            raise ValueError(f"within={self.within!r}: a relative deviation of at least 0, such as 0.05")
        if (self.origin == "fitted") != bool(self.cells):
            rule = "fitted constants name theirs, others none"
            raise ValueError(f"origin {self.origin} with cells {list(self.cells)}: {rule}")


def declarations(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Declared]:
    """The declarations of a configuration file, by name of the constant; ValueError with the name of a wrong one."""
    found = {}
    for name, row in rows.items():
        try:
            found[name] = Declared(**{**row, "cells": tuple(row.get("cells") or ())})
        except (TypeError, ValueError) as error:
            raise ValueError(f"declared.{name}: {error}") from None
    return found
