"""A made-up machine: its speed wanders, its runs are interrupted, and every process of a duel begins differently."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from rpbench.run.modes.duel.runs import Runs
from rpbench.run.modes.duel.starts import turn_order

SLOT_S = 0.7  # a run and what is between two


@dataclass(frozen=True)
class Noise:
    """Relative standard deviations of what makes two runs of the same work differ.

    Args:
        speed: of the machine, which all share; wanders over `speed_s` seconds.
        slow: of the machine over minutes: a random walk that reaches this in ten minutes.
        own: of each contender by itself, over `own_s` seconds: neighbouring runs of one contender are alike.
        run: of each run.
        start: of each contender in each process.
        spikes: share of runs that take a fifth longer.
    """

    speed: float = 0.10
    speed_s: float = 6.0
    slow: float = 0.15
    own: float = 0.015
    own_s: float = 30.0
    run: float = 0.03
    start: float = 0.007
    spikes: float = 0.02


def made_up_start(
    draw: np.random.Generator, names: Sequence[str], references: Sequence[str], logs: Sequence[float],
    num_turns: int, noise: Noise,
) -> Runs:  # fmt: skip
    """The runs of one start.

    Args:
        logs: logarithm of each contender's true time.
    """
    others = [name for name in names if name not in references]
    order = Random(int(draw.integers(1 << 30)))
    number_of = {name: number for number, name in enumerate(names)}
    turns = [[number_of[name] for name in turn_order(others, references, order)] for _ in range(num_turns)]
    who = np.array(turns).ravel()
    at = SLOT_S * np.arange(who.size)
    turn_s = SLOT_S * len(names)
    own = _wandering(draw, (num_turns, len(names)), noise.own, noise.own_s / turn_s)
    shared = _wandering(draw, (who.size, 1), noise.speed, noise.speed_s / SLOT_S)[:, 0]
    slow = noise.slow * np.sqrt(SLOT_S / 600) * np.cumsum(draw.normal(size=who.size))
    begun = np.asarray(logs) + draw.normal(0, noise.start, len(names))
    took = begun[who] + own[np.repeat(np.arange(num_turns), len(names)), who] + shared + slow
    took += draw.normal(0, noise.run, who.size) + 0.18 * (draw.random(who.size) < noise.spikes)
    wall = np.exp(took)
    return Runs(who, at, wall, np.zeros(who.size), wall)


def _wandering(draw: np.random.Generator, shape: tuple[int, int], deviation: float, length: float) -> np.ndarray:
    """Columns of first-order autoregressions that forget over `length` rows."""
    keeps = np.exp(-1 / length)
    steps = draw.normal(0, deviation * np.sqrt(1 - keeps**2), shape)
    found = np.empty(shape)
    found[0] = draw.normal(0, deviation, shape[1])
    for row in range(1, shape[0]):
        found[row] = keeps * found[row - 1] + steps[row]
    return found
