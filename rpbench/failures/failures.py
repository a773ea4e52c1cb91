"""Failures: which ranks die when, as listed or drawn at a rate."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

MOST = 10_000  # failures of a run, as a mean; more take minutes and tell nothing else


@dataclass(frozen=True, order=True)
class Failure:
    """Some ranks that die at one moment.

    Args:
        at_s: seconds since the run began.
        ranks: over all pipelines; rank r of pipeline k is k * p + r.
    """

    at_s: float
    ranks: frozenset[int]


def listed(pairs: Iterable[Sequence[float]], num_ranks: int, horizon_s: float) -> tuple[Failure, ...]:
    """Failures as (rank, second) pairs, those of one moment joined, in the order of time.

    Raises:
        ValueError: for a rank that does not exist, a moment outside the run, or what is no pair.
    """
    found: dict[float, set[int]] = {}
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"failure {list(pair)}: a rank and the second at which it dies, as in [1, 30.5]")
        rank, at_s = pair
        if not 0 <= rank < num_ranks or rank != int(rank):
            raise ValueError(f"failure of rank {rank:g}: the run has ranks 0 to {num_ranks - 1}; name one of them")
        if not 0 <= at_s < horizon_s:
            raise ValueError(
                f"failure at {at_s:g} s: the run goes from 0 to {horizon_s:g} s; take one in between, or a longer "
                "mode.horizon_s"
            )
        found.setdefault(float(at_s), set()).add(int(rank))
    return tuple(Failure(at_s, frozenset(ranks)) for at_s, ranks in sorted(found.items()))


def drawn(mean_s: float, num_ranks: int, horizon_s: float, seed: int) -> tuple[Failure, ...]:
    """Failures of ranks that each live `mean_s` seconds on average, exponentially distributed; the same for a seed.

    Raises:
        ValueError: for a mean that is no time, or so short that ranks do little else but die.
    """
    if not (isfinite(mean_s) and mean_s > 0):
        raise ValueError(f"mean_between_s={mean_s}: seconds that a rank lives on average, a finite number above 0")
    lived = num_ranks * horizon_s
    if lived > MOST * mean_s:
        raise ValueError(
            f"mean_between_s={mean_s:g}: {num_ranks} ranks would die {lived / mean_s:.3g} times in {horizon_s:g} s, "
            f"and {MOST:,} are simulated at most; take {lived / MOST:.3g} or more, or a shorter mode.horizon_s"
        )
    draws, found, at_s = random.Random(seed), [], 0.0
    while (at_s := at_s + draws.expovariate(num_ranks / mean_s)) < horizon_s:
        found.append(Failure(at_s, frozenset({draws.randrange(num_ranks)})))
    return tuple(found)
