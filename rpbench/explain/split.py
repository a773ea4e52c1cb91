"""Split: the difference of two numbers as a sum of causes and a rest, exact and independent of any order.

The difference is a logarithm, ln(pace of B / pace of A). A side's device-seconds are P = G + sum of s_i, where
G = C (1 + r) (1 + u + v): computation C = FLOPs / (peak x dtype x kernels), recomputation as a multiple r of C, and
partition and bubble as multiples u and v of both, because they grow with the work. The s_i are seconds that do not grow
with it: transfers, collectives, optimizer, overheads. With the logarithmic mean L(x, y) = (x - y) / ln(x / y) and
w = L(G_A, G_B) / L(P_A, P_B), the terms

    seconds of their own    (s_A - s_B) / L(P_A, P_B)
    factors of C            w ln(factor of A / factor of B)
    recomputation           w ln((1 + r_A) / (1 + r_B))
    partition               w (u_A - u_B) / L(1 + u_A + v_A, 1 + u_B + v_B), and bubble likewise

add up to ln(P_A / P_B). No order is chosen, B against A gives the negatives, and a cause on one side alone needs no
special case. A Shapley mean over orders would need each cause switched on alone, which runs do not allow: a mesh fills
its devices, a partition its stages. The rest is ln(number / prediction) of A less that of B: an error that both share
explains nothing of their difference.

Source: Ang, "The LMDI approach to decomposition analysis: a practical guide", Energy Policy 33 (2005), LMDI-I.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Any, Literal

from rpbench.explain.side import AGAIN, CAUSES, COMPUTATION, DECLARED, WAITS, Rate, Side

Metric = Literal["pace", "tflops", "mfu"]
COMPARABLE: Mapping[str, str] = {  # what must be equal on both sides, and the way out
    "unit": "take models with a shape on both sides, or on neither",
    "clock": "take costs in seconds on both sides, as in cost=analytic",
}
NOTHING = 1e-9  # logarithms below it are rounding


@dataclass(frozen=True)
class Explanation:
    a: Side
    b: Side
    metric: Metric
    total: float  # ln(B / A) of the metric
    parts: Mapping[str, float]  # logarithm by cause; with `rest` they add up to the total
    rest: float

    @property
    def unexplained(self) -> float | None:
        """The rest over the difference; None without a difference."""
        share = self._share(self.rest)
        return None if share is None else abs(share)

    def _share(self, part: float) -> float | None:
        return part / self.total if abs(self.total) > NOTHING else None

    def plain(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "metric_is": DECLARED["metrics"][self.metric].format(pace=self.a.pace_unit),
            "ratio": exp(self.total),
            "log_ratio": self.total,
            "causes": [self._row(name, part) for name, part in self.parts.items()],
            "unexplained": {"log": self.rest, "factor": exp(self.rest), "share_of_difference": self._share(self.rest)},
            "a": _plain(self.a),
            "b": _plain(self.b),
        }

    def _row(self, name: str, part: float) -> dict[str, Any]:
        evidence = [DECLARED["evidence_of_cause"].get(name, side.model) for side in (self.a, self.b)]
        return {
            "cause": name,
            "is": CAUSES[name],
            "log": part,
            "factor": exp(part),
            "share_of_difference": self._share(part),
            "a_seconds": self.a.causes.get(name),
            "b_seconds": self.b.causes.get(name),
            "evidence": evidence[0] if evidence[0] == evidence[1] else " and ".join(evidence),
        }


def _plain(side: Side) -> dict[str, Any]:
    return {
        "label": side.label,
        "device_seconds": side.seconds,
        "per": side.unit,
        "clock": side.clock,
        "evidence": side.evidence,
        "predicted_device_seconds": side.predicted,
        "model": side.model,
        "settings": dict(side.settings),
        "notes": list(side.notes),
    }


def explain(a: Side, b: Side, metric: Metric = "pace") -> Explanation:
    """The difference of two numbers by causes; ValueError for different units, or a metric that one does not have."""
    for what, way_out in COMPARABLE.items():
        of_a, of_b = getattr(a, what), getattr(b, what)
        if of_a != of_b:
            raise ValueError(
                f"{a.label} and {b.label} cannot be compared: the {what} of the first is {of_a}, of the second "
                f"{of_b}; {way_out}"
            )
    parts = _pace_parts(a, b)
    total = log(a.seconds / b.seconds)
    rest = total - sum(parts.values())
    if metric != "pace":
        more = _rate_parts(a, b, metric)
        total += sum(more.values())
        parts = {name: parts.get(name, 0.0) + more.get(name, 0.0) for name in (*parts, *more)}
    shown = {name: parts[name] for name in CAUSES if abs(parts.get(name, 0.0)) > NOTHING}
    return Explanation(a, b, metric, total, shown, rest)


def log_mean(x: float, y: float) -> float:
    return x if abs(x - y) <= 1e-12 * x else (x - y) / log(x / y)


def _pace_parts(a: Side, b: Side) -> dict[str, float]:
    whole = log_mean(a.predicted, b.predicted)
    waits_a, waits_b = _waits(a), _waits(b)
    stretch_a, stretch_b = 1 + sum(waits_a.values()), 1 + sum(waits_b.values())
    weight = log_mean(_worked(a) * stretch_a, _worked(b) * stretch_b) / whole
    stretch = log_mean(stretch_a, stretch_b)
    again = log(_worked(a) / a.causes[COMPUTATION]) - log(_worked(b) / b.causes[COMPUTATION])
    own = [name for name in {**a.causes, **b.causes} if name not in (COMPUTATION, AGAIN, *WAITS)]
    return (
        _factors(a, b, weight)
        | {AGAIN: weight * again}
        | {name: weight * (waits_a[name] - waits_b[name]) / stretch for name in WAITS}
        | {name: (a.causes.get(name, 0.0) - b.causes.get(name, 0.0)) / whole for name in own}
    )


def _worked(side: Side) -> float:
    return side.causes[COMPUTATION] + side.causes.get(AGAIN, 0.0)


def _waits(side: Side) -> dict[str, float]:
    """Partition and bubble as multiples of the work."""
    return {name: side.causes.get(name, 0.0) / _worked(side) for name in WAITS}


def _factors(a: Side, b: Side, weight: float) -> dict[str, float]:
    """Parts of computation, by factor where both sides know their work."""
    whole = weight * log(a.causes[COMPUTATION] / b.causes[COMPUTATION])
    if a.work is None or b.work is None:
        return {COMPUTATION: whole}
    found = {"shape": weight * log(a.work.flops / b.work.flops)}
    if not (a.work.peak and b.work.peak):
        return found | {COMPUTATION: whole - found["shape"]}
    found |= {
        "device": weight * log(b.work.peak / a.work.peak),
        "dtype": weight * log(b.work.dtype_gain / a.work.dtype_gain),
    }
    return found | {"kernels": whole - sum(found.values())}


def _rate_parts(a: Side, b: Side, metric: Metric) -> dict[str, float]:
    """Factors of a FLOP rate beside the pace: counted FLOPs of a token, and the peak."""
    (flops_a, peak_a, rate_a), (flops_b, peak_b, rate_b) = _counted(a, metric), _counted(b, metric)
    found = {
        "shape": log(flops_b / flops_a),
        "FLOP convention": log(rate_b.flops / flops_b) - log(rate_a.flops / flops_a),
    }
    if metric == "tflops":
        return found
    peaks = {"device": log(peak_a / peak_b), "peak definition": log(rate_a.peak / peak_a) - log(rate_b.peak / peak_b)}
    return found | peaks


def _counted(side: Side, metric: Metric) -> tuple[float, float, Rate]:
    """FLOPs of a token and the peak as this project counts them, and the side's own rate."""
    work = side.work
    if work is None or not work.peak:
        raise ValueError(
            f"metric={metric}: of {side.label} no device with a peak is known; take metric=pace, to compare tokens/s"
        )
    return work.flops, work.peak, side.rate or Rate(work.flops, work.peak)
