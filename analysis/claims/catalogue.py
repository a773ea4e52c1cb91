"""Every claim, in the order of the report."""

from collections.abc import Callable, Iterable
from functools import cache

import pandas as pd

from analysis.claims import (
    causal,
    discrepancies,
    figure2,
    figure3,
    figure5,
    figure10,
    figure17,
    headline,
    planner,
    steady_state,
    tuning,
    withheld,
)
from analysis.claims.claim import Claim, Verdict, judge
from analysis.claims.evidence import Need, Runs

_SECTIONS = (
    figure17,
    steady_state,
    causal,
    tuning,
    planner,
    figure2,
    figure3,
    figure5,
    headline,
    discrepancies,
    figure10,
    withheld,
)


@cache
def all_claims() -> tuple[Claim, ...]:
    """The claims of every section.

    Raises:
        ValueError: if two claims have the same id.
    """
    claims = [claim for section in _SECTIONS for claim in section.claims()]
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise ValueError(f"two claims are called {claim.id}; an id belongs to one")
        seen.add(claim.id)
    return tuple(claims)


def evaluate(
    claims: Iterable[Claim], records: pd.DataFrame, planned: Callable[[Need], bool] = lambda need: True
) -> list[Verdict]:
    """A verdict on each claim.

    Args:
        records: as `analysis.records.load.load_records` gives them.
        planned: which runs were to be made; see `judge`.
    """
    runs = Runs(records)
    return [judge(claim, runs, planned) for claim in claims]
