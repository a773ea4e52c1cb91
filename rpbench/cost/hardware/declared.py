"""Declared: where a constant comes from, and how far it may be off."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpbench.registry import unknown_name

# vendor: data sheet. published: follows from figures of the paper's artifact. counted: read off an implementation,
# operator by operator. assumed: our judgement, not tested here. fitted: set, or solved for, to meet the named cells of
# analysis/published/, timings of layers included. measured: by `python -m rpbench calibrate`. chosen: a size, not a
# finding.
ORIGINS = ("vendor", "published", "counted", "assumed", "fitted", "measured", "chosen")


@dataclass(frozen=True)
class Declared:
    """The origin of one constant.

    Args:
        origin: one of `ORIGINS`.
        source: document or reasoning, for people.
        within: one standard deviation of the constant, relative to its value.
        cells: the cells a fitted constant was fitted on, as `table/system/platform/model`.

    Raises:
        ValueError: for an unknown origin, a negative deviation, no source, or a fit without cells.
    """

    origin: str
    source: str
    within: float = 0.0
    cells: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(unknown_name("origin", str(self.origin), list(ORIGINS)))
        if not self.source:
            raise ValueError(f"a constant of origin {self.origin} needs a source: name the document or the reasoning")
        if not (isinstance(self.within, int | float) and 0 <= self.within < 10):
            raise ValueError(f"within={self.within!r}: a relative deviation of at least 0, such as 0.05")
        if (self.origin == "fitted") != bool(self.cells):
            raise ValueError(
                f"origin {self.origin} with cells {list(self.cells)}: fitted constants name theirs, others none"
            )


def declarations(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Declared]:
    """The declarations of a configuration file by the name of the constant; ValueError naming a wrong one."""
    found = {}
    for name, row in rows.items():
        try:
            found[name] = Declared(**{**row, "cells": tuple(row.get("cells") or ())})
        except (TypeError, ValueError) as error:
            raise ValueError(f"declared.{name}: {error}") from None
    return found
