"""Interval: how far a pace may be off, from what the machine's figures and the constants may be off.

To first order: a pace changes with the seconds of a cause as much as the cause has of the step. What devices compute
and wait for goes with the time of layers, whose deviation is that of every constant behind them; transfers, collectives
and the host's optimizer go with the pace of their link. What no model of a schedule holds is added as for a pipeline.

Reach as in `rpbench.predict`: nine of ten errors.
"""

from collections.abc import Mapping
from math import exp, log, sqrt

from rpbench.cost.basis import Basis
from rpbench.cost.model import Model
from rpbench.mesh.layer_times import setting_of, times_of
from rpbench.plan.contest.terms import Source
from rpbench.predict.prediction import NORMAL, STEP

_LINK = {
    "transfers": ("copy_bytes_per_s",),
    "collectives": ("collective_bytes_per_s",),
    "optimizer": ("host_bytes_per_s", "optimizer_bytes"),
}
_UNMODELLED = "megatron_pp_unmodelled"
# Of times that were measured: what the published ones may be off.
MEASURED = 0.01


def half_width(causes: Mapping[str, float], model: Model, tokens: int, basis: Basis, source: Source) -> float:
    """The factor above and below a pace that nine of ten errors stay within.

    Args:
        causes: seconds of a step by cause.
        tokens: of a microbatch.
    """
    step_s = sum(causes.values())
    links = sum(causes[name] for name in _LINK)
    found = [_reach(basis, _UNMODELLED), compute_reach(model, tokens, basis, source) * (step_s - links) / step_s]
    for name, constants in _LINK.items():
        found += [_reach(basis, constant) * causes[name] / step_s for constant in constants]
    return exp(sqrt(sum(each * each for each in found)))


def compute_reach(model: Model, tokens: int, basis: Basis, source: Source) -> float:
    """How far the time of a layer may be off, as a share of it."""
    if source == "published":
        return MEASURED * NORMAL
    basis.read.clear()
    plain = _layer(model, tokens, basis)
    squares = 0.0
    for name in basis.uncertain():
        slope = log(_layer(model, tokens, basis.scaled(name, STEP)) / plain) / log(STEP)
        squares += (slope * _reach(basis, name)) ** 2
    return sqrt(squares)


def _layer(model: Model, tokens: int, basis: Basis) -> float:
    times = times_of(setting_of(model, tokens, basis))
    return float(times.forward[0] + times.recompute[0] + times.backward[0])


def _reach(basis: Basis, name: str) -> float:
    declared = basis.declared.get(name)
    if declared is None:
        return 0.0
    return declared.within * NORMAL
