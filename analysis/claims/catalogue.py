"""Every claim, in the order of the report."""

from collections.abc import Callable, Iterable
from functools import cache

from analysis.claims import (
    causal,
    consistency,
    derived,
    discrepancies,
    figure2,
    figure3,
    figure5,
    figure10,
    figure17,
    goodput,
    headline,
    planner,
    predicted,
    regression,
    statements,
    steady_state,
    torch_duel,
    trained,
    tuning,
    turning,
)
from analysis.claims.claim import Claim, Verdict, judge
from analysis.claims.evidence import Need
from analysis.records.experiments import Experiments

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
    predicted,
    figure10,
    torch_duel,
    turning,
    goodput,
    trained,
    derived,
    consistency,
    regression,
    statements,
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
    claims: Iterable[Claim], experiments: Experiments, planned: Callable[[Need], bool] = lambda need: True
) -> list[Verdict]:
    """A verdict on each claim.

    Args:
        planned: which runs were to be made; see `judge`.
    """
    return [judge(claim, experiments, planned) for claim in claims]
