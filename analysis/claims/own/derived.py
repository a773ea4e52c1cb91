"""Derived: headline ratios computed without the simulator, or bounded by a plan that must lose.

Leads on published cuts follow from the makespans that the paper's artifact printed. A searched cut may lose to no other
cut of the same call. 1F1B on a thousand microbatches is timed by a recurrence of its own. No system of figure 10 can be
faster than the devices' matrix peak.
"""

from collections import deque
from collections.abc import Iterator
from functools import cache

from analysis.claims.claim import Claim, Need, Record, figure17, lead_of_last, partitions, roofline, section
from analysis.claims.expected import read_table
from analysis.claims.own.regression import need_of
from analysis.records.published import PUBLISHED_MODELS, Printed, look_up
from analysis.records.runs import BASELINES, SCHEDULES

_CUTS = ("even", "greedy")
_CLUSTER = "8x_rtx4090"


@section(160, "Headline ratios on another road")
def claims() -> Iterator[Claim]:
    """Every derivation, by the statement that it is about."""
    yield from _leads_as_printed()
    yield from _cuts_that_lose()
    yield from _thousand_microbatches()
    yield from _within_the_peak()


def _claim(name: str, words: str, unit: str, due: str, source: str, **more: object) -> Claim:
    return Claim(
        id=f"derived/{name}",
        statement=words,
        unit=unit,
        source=source,
        published=Printed(due, source),
        whose="ours against ours",
        **({"evidence": "derived"} | more),  # type: ignore[arg-type]
    )


def _leads_as_printed() -> Iterator[Claim]:
    """RoundPipe's lead on each model, by the makespans of the paper's artifact."""
    for model in PUBLISHED_MODELS:
        yield _claim(
            f"lead/published/{model}",
            f"RoundPipe's lead over the best classic schedule on the published cuts, {model}",
            "x",
            f"{_printed_lead(model):.6f}",
            "analysis/published/bubble.csv, makespan_ms",
            tolerance=1e-6,
            needs=tuple(figure17(name, model) for name in SCHEDULES),
            value=lead_of_last,
        )


def _printed_lead(model: str) -> float:
    def makespan_ms(scheduler: str) -> float:
        found = look_up("bubble", "makespan_ms", scheduler=scheduler, model=PUBLISHED_MODELS[model])
        return float(found.value)

    return min(makespan_ms(name.replace("_", "-")) for name in BASELINES) / makespan_ms("roundpipe")


def _cuts_that_lose() -> Iterator[Claim]:
    """The searched cut must be no slower than the published, even and greedy ones."""
    for schedule in SCHEDULES:
        for model in PUBLISHED_MODELS:
            others = (figure17(schedule, model), *(partitions(cut, schedule, model) for cut in _CUTS))
            yield _claim(
                f"lead/searched/{schedule}/{model}",
                f"Makespan on the searched cut over the shortest on the published, even and greedy ones, {schedule}, "
                f"{model}",
                "x",
                "1.0",
                "the searched cut is chosen among them",
                relation="<=",
                tolerance=1e-9,
                needs=(partitions("search", schedule, model), *others),
                value=lambda own, *runs: own["makespan_s"] / min(run["makespan_s"] for run in runs),
            )


def _thousand_microbatches() -> Iterator[Claim]:
    devices, microbatches = 8, 1024
    yield _claim(
        f"thousand_devices/1f1b/{devices}",
        f"Makespan of 1F1B, {microbatches:,} microbatches on {devices} devices, over that of a recurrence of its own",
        "x",
        "1.0",
        "the order of Narayanan et al., SC'21, section 2.2.1; the times of conf/experiment/thousand_devices.yaml",
        tolerance=1e-9,
        needs=(Need("thousand_devices", {"schedule": "1f1b", "num_devices": str(devices)}),),
        value=lambda run: run["makespan_s"] / one_f_one_b_s(devices, microbatches, 1e-3, 2e-3, 1e-4),
    )


@cache
def one_f_one_b_s(devices: int, microbatches: int, forward_s: float, backward_s: float, hop_s: float) -> float:
    """Makespan of 1F1B in seconds: every rank runs its order as its inputs arrive."""
    ends: dict[tuple[str, int, int], float] = {}
    waiting = {rank: deque(_order(devices - rank - 1, microbatches)) for rank in range(devices)}
    clock = [0.0] * devices
    while any(waiting.values()):
        for rank, order in waiting.items():
            while order:
                kind, number = order[0]
                source = rank - 1 if kind == "F" else rank + 1
                if 0 <= source < devices and (kind, source, number) not in ends:
                    break
                arrives = ends[kind, source, number] + hop_s if 0 <= source < devices else 0.0
                clock[rank] = max(clock[rank], arrives) + (forward_s if kind == "F" else backward_s)
                ends[kind, rank, number] = clock[rank]
                order.popleft()
    return max(clock)


def _order(warmup: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Forwards of the warm-up, then one of each, then the backwards that are left."""
    first = min(warmup, microbatches)
    yield from (("F", number) for number in range(first))
    for number in range(microbatches - first):
        yield "F", first + number
        yield "B", number
    yield from (("B", number) for number in range(microbatches - first, microbatches))


def _within_the_peak() -> Iterator[Claim]:
    """Figure 10: tokens a second times the FLOPs of a token are at most what the devices' matrix units can do."""
    rows = [row for row in read_table("figure10") if row["status"] == "ok"]
    for model in PUBLISHED_MODELS:
        needs = tuple(need_of("figure10", row) for row in rows if row["cell.model"] == model)
        if needs:
            yield _claim(
                f"figure10/{model}/peak",
                f"Figure 10, {model}: FLOP/s of forward and backward of the fastest contender over the devices' peak",
                "x",
                "1.0",
                "closed form: corrected FLOPs of a token, matrix peak with sums in fp32",
                relation="<=",
                tolerance=0.0,
                needs=(roofline("corrected", _CLUSTER, model), *needs),
                value=_share_of_peak,
            )


def _share_of_peak(form: Record, *runs: Record) -> float:
    cluster = runs[0]["config"]["cluster"]
    # Frozen weights have no gradient: their backward is as much work as the forward, and else twice as much.
    passes = 2 if form["trainable_parameters"] < form["total_parameters"] else 3
    flops_per_s = passes * form["forward_flops_per_token"] * max(run["tokens_per_s"] for run in runs)
    return float(flops_per_s / (runs[0]["num_devices"] * cluster["wide_matmul_flops_per_s"]))
