"""One prediction: verdict, tokens per second with an interval, and what each constant does to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from rpbench.predict.case import Bytes, Case, Terms
from rpbench.predict.footprint import Verdict
from rpbench.predict.sensitivities import STEP
from rpbench.predict.systems import System, system

# Standard deviations on either side of an interval that nine of ten normal errors lie in.
NORMAL = 1.645
# What is left out of every model of a system that runs layers with experts: 1, with a deviation.
EXPERTS_UNMODELLED = "experts_unmodelled"


@dataclass(frozen=True)
class Prediction:
    """What a system does in a case.

    Args:
        status: ok, OOM, or N/A where the system cannot train the model at all.
        reason: why, unless it is ok.
        tokens_per_s, low, high: throughput and the interval that nine of ten errors of the constants leave.
        terms: seconds of a step by cause.
        sensitivity: relative change of the throughput for a relative change of a constant, by its name.
        margin: share of device or host memory that is left.
    """

    case: Case
    status: str
    reason: str
    verdict: Verdict | None
    device_bytes: Bytes
    host_bytes: Bytes
    tokens_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    terms: Terms | None = None
    sensitivity: Mapping[str, float] | None = None


def predict(case: Case, *, with_interval: bool = True) -> Prediction:
    """Verdict and throughput of a case.

    Raises:
        ValueError: for an unknown system, or a machine without a figure that is needed.
    """
    chosen = system(case.system)
    reason = chosen.refuses(case)
    if reason:
        return Prediction(case, "N/A", reason, None, {}, {})
    memory = chosen.memory(case, case.basis)
    verdict = memory.verdict(case.basis)
    if not verdict.fits:
        reason = f"{-verdict.margin:.0%} more memory is needed than there is; the most of it are {verdict.breaks}"
        return Prediction(case, "OOM", reason, verdict, memory.device, memory.host)
    terms = chosen.step(case, case.basis)
    rate = case.tokens_per_step / sum(terms.values())
    found = Prediction(case, "ok", "", verdict, memory.device, memory.host, rate, terms=terms)
    return _with_interval(found, chosen) if with_interval else found


def _with_interval(found: Prediction, chosen: System) -> Prediction:
    case, rate = found.case, found.tokens_per_s
    assert rate is not None
    sensitivity = (chosen.slopes or _differences(chosen))(case)
    slopes = {**sensitivity, unmodelled(case.system): 1.0}
    if case.model.experts is not None:
        slopes[EXPERTS_UNMODELLED] = 1.0
    deviations = (slope * case.basis.declared[name].within for name, slope in slopes.items())
    factor = exp(NORMAL * sqrt(sum(deviation**2 for deviation in deviations)))
    return replace(found, low=rate / factor, high=rate * factor, sensitivity=sensitivity)


def _differences(chosen: System) -> Callable[[Case], Mapping[str, float]]:
    """Slopes of a system's throughput: its step again for every constant that it has read."""

    def slopes(case: Case) -> Mapping[str, float]:
        case.basis.read.clear()
        plain = sum(chosen.step(case, case.basis).values())
        varied = {name: chosen.step(case, case.varied(name, STEP)) for name in case.basis.uncertain()}
        return {name: log(plain / sum(terms.values())) / log(STEP) for name, terms in varied.items()}

    return slopes


def unmodelled(name: str) -> str:
    """The constant that stands for what is left out of a system's model: 1, with a deviation."""
    return f"{name.replace('-', '_')}_unmodelled"
