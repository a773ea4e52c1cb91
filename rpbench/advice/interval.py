"""Interval: how far a pace may be off, given how far the machine's figures and the constants may be off.

To first order, an error in a cause changes the pace by that cause's fraction of the step. Computation and bubble follow
the time of layers, whose deviation combines those of all constants behind it; transfers, collectives and the host's
optimizer follow the speed of their link. What no schedule models is added as for a pipeline.

Two rows on one machine share most of these errors (time of layers, speed of links, what a framework spends beside its
schedule), which then say nothing about which row is faster. A shared error counts only as far as the rows spend
different fractions of their steps on it. `OWN` is the error that two schedules do not share.

Reach as in `rpbench.predict`: nine of ten errors.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log, sqrt
from typing import NamedTuple

from rpbench.cost.hardware.basis import Basis
from rpbench.mesh.layers.layer_seconds import Setting
from rpbench.mesh.layers.layer_times import pipeline_setting, times_of
from rpbench.mesh.software import PRIORS, usual_software
from rpbench.plan.contest.terms import Terms
from rpbench.predict.prediction import NORMAL, STEP

_LINK = {
    "transfers": ("copy_bytes_per_s",),
    "collectives": ("collective_bytes_per_s",),
    "optimizer": ("host_bytes_per_s", "optimizer_bytes"),
}
_UNMODELLED = "megatron_pp_unmodelled"
# Deviation of measured times, taken from the published ones.
MEASURED = 0.01
# Deviation of the ratio of two schedules' paces, in logarithms: root mean square of the 36 differences between errors
# of four schedules that ran the same models on one machine, in rows on which nothing was fitted. Source: Qi et al.,
# "Zero Bubble Pipeline Parallelism", ICLR'24, table 4; `analysis/predictions/clusters_holdout.csv`.
OWN = 0.056


class Shared(NamedTuple):
    """How far the shared errors of rows on one machine may reach, in logarithms."""

    links: Mapping[str, float]  # of the causes that follow the speed of a link
    compute: float  # of the time of layers, which all other causes follow


def shared_errors(terms: Terms, tokens: float, basis: Basis) -> Shared:
    """The shared errors of plans on one host.

    Args:
        tokens: of a microbatch.
    """
    links = {name: sqrt(sum(_reach(basis, each) ** 2 for each in constants)) for name, constants in _LINK.items()}
    return Shared(links, compute_reach(terms, tokens, basis))


def ratio_reach(first: Mapping[str, float], second: Mapping[str, float], shared: Shared) -> float:
    """The factor above and below the ratio of two rows' paces that holds nine of ten errors.

    Args:
        first, second: seconds of a step by cause.
    """
    parts = [{name: seconds / sum(causes.values()) for name, seconds in causes.items()} for causes in (first, second)]
    apart = {name: parts[0].get(name, 0.0) - parts[1].get(name, 0.0) for name in shared.links}
    errors = [reach * apart[name] for name, reach in shared.links.items()]
    return exp(sqrt(sum(each * each for each in (NORMAL * OWN, shared.compute * sum(apart.values()), *errors))))


def half_width(causes: Mapping[str, float], compute: float, basis: Basis) -> float:
    """The factor above and below a pace that holds nine of ten errors.

    Args:
        causes: seconds of a step by cause.
        compute: how far the time of a layer may be off (`compute_reach`).
    """
    step_s = sum(causes.values())
    links = sum(causes[name] for name in _LINK)
    found = [_reach(basis, _UNMODELLED), compute * (step_s - links) / step_s]
    for name, constants in _LINK.items():
        found += [_reach(basis, constant) * causes[name] / step_s for constant in constants]
    return exp(sqrt(sum(each * each for each in found)))


def compute_reach(terms: Terms, tokens: float, basis: Basis) -> float:
    """How far the time of a layer may be off, as a fraction: by all numbers that it is computed from.

    Args:
        tokens: of a microbatch.
    """
    if terms.source == "published":
        return MEASURED * NORMAL
    known = usual_software(terms.cluster.measured)
    setting = pipeline_setting(terms.model, terms.cluster, terms.num_devices, known, tokens, basis)
    basis.read.clear()
    plain, squares = _layer_s(setting), 0.0
    if known.kernels == "tiled":
        varied = {
            name: (replace(setting, software=known.with_constants({name: STEP * known.constants[name]})), prior.log_sd)
            for name, prior in PRIORS.items()
        }
        squares += _within(basis, "wide_matmul_efficiency") ** 2  # of the device, with any framework
    else:
        names = basis.uncertain()
        varied = {name: (replace(setting, numbers=basis.scaled(name, STEP)), _within(basis, name)) for name in names}
    for changed, within in varied.values():
        squares += (within * log(_layer_s(changed) / plain) / log(STEP)) ** 2
    return NORMAL * sqrt(squares)


def _layer_s(setting: Setting) -> float:
    times = times_of(setting)
    return float(times.forward[0] + times.recompute[0] + times.backward[0])


def _reach(basis: Basis, name: str) -> float:
    return NORMAL * _within(basis, name)


def _within(basis: Basis, name: str) -> float:
    return basis.declared[name].within if name in basis.declared else 0.0
