"""Turns: all contenders resident side by side, one run each in an order drawn anew, until enough is known.

The references of a turn run the same plan, each resident for itself. They cut the other contenders into as many groups
as there are references, as equal as possible:

    turn 1   c a  R2  d  R1  e b  R3        turn 2   b  R1  d a  R3  c e  R2

so that a run is never further from a reference on either side than a group is long: what wanders over seconds is common
to a run and its neighbours. In a run-off the plans of a contender are held against each other and nobody else, so they
run one after the other, contenders and their plans in an order drawn anew:

    turn 1   b1 b3 b2  c2 c1  a1 a2         turn 2   c1 c2  a2 a1  b2 b1 b3

The draws follow from a seed, which the record keeps. The first turn warms everybody up and is not counted. Garbage is
collected between runs, never in one; what was there before the first is frozen, so that collecting takes milliseconds.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

from rpbench.engine.executor import ActionFailed
from rpbench.run.modes.duel.teams import Sample, Team
from rpbench.torch_runtime.processes.diagnosis import RunFailed

Told = Callable[[str], None]

LOOK_EVERY = 5  # turns
FAILURES = (RunFailed, ActionFailed, ValueError, RuntimeError)  # what a contender may end with; the others go on


def why_lost(error: Exception) -> str:
    """A failure in one line."""
    words = str(error).partition("\n")[0]
    return words if isinstance(error, RunFailed) else f"{type(error).__name__}: {words}"


class Run(NamedTuple):
    """One run of a contender; `at_s` is its middle, counted from the first run."""

    name: str
    at_s: float
    sample: Sample


def turn_order(others: Sequence[str], references: Sequence[str], draw: Random) -> list[str]:
    """One turn.

    Raises:
        ValueError: if there is no reference.
    """
    if not references:
        raise ValueError("no reference: a turn needs at least 1 run to compare the others with")
    shuffled, last = draw.sample(others, len(others)), draw.sample(references, len(references))
    size, left = divmod(len(shuffled), len(last))
    longer = draw.sample(range(len(last)), left)
    found: list[str] = []
    for number, reference in enumerate(last):
        found += [*(shuffled.pop() for _ in range(size + (number in longer))), reference]
    return found


def family_order(families: Sequence[Sequence[str]], draw: Random) -> list[str]:
    """One turn of a run-off; a family is the plans of a contender."""
    return [name for family in draw.sample(families, len(families)) for name in draw.sample(family, len(family))]


def play(
    teams: Mapping[str, Team],
    make_turn: Callable[[], Sequence[str]],
    budget_s: float,
    is_enough: Callable[[Sequence[Run]], bool],
    tell: Told = lambda line: None,
    lost: dict[str, str] | None = None,
) -> list[Run]:
    """The runs, in the order they were made.

    Args:
        make_turn: the order of the next turn, of all teams; where there are references, the last is one.
        budget_s: no turn begins after that.
        is_enough: asked now and then.
        lost: gets who has failed, and why; the others go on without it.
    """
    began, lost = time.perf_counter(), {} if lost is None else lost
    runs: list[Run] = []
    turn = 0
    with _collection_between_runs():
        while True:
            made = list(_made(teams, make_turn(), began, lost))
            if turn == 0:
                made = made[-1:]  # the neighbour of whoever runs next
            runs += made
            spent = time.perf_counter() - began
            if turn % LOOK_EVERY == 0:
                tell(f"{turn} turns in {spent:.0f} s")
            if turn and (spent >= budget_s or (turn % LOOK_EVERY == 0 and is_enough(runs))):
                return [run for run in runs if run.name not in lost]
            turn += 1


def _made(teams: Mapping[str, Team], names: Sequence[str], began: float, lost: dict[str, str]) -> Iterator[Run]:
    for name in names:
        if name not in lost:
            try:
                yield _run(name, teams[name], began)
            except FAILURES as error:
                lost[name] = why_lost(error)


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
