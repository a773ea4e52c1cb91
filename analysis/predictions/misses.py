"""Explanations of misses: how far each constant would have to move, alone, for a prediction to be right."""

from math import exp, log
from typing import NamedTuple

from analysis.predictions.compare import PLATFORMS, Cell, predicted, published_value

# A miss is worth a word from here on; a constant that hardly matters is no explanation.
LIMIT, LEAST_EFFECT = 0.15, 0.05


class Lever(NamedTuple):
    """A constant, the factor that would close the gap, and how many of its deviations that is."""

    constant: str
    factor: float
    deviations: float


class Miss(NamedTuple):
    """A cell that is off, the terms of its step in seconds, and its levers, the most plausible first."""

    cell: Cell
    error: float
    terms: dict[str, float]
    lacking_s: float
    levers: tuple[Lever, ...]


def explain(cell: Cell) -> Miss | None:
    """The miss of a throughput cell; None if it has no value on one side or is not off by more than the limit."""
    found = predicted(cell, with_interval=True)
    _, known = published_value(cell)
    if found.tokens_per_s is None or known is None or abs(found.tokens_per_s / known - 1) <= LIMIT:
        return None
    assert found.sensitivity is not None
    assert found.terms is not None
    gap = log(known / found.tokens_per_s)
    levers = []
    for name, effect in found.sensitivity.items():
        if abs(effect) >= LEAST_EFFECT:
            move = gap / effect
            levers.append(Lever(name, exp(min(50, move)), abs(move) / found.case.basis.declared[name].within))
    levers.sort(key=lambda lever: lever.deviations)
    lacking = found.case.tokens_per_step / known - sum(found.terms.values())
    return Miss(cell, found.tokens_per_s / known - 1, dict(found.terms), lacking, tuple(levers))


def rows(cells: list[Cell]) -> list[dict[str, str]]:
    """A row a miss and lever, the three most plausible of each."""
    return [
        {
            "system": miss.cell.system,
            "model": miss.cell.model,
            "platform": PLATFORMS[miss.cell.cluster],
            "error": f"{miss.error:.4f}",
            "missing_s": f"{miss.lacking_s:.3f}",
            "terms_s": "; ".join(f"{name} {seconds:.2f}" for name, seconds in miss.terms.items() if seconds),
            "constant": lever.constant,
            "factor": f"{lever.factor:.3f}",
            "deviations": f"{lever.deviations:.2f}",
        }
        for miss in filter(None, map(explain, cells))
        for lever in miss.levers[:3]
    ]


def text(cells: list[Cell]) -> str:
    """Every miss with its terms and its three most plausible levers."""
    lines = []
    for miss in filter(None, map(explain, cells)):
        terms = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in miss.terms.items() if seconds)
        where = f"{miss.cell.system} {miss.cell.model}, {PLATFORMS[miss.cell.cluster]}"
        lines.append(f"{where}: {miss.error:+.1%}; {terms}; {miss.lacking_s:+.2f} s missing")
        lines += [
            f"    {lever.constant} x {lever.factor:.2f}, {lever.deviations:.1f} of its deviations"
            for lever in miss.levers[:3]
        ]
    return "\n".join(lines) or f"no cell is off by more than {LIMIT:.0%}"
