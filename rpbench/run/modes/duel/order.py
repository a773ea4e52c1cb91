"""Order: who runs when. Every turn runs every contender once, in an order drawn anew, references scattered in it.

The references run the same plan, each resident for itself. They cut the other contenders of a turn into as many groups
as there are references, as equal as possible:

    turn 1   c a  R2  d  R1  e b  R3        turn 2   b  R1  d a  R3  c e  R2

so that a run is never further from a reference on either side than a group is long: what wanders over seconds is common
to a run and its neighbours. In a run-off the plans of a contender are held against each other and nobody else, so they
run one after the other, contenders and their plans in an order drawn anew:

    turn 1   b1 b3 b2  c2 c1  a1 a2         turn 2   c1 c2  a2 a1  b2 b1 b3

The draws follow from a seed, which the record keeps.
"""

from collections.abc import Sequence
from random import Random


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
