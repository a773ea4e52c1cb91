"""Goodput under failures, ours: what five policies keep of a run, and what two of their papers say beside it."""

from collections.abc import Iterator
from itertools import product
from statistics import mean

from analysis.claims.claim import Claim, Record, section, stated
from analysis.claims.evidence import Need
from rpbench.config.configuration import swept

EXPERIMENT = "goodput"
_TIMES = swept(EXPERIMENT, "mode.mean_between_s")
_SEEDS = swept(EXPERIMENT, "seed")


@section(145, "Goodput under failures")
def claims() -> Iterator[Claim]:
    """Each policy at the ends of the sweep, copies that outlive two failures, and detours over shadows."""
    for policy in swept(EXPERIMENT, "mode.policy"):
        for words, seconds in (("often", _TIMES[0]), ("seldom", _TIMES[-1])):
            yield stated(
                f"goodput/{policy}/{words}",
                f"Goodput of mode.policy={policy}, a rank of sixteen lives {float(seconds) / 3600:g} hours on average",
                "%",
                tuple(_need(policy, seconds, seed) for seed in _SEEDS),
                lambda *runs: 100 * _goodput(runs),
                evidence="predicted",
            )
    yield stated(
        "goodput/gemini/two_at_once",
        "How likely two failures at once leave a copy of every state, 16 ranks and two copies; 1 - 1 / (N - 1)",
        "",
        (_need("gemini", _TIMES[0], _SEEDS[0]),),
        lambda run: run["recoverable_probability"]["2"],
        evidence="derived",
    )
    yield stated(
        "goodput/recycle/over_bamboo",
        "Largest ratio of goodputs of mode.policy=recycle over bamboo; ReCycle's abstract says up to 1.64",
        "",
        tuple(_need(*each) for each in product(("recycle", "bamboo"), _TIMES, _SEEDS)),
        _largest_ratio,
        evidence="predicted",
    )


def _need(policy: str, seconds: float, seed: int) -> Need:
    return Need(EXPERIMENT, {"mode.policy": policy, "mode.mean_between_s": str(float(seconds)), "seed": str(seed)})


def _goodput(runs: tuple[Record, ...]) -> float:
    return mean(float(run["goodput"]) for run in runs)


def _largest_ratio(*runs: Record) -> float:
    """Of the means of the draws, at the same rate of failures."""
    num = len(_SEEDS)
    means = [_goodput(runs[first : first + num]) for first in range(0, len(runs), num)]
    half = len(means) // 2
    return max(detours / shadows for detours, shadows in zip(means[:half], means[half:], strict=True))
