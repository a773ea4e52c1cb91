"""Every claim, in the order of the report: those of all modules beside this one."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from pkgutil import walk_packages

from analysis.claims.claim import SECTIONS, Claim, Need, Verdict, judge
from analysis.records.experiments import Experiments


@cache
def all_claims() -> tuple[Claim, ...]:
    """The claims of every section.

    Raises:
        ValueError: if two claims have the same id.
    """
    for module in walk_packages([str(Path(__file__).parent)], "analysis.claims."):
        import_module(module.name)
    claims = [claim for _, found in sorted(SECTIONS, key=itemgetter(0)) for claim in found()]
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
