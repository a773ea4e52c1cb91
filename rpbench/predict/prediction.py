"""One prediction: verdict, tokens per second with an interval, what each constant does to it; the longest sequence.

Lengths are multiples of 1,024 tokens, as in the published search: one sequence a microbatch, and for data-parallel
systems one a device. Only memory decides. A bound pipeline keeps the cut of the throughput run. A streamed plan depends
on the length through the times of its layers: a length may fit although a shorter one does not, so the search goes on
upwards after the bisection.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from rpbench.predict.case import Bytes, Case, Terms
from rpbench.predict.footprint import Verdict
from rpbench.predict.megatron import bound_cut
from rpbench.predict.settings import Settings, length_microbatches
from rpbench.predict.systems import STEP, System, system

# Standard deviations on either side of an interval that holds nine of ten normal errors.
NORMAL = 1.645


@dataclass(frozen=True)
class Prediction:
    """The prediction of a case; `low` to `high` holds nine of ten outcomes, given the errors of the constants."""

    case: Case
    status: str  # ok, OOM, or N/A where the system cannot train the model at all
    reason: str  # why it is not ok; empty if it is
    verdict: Verdict | None
    device_bytes: Bytes
    host_bytes: Bytes
    tokens_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    terms: Terms | None = None
    sensitivity: Mapping[str, float] | None = None  # constant -> relative change of the throughput per relative change


def predict(case: Case, *, with_interval: bool = True) -> Prediction:
    """Verdict and throughput of a case; ValueError for an unknown system, or a machine without a needed figure."""
    chosen = system(case.system)
    reason = chosen.refuses(case)
    if reason:
        return Prediction(case, "N/A", reason, None, {}, {})
    memory = chosen.memory(case)
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
    sensitivity = _differences(chosen, case) if chosen.slopes is None else chosen.slopes(case)
    # and the errors that the models of the system, and of layers with experts, leave, as constants of 1
    slopes = {**sensitivity, f"{case.system.replace('-', '_')}_unmodelled": 1.0}
    if case.model.experts is not None:
        slopes["experts_unmodelled"] = 1.0
    deviations = (slope * case.basis.declared[name].within for name, slope in slopes.items())
    factor = exp(NORMAL * sqrt(sum(deviation**2 for deviation in deviations)))
    return replace(found, low=rate / factor, high=rate * factor, sensitivity=sensitivity)


def _differences(chosen: System, case: Case) -> Mapping[str, float]:
    """Slopes of a system's throughput: its step again for every constant that it has read."""
    case.basis.read.clear()
    plain = sum(chosen.step(case, case.basis).values())
    varied = {name: chosen.step(case, case.varied(name, STEP)) for name in case.basis.uncertain()}
    return {name: log(plain / sum(terms.values())) / log(STEP) for name, terms in varied.items()}


STEP_TOKENS = 1024
MOST_STEPS = 2048
# How far above a bisection's answer to look, as a share of it.
LOOK_ABOVE = 0.5


def longest_sequence(case: Case, *, look_above: bool = True) -> int:
    """Tokens of the longest sequence that fits, a multiple of 1,024; 0 if none does. ValueError as of `predict`.

    With `look_above`, lengths above one that does not fit are tried as well.
    """
    chosen = system(case.system)
    if chosen.refuses(case):
        return 0
    cut = bound_cut(case).forward if case.system == "megatron-pp" else ()
    trial = replace(case, settings=_of_one_sequence(case), grain="layer", cut=cut)

    def fits(steps: int) -> bool:
        return chosen.memory(trial.of_length(STEP_TOKENS * steps)).verdict(case.basis).fits

    low, high = 0, MOST_STEPS  # `low` fits, `high` does not
    if fits(high):
        return STEP_TOKENS * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not (look_above and case.system.startswith("roundpipe")):
        return STEP_TOKENS * low
    above = range(low + 1, low + 1 + int(LOOK_ABOVE * low))
    return STEP_TOKENS * max([low, *(steps for steps in above if fits(steps))])


def _of_one_sequence(case: Case) -> Settings:
    """One sequence a device; for RoundPipe one a microbatch, with the scripts' number of microbatches (one to ten)."""
    if case.system.startswith("roundpipe"):
        num = length_microbatches(case.model.published_name, case.basis.get("device_memory_bytes", 0.0))
        return Settings(num, 1, num, 1.0, "run scripts: one sequence a microbatch")
    calls = case.num_devices if case.system.startswith("megatron") else 1
    return Settings(case.num_devices, calls, 1, 1.0, "run scripts: one sequence a device")
