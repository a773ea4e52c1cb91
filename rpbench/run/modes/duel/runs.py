"""Runs as columns: the form they have in records, and what statistics read."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rpbench.run.modes.duel.neighbours import Runs

if TYPE_CHECKING:
    from rpbench.run.modes.duel.turns import Run  # which needs torch; whoever reads records does not

Columns = Mapping[str, Sequence[Any]]

# Two ways to time a contender: the clock on the wall, and its actions' processor time on the action graph.
CLOCKS = ("wall", "replay")
DECIMALS = 6  # of a second


def columns_of(names: Sequence[str], runs: "Sequence[Run]") -> dict[str, dict[str, list[Any]]]:
    """Contender -> its runs, column by column; None where the system does not say what other programs did."""
    found: dict[str, dict[str, list[Any]]] = {
        name: {key: [] for key in ("at_s", "wall_s", "replay_s", "cpu_s", "elapsed_s", "others_s")} for name in names
    }
    for name, at_s, sample in runs:
        others = None if sample.others_s is None else round(sample.others_s, DECIMALS)
        values = (at_s, sample.wall_s, sample.replay_s, sample.cpu_s, sample.elapsed_s)
        for key, value in zip(found[name], (*(round(value, DECIMALS) for value in values), others), strict=True):
            found[name][key].append(value)
    return found


def runs_by(columns: Mapping[str, Columns], clock: str) -> Runs:
    """All runs of a start in the order they were made; contenders are numbered as the mapping has them."""
    who = [number for number, own in enumerate(columns.values()) for _ in own["at_s"]]
    order = np.argsort([at for own in columns.values() for at in own["at_s"]], kind="stable")

    def column(key: str) -> Any:
        values = [math.nan if value is None else value for own in columns.values() for value in own[key]]
        return np.array(values, float)[order]

    return Runs(np.array(who)[order], column("at_s"), column(f"{clock}_s"), column("others_s"), column("elapsed_s"))
