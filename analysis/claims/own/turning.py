"""Our own studies: rankings that turn, goodput under failures, losses on any processor.

Two schedules that use the same weights for the same microbatch train alike. After 24 updates one step of delay costs
more loss than a change of processor. Curves of 96 updates have no fixed order: seeds differ by more.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from statistics import mean

from analysis.claims.claim import DECLARED, Claim, Need, Record, claim, runs, section, stated
from analysis.exhibits.figures.own.turning import LEVELS, Turn, counted, lead, step_time_s, turns
from analysis.records.published import Printed
from rpbench.config.configuration import swept

_TRAINED_SEEDS = (0, 1, 2)
_ALIKE = (("roundpipe", "gpipe"), ("roundpipe_async", "pipedream_2bw"))
_IN_ORDER = ("gpipe", "xpipe", "pipedream_2bw")
_LARGEST = 1e-3  # difference of two losses from the same sums in another order
_SAME_WEIGHTS = "the same weights at the same microbatch"


@section(150, "Losses on any processor")
def trained_claims() -> Iterator[Claim]:
    """For each seed: schedules that train alike, and the order of the losses."""
    for seed in _TRAINED_SEEDS:
        for one, other in _ALIKE:
            yield claim(
                "trained/alike/{one}/{other}/{seed}",
                lambda first, second: max(
                    abs(mine - theirs) for mine, theirs in zip(first["loss_curve"], second["loss_curve"], strict=True)
                ),
                published=Printed("0.0", _SAME_WEIGHTS),
                tolerance=_LARGEST,
                one=one,
                other=other,
                seed=seed,
            )
        yield claim(
            "trained/order/{seed}",
            lambda *runs: ", ".join(run["schedule"] for run in sorted(runs, key=lambda run: run["loss"])),
            published=Printed(", ".join(_IN_ORDER), _SAME_WEIGHTS),
            order=",".join(_IN_ORDER),
            seed=seed,
        )


EXPERIMENT = "goodput"
_TIMES = swept(EXPERIMENT, "mode.mean_between_s")
_SEEDS = swept(EXPERIMENT, "seed")


@section(145, "Goodput under failures")
def goodput_claims() -> Iterator[Claim]:
    """Each policy at both ends of the sweep, copies that survive two failures, and ReCycle over Bamboo."""
    for policy in swept(EXPERIMENT, "mode.policy"):
        for often, seconds in (("often", _TIMES[0]), ("seldom", _TIMES[-1])):
            yield stated(
                "goodput/{policy}/{often}",
                lambda *runs: 100 * _goodput(runs),
                needs=tuple(_goodput_need(policy, seconds, seed) for seed in _SEEDS),
                policy=policy,
                often=often,
                hours=float(seconds) / 3600,
            )
    yield stated(
        "goodput/gemini/two_at_once",
        lambda run: run["recoverable_probability"]["2"],
        needs=(_goodput_need("gemini", _TIMES[0], _SEEDS[0]),),
    )
    every = tuple(_goodput_need(*each) for each in product(("recycle", "bamboo"), _TIMES, _SEEDS))
    yield stated("goodput/recycle/over_bamboo", _largest_ratio, needs=every)


def _goodput_need(policy: str, seconds: float, seed: int) -> Need:
    return Need(EXPERIMENT, {"mode.policy": policy, "mode.mean_between_s": str(float(seconds)), "seed": str(seed)})


def _goodput(runs: tuple[Record, ...]) -> float:
    return mean(float(run["goodput"]) for run in runs)


def _largest_ratio(*runs: Record) -> float:
    """Of ReCycle's mean goodput over Bamboo's, at the same rate of failures."""
    num = len(_SEEDS)
    means = [_goodput(runs[first : first + num]) for first in range(0, len(runs), num)]
    half = len(means) // 2
    return max(detours / shadows for detours, shadows in zip(means[:half], means[half:], strict=True))


@section(140, "Rankings that turn")
def claims() -> Iterator[Claim]:
    """The number of pairs that each level turns, and leads before and after a turn."""
    keys = ("schedule", "model", "cluster")
    chosen = " ".join(f"{key}={','.join(swept(LEVELS['order'], key))}" for key in keys)
    needs = [need for experiment in LEVELS.values() for need in runs(f"{experiment} {chosen}")]
    for level in list(LEVELS)[1:]:
        yield stated(
            "turning/pairs/{level}",
            lambda *found, level=level: counted(turns_of(found), list(LEVELS))[level],
            needs=needs,
            level=level,
        )
    for row in DECLARED["leads"]:
        yield stated(
            "turning/lead/{level}/{one}/{other}",
            lambda first, second: 100 * lead(step_time_s(first), step_time_s(second)),
            **row,
        )


def turns_of(found: tuple[Record, ...]) -> list[Turn]:
    """The turns of all models and machines from runs in the order of the levels."""
    times: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in found:
        times[run["model"], run["cluster"]][run["schedule"]].append(step_time_s(run))
    return [turn for own in times.values() for turn in turns(own, list(LEVELS))]
