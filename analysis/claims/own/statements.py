"""Numbers that README and docs state about our own experiments, computed from records."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from operator import itemgetter

import pandas as pd

from analysis.claims.claim import Claim, Need, Record, bubble_percent, lead_of_last, over_fastest, runs, section, stated
from analysis.claims.expected import read_table
from analysis.claims.own.regression import need_of
from analysis.claims.paper.tuning import competing
from analysis.predictions.score import NUM_TARGETS, targets
from analysis.records.published import PUBLISHED_MODELS, printed
from analysis.records.runs import ONE_ROUND, grouped


@section(190, "What we say of our own experiments")
def claims() -> Iterator[Claim]:
    ahead = "searched cuts, the baselines recomputing ahead"
    one_round = f"{ahead}, RoundPipe's call as one round"
    fields = {"published": "published cuts", "searched": "searched cuts", "ahead": ahead, "one_round": one_round}
    for field, words in fields.items():
        needs = [need for model in PUBLISHED_MODELS for need in competing(field, model)]
        yield from _ends("lead/{field}", _leads_of, needs, field=field, words=words)
    yield from _of_schedules()
    yield from _contest()
    yield from _contest_as_a_whole()
    yield from _against_published()
    for schedule, models in _PACES.items():
        for model in models:
            name = "ours/pace/{schedule}/{model}"
            yield stated(name, lambda run: run["tokens_per_s"] / 1000, schedule=schedule, model=model)
    by_model = sorted(read_table("figure10"), key=lambda row: [*PUBLISHED_MODELS].index(row["cell.model"]))
    yield from _ends("figure10/orders", _distinct_orders, [need_of("figure10", row) for row in by_model])
    for name in ("ahead", "waiting"):
        yield stated(f"ours/fused_stage/{name}", lambda run: 100 * run["bubble_steady"])
    for experiment in ("equivalence", "baselines_cpu"):
        if needs := [need_of(experiment, row) for row in read_table(experiment)]:  # else nothing has been accepted yet
            yield stated(
                "ours/parity/{experiment}",
                lambda *found: sum(run["grad_max_abs_diff"] == 0 == run["weight_max_abs_diff"] for run in found),
                needs=needs,
                experiment=experiment,
            )
    for number in range(NUM_TARGETS):
        yield stated("ours/predictions/target_{number}", partial(_said, number), number=number + 1)
    yield stated("ours/predictions/held", lambda: sum(target.held for target in _found_targets()), targets=NUM_TARGETS)


def _ends(
    name: str, values: Callable[[tuple[Record, ...]], Iterable[float]], needs: Sequence[Need], **words: str
) -> Iterator[Claim]:
    """Claims on the smallest and the largest of the values of some runs."""
    for end, extreme in (("least", min), ("most", max)):
        pattern = f"ours/{name}/{{end}}"
        yield stated(pattern, lambda *found, best=extreme: best(values(found)), needs=needs, end=end, **words)


def _leads_of(found: tuple[Record, ...]) -> list[float]:
    """RoundPipe's lead on each model, whose runs are consecutive with RoundPipe's last."""
    each = len(found) // len(PUBLISHED_MODELS)
    return [lead_of_last(*found[first : first + each]) for first in range(0, len(found), each)]


def _of_schedules() -> Iterator[Claim]:
    named = (("1f1b", "1F1B"), ("roundpipe", "RoundPipe"), (ONE_ROUND, "RoundPipe in one round"))
    for (schedule, words), devices in product(named, (8, 1024)):
        name = "ours/thousand_devices/{schedule}/{devices}"
        yield stated(name, bubble_percent, schedule=schedule, devices=devices, words=words)
    for schedule, words, heads in (("zb_v", "ZB-V", ("0.0", "1.0")), ("vocab_parallel", "a cut head", ("2.0",))):
        for head in heads:
            name = "ours/uneven_head/{schedule}/{head}"
            yield stated(name, over_fastest, schedule=schedule, head=head, words=words)
    each = ("dispatch model={} schedule.round_size=4", "causal model={}")
    needs = [need for model in PUBLISHED_MODELS for words in each for need in runs(words.format(model))]
    yield from _ends(
        "dispatch",
        lambda found: (
            100 * pool["bubble_makespan"] / rotation["bubble_makespan"]
            for pool, rotation in zip(found[::2], found[1::2], strict=True)
        ),
        needs,
    )


def _contest() -> Iterator[Claim]:
    """Throughput of the fastest system of figure 10 at equal tuning over RoundPipe's, with and without late systems."""
    rows = [row for row in read_table("figure10") if row["status"] == "ok"]
    for model in PUBLISHED_MODELS:
        found = {row["cell.schedule"]: need_of("figure10", row) for row in rows if row["cell.model"] == model}
        for name, own in (("late", "roundpipe_async"), ("synchronous", "roundpipe")):
            if own in found:
                needs = (found[own], *(need for schedule, need in found.items() if schedule != own))
                pace = partial(_best_over_first, late=name == "late")
                yield stated(f"ours/figure10/{{model}}/{name}", pace, needs=needs, model=model)


