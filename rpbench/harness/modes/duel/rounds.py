"""Rounds: every contender once a round, in an order that rotates, so that none always follows the same one."""

import gc
from collections.abc import Callable, Mapping

from rpbench.harness.modes.duel.sample import Sample
from rpbench.harness.modes.duel.team import Team

Told = Callable[[str], None]


def play(
    teams: Mapping[str, Team], num_rounds: int, tell: Told, between: Callable[[], None] = lambda: None
) -> dict[str, list[Sample]]:
    """The samples of every team, one a round.

    Args:
        tell: told a line after every round.
        between: done before the first round and after every one.
    """
    names = list(teams)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    between()
    for number in range(num_rounds):
        first = number * len(names) // num_rounds
        for name in (*names[first:], *names[:first]):
            gc.collect()
            samples[name].append(teams[name].run())
        shares = [found[-1].foreign_cores for found in samples.values()]
        known = [share for share in shares if share is not None]
        foreign = f", other programs on up to {max(known):.2f} cores" if known else ""
        tell(f"round {number + 1} of {num_rounds}{foreign}")
        between()
    return samples
