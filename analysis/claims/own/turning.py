"""Rankings that turn, ours: how many pairs of schedules each level of charging turns, and by how much some of them."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from analysis.claims.claim import Claim, Record, section, stated
from analysis.claims.evidence import Need
from analysis.records.turns import LEVELS, Turn, counted, lead, step_time_s, turns
from rpbench.config.configuration import swept

_KEYS = ("schedule", "model", "cluster")
_FIRST = next(iter(LEVELS.values()))  # all experiments sweep over the same
# A lead that a level turns, and the same pair a level before: (level, ahead, behind, model, machine).
_LEADS = (
    ("hops", "roundpipe", "pipedream_2bw", "qwen3_1p7b", "8x_rtx4090"),
    ("transfers", "pipedream_2bw", "roundpipe", "qwen3_1p7b", "8x_rtx4090"),
    ("memory", "zb_h1", "interleaved_1f1b", "qwen3_1p7b", "8x_rtx4090"),
    ("halves", "interleaved_1f1b", "zb_h1", "qwen3_1p7b", "8x_rtx4090"),
    ("halves", "dualpipe", "pipedream_2bw", "qwen3_1p7b", "8x_rtx4090"),
    ("collectives", "pipedream_2bw", "dualpipe", "qwen3_1p7b", "8x_rtx4090"),
)


@section(140, "Rankings that turn")
def claims() -> Iterator[Claim]:
    """How many pairs each level turns, and leads before and after a turn."""
    needs = tuple(_every_run())
    for level in list(LEVELS)[1:]:
        yield _say(
            f"pairs/{level}", f"Pairs of schedules that charging {level} turns", "pairs", needs, _count_of(level)
        )
    for level, one, other, model, cluster in _LEADS:
        yield _say(
            f"lead/{level}/{one}/{other}",
            f"Lead of {one} over {other} on {model}, {cluster}, with everything up to {level} charged",
            "%",
            tuple(_need(level, name, model, cluster) for name in (one, other)),
            lambda first, second: 100 * lead(step_time_s(first), step_time_s(second)),
        )


def _say(name: str, words: str, unit: str, needs: tuple[Need, ...], value: Callable[..., Any]) -> Claim:
    return stated(f"turning/{name}", words, unit, needs, value, evidence="predicted")


def _every_run() -> Iterator[Need]:
    for level, chosen in product(LEVELS, product(*(swept(_FIRST, key) for key in _KEYS))):
        yield _need(level, *chosen)


def _need(level: str, schedule: str, model: str, cluster: str) -> Need:
    return Need(LEVELS[level], {"schedule": schedule, "model": model, "cluster": cluster})


def _count_of(level: str) -> Callable[..., int]:
    return lambda *runs: counted(turns_of(runs), list(LEVELS))[level]


def turns_of(runs: tuple[Record, ...]) -> list[Turn]:
    """The turns of all models and machines; `runs` go level by level."""
    times: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        times[run["model"], run["cluster"]][run["schedule"]].append(step_time_s(run))
    return [turn for found in times.values() for turn in turns(found, list(LEVELS))]
