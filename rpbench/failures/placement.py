"""Placement: whose memory holds the copies of a rank's state, and how likely one of them outlives some failures.

Ranks stand in groups of c; each holds the state of everybody in its group, its own counted. Where c does not divide N
the last group takes what is left over and is a ring: a rank's copies are with itself and the c - 1 behind it. With
N = 5 and c = 2:

    group 0      0 1        each has both states
    ring         2 3 4      2's state with 2 and 3, 3's with 3 and 4, 4's with 4 and 2

A state is lost if all c of its holders fail. With k = c failures, each set of c equally likely, nothing is lost with
P = 1 - (N / c) / C(N, c) where c divides N; for c = 2 that is 1 - 1 / (N - 1).

Source: after the description of Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP'23, mixed placement. The sum over all sets of failures is ours.
"""

from collections.abc import Collection
from fractions import Fraction
from functools import reduce
from math import comb

Group = tuple[int, ...]


def check_copies(num_ranks: int, num_copies: int) -> None:
    """Refuse copies that cannot be placed.

    Raises:
        ValueError: naming the value, the rule and a way out.
    """
    if not 1 <= num_copies <= num_ranks:
        raise ValueError(
            f"copies={num_copies}: each copy is in the memory of another rank, its own counted, and there are "
            f"{num_ranks}; take 1 to {num_ranks}"
        )


def groups(num_ranks: int, num_copies: int) -> tuple[Group, ...]:
    """The groups whose ranks hold one another's states; the last is larger where they do not divide evenly."""
    check_copies(num_ranks, num_copies)
    num_groups = num_ranks // num_copies
    starts = [number * num_copies for number in range(num_groups)]
    return tuple(map(tuple, map(range, starts, [*starts[1:], num_ranks])))


def holders(rank: int, num_ranks: int, num_copies: int) -> Group:
    """The ranks that hold the state of one, itself first."""
    group = next(each for each in groups(num_ranks, num_copies) if rank in each)
    place = group.index(rank)
    return tuple(group[(place + behind) % len(group)] for behind in range(num_copies))


def is_recoverable(lost: Collection[int], num_ranks: int, num_copies: int) -> bool:
    """Whether a copy of every lost rank's state is with a rank that lives."""
    return all(set(holders(rank, num_ranks, num_copies)) - set(lost) for rank in lost)


def recoverable_probability(num_ranks: int, num_copies: int, num_failures: int) -> Fraction:
    """How likely no state is lost when `num_failures` ranks fail at once, all sets of them equally likely.

    Raises:
        ValueError: if more fail than there are, or the copies cannot be placed.
    """
    if not 0 <= num_failures <= num_ranks:
        raise ValueError(f"num_failures={num_failures}: of {num_ranks} ranks; take 0 to {num_ranks}")
    sound = [_sound_sets(len(group), num_copies) for group in groups(num_ranks, num_copies)]
    return Fraction(reduce(_product, sound)[num_failures], comb(num_ranks, num_failures))


def _sound_sets(size: int, num_copies: int) -> list[int]:
    """By number of failures, the sets of failures in a group that leave a copy of everything."""
    if size == num_copies:
        return [comb(size, failed) for failed in range(size)] + [0]
    return _sets_without_run(size, num_copies)


def _sets_without_run(size: int, run: int) -> list[int]:
    """By size, the subsets of a ring without `run` members in a row; `run` is below the ring's size.

    The first member that is not in the set stands behind `lead` that are. From there on it is a line whose last run
    is joined with the lead.
    """
    found = [0] * (size + 1)
    for lead in range(run):
        for number, count in enumerate(_lines(size - lead - 1, run, run - lead)):
            found[number + lead] += count
    return found


def _lines(length: int, run: int, last_run: int) -> list[int]:
    """By size, the subsets of a line without `run` members in a row, fewer than `last_run` of them at its end."""
    ending = {0: [1] + [0] * length}  # members in a row at the end -> by size, how many subsets
    for _ in range(length):
        without = [sum(counts) for counts in zip(*ending.values(), strict=True)]
        ending = {0: without} | {ones + 1: [0, *counts[:-1]] for ones, counts in ending.items() if ones + 1 < run}
    return [sum(counts) for counts in zip(*(each for ones, each in ending.items() if ones < last_run), strict=True)]


def _product(one: list[int], other: list[int]) -> list[int]:
    """The coefficients of a product of two polynomials."""
    found = [0] * (len(one) + len(other) - 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            found[i + j] += a * b
    return found