def _best_over_first(*found: Record, late: bool) -> float:
    paces = [run["tokens_per_s"] for run in found if late or not run["staleness_steps"]]
    return float(max(paces) / found[0]["tokens_per_s"])


def _contest_as_a_whole() -> Iterator[Claim]:
    """Each model's fastest system and number of distinct orders, and gains of random restarts over the plans."""
    rows = read_table("figure10")
    for model in PUBLISHED_MODELS:
        needs = [need_of("figure10", row) for row in rows if row["cell.model"] == model]
        for name, value in (
            ("first", _first),
            ("first_synchronous", lambda *found: _first(*(run for run in found if not run["staleness_steps"]))),
            ("orders", lambda *found: len({run["order_sha256"] for run in found if run["status"] == "ok"})),
        ):
            yield stated(f"ours/figure10/{{model}}/{name}", value, needs=needs, model=model)
    needs = [need_of("figure10", row) for row in rows]
    yield stated("ours/figure10/restarts", lambda *found: 100 * max(_gains(found)), needs=needs)
    for name, words in (("settled", "at most 1 %"), ("unsettled", "more than 1 %, or did not end")):
        yield stated(
            "ours/figure10/{settled}",
            lambda *found, settled=name == "settled": sum((gain <= 0.01) is settled for gain in _gains(found)),
            needs=needs,
            settled=name,
            words=words,
        )


def _gains(found: tuple[Record, ...]) -> list[float]:
    """Gains of the last round of restarts, or the gap to the bound where it was too small to restart."""
    fitting = [run for run in found if run["status"] == "ok"]
    return [run["pace_gap"] if pd.isna(run.get("restart_gain")) else run["restart_gain"] for run in fitting]


def _first(*found: Record) -> str:
    """The fastest schedule, or several that are equally fast, as those with the same order are."""
    paces = {str(run["choices"]["schedule"]): run["tokens_per_s"] for run in found if run["status"] == "ok"}
    first = max(paces.values())
    return ", ".join(sorted(name for name, pace in paces.items() if pace >= first * (1 - 1e-9)))


def _distinct_orders(found: tuple[Record, ...]) -> list[int]:
    """The number of distinct orders for each model; contenders may run one order under several names."""
    known = [run for run in found if isinstance(run.get("order_sha256"), str)]
    return [len({run["order_sha256"] for run in runs}) for runs in grouped(known, itemgetter("model")).values()]


def _against_published() -> Iterator[Claim]:
    """Simulated over published throughput of each system: the error in a ratio of two systems."""
    rows = [row for row in read_table("figure10_published") if row["status"] == "ok"]
    for system, of_system in grouped(rows, itemgetter("cell.mode.system")).items():
        needs, paces = [], []
        for row in of_system:
            bar = printed("throughput", "tokens_per_s", system=system, model=PUBLISHED_MODELS[row["cell.model"]])
            if bar is not None and isinstance(bar.value, float):
                needs.append(need_of("figure10_published", row))
                paces.append(bar.value)
        if needs:
            over = partial(_over, paces)
            yield from _ends("by_action/{system}", over, needs, system=system)


def _over(paces: list[float], found: tuple[Record, ...]) -> list[float]:
    return [run["tokens_per_s"] / pace for run, pace in zip(found, paces, strict=True)]


# Contenders of figure 10 whose pages state their throughput, and on which models.
_PACES = {
    **dict.fromkeys(("megatron_tp", "mobius", "zero_2", "zero_3", "zero_infinity"), ("qwen3_1p7b",)),
    "roundpipe_async": ("qwen3_1p7b", "llama31_8b"),
}


_found_targets = cache(targets)


def _said(number: int) -> str:
    target = _found_targets()[number]
    return f"{target.name}: {'holds' if target.held else 'missed'}, {target.measured}"
