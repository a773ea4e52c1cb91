"""All claims in the order of the report, and counts of their verdicts."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from pkgutil import walk_packages

from analysis.claims.claim import KINDS, REPRODUCED, SECTIONS, WHOSE, Claim, Need, Verdict, judge
from analysis.records.experiments import Experiments
from analysis.records.runs import grouped

_SHOWN = 20  # red verdicts in a text


@cache
def all_claims() -> tuple[Claim, ...]:
    """The claims of every module beside this one; ValueError if two claims have the same id."""
    for module in walk_packages([str(Path(__file__).parent)], "analysis.claims."):
        import_module(module.name)
    claims = tuple(claim for _, found in sorted(SECTIONS, key=itemgetter(0)) for claim in found())
    for name, count in Counter(claim.id for claim in claims).items():
        if count > 1:
            raise ValueError(f"two claims are called {name}; an id belongs to one")
    return claims


def evaluate(
    claims: Iterable[Claim], experiments: Experiments, planned: Callable[[Need], bool] = lambda need: True
) -> list[Verdict]:
    """A verdict on each claim; `planned` as in `judge`."""
    return [judge(claim, experiments, planned) for claim in claims]


def tally(verdicts: Sequence[Verdict]) -> dict[str, Counter[str]]:
    """How many verdicts of each kind every section has, and all sections together under `all`."""
    sections = grouped(verdicts, lambda verdict: verdict.claim.section)
    return {name: Counter(each.kind for each in own) for name, own in (*sections.items(), ("all", verdicts))}


def summary_text(verdicts: list[Verdict]) -> str:
    """Two tables of counts, by whose the claims are and by section; kinds without verdicts are left out.

    A cell is one claim. A statement may have many: the fifteen numbers of one bar, or all runs of an experiment.
    """
    kinds = [kind for kind in KINDS if any(verdict.kind == kind for verdict in verdicts) or kind == REPRODUCED]
    owners = grouped(verdicts, lambda verdict: verdict.claim.whose)
    lines = []
    for whose, own in [*((each, owners[each]) for each in WHOSE if each in owners), ("all", verdicts)]:
        statements = {verdict.claim.statement_id or verdict.claim.id for verdict in own}
        lines.append([whose, str(len(statements)), *_kinds(tally(own)["all"], kinds), str(len(own))])
    sections = [[name, *_kinds(each, kinds), str(each.total())] for name, each in tally(verdicts).items()]
    by_owner = _aligned([["whose", "statements", *kinds, "cells"], *lines])
    return f"{by_owner}\n\n{_aligned([['cells by section', *kinds, 'planned'], *sections])}"


def _kinds(each: Counter[str], kinds: list[str]) -> list[str]:
    return [str(each[kind] or "-") for kind in kinds]


def _aligned(lines: list[list[str]]) -> str:
    """A table with rules below the head and above the last line; the first column is aligned left, the rest right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    written = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    rule = "-" * len(written[0])
    return "\n".join([written[0], rule, *written[1:-1], rule, written[-1]])


def red_text(verdicts: Iterable[Verdict]) -> str:
    """A line for each red verdict, at most `_SHOWN`; empty if there are none."""
    red = [verdict for verdict in verdicts if verdict.red]
    lines = [f"  {verdict.claim.id}: {verdict.kind}, {verdict.explanation}" for verdict in red[:_SHOWN]]
    if len(red) > _SHOWN:
        lines.append(f"  ... and {len(red) - _SHOWN} more")
    return "\n".join(lines)
