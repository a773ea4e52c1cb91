"""Turns: all contenders resident side by side, one run each in an order drawn anew, until enough is known.

The first turn warms everybody up and is not counted. Garbage is collected between runs, never in one; what was there
before the first is frozen, so that collecting takes milliseconds.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rpbench.run.modes.duel.sample import Sample
from rpbench.run.modes.duel.team import Team

Told = Callable[[str], None]

LOOK_EVERY = 5  # turns


class Run(NamedTuple):
    """One run of a contender; `at_s` is its middle, counted from the first run."""

    name: str
    at_s: float
    sample: Sample


def play(
    teams: Mapping[str, Team],
    make_turn: Callable[[], Sequence[str]],
    budget_s: float,
    is_enough: Callable[[Sequence[Run]], bool],
    tell: Told = lambda line: None,
) -> list[Run]:
    """The runs, in the order they were made.

    Args:
        make_turn: the order of the next turn, of all teams; where there are references, the last is one.
        budget_s: no turn begins after that.
        is_enough: asked now and then.
    """
    began = time.perf_counter()
    runs: list[Run] = []
    turn = 0
    with _collection_between_runs():
        while True:
            made = [_run(name, teams[name], began) for name in make_turn()]
            if turn == 0:
                made = made[-1:]  # the neighbour of whoever runs next
            runs += made
            spent = time.perf_counter() - began
            if turn % LOOK_EVERY == 0:
                tell(f"{turn} turns in {spent:.0f} s")
            if turn and (spent >= budget_s or (turn % LOOK_EVERY == 0 and is_enough(runs))):
                return runs
            turn += 1


def _run(name: str, team: Team, began: float) -> Run:
    gc.collect()
    before = time.perf_counter()
    sample = team.run()
    return Run(name, (before + time.perf_counter()) / 2 - began, sample)


@contextmanager
def _collection_between_runs() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
