"""Figure 17: every number that the artifact's simulator printed for its 25 cells, and the bars it calls asynchronous.

Below them calls back to back, and both with a fused stage whose forward waits for its input, as it must on a machine.
"""

from collections.abc import Iterator

from analysis.claims.claim import Claim, Need, causal, figure17, section, stated, steady_causal, steady_state
from analysis.exhibits.style import method_name, model_name
from analysis.exhibits.tables.published_cells import cell_numbers
from analysis.records.published import PUBLISHED_MODELS, Printed, cell, printed, rows, throughput_run
from analysis.records.runs import SCHEDULES

SOURCE = "RoundPipe, figure 17 (section 5.8.1)"


@section(10, "Figure 17: the simulated bubbles", SOURCE)
def figure17_claims() -> Iterator[Claim]:
    """Fifteen numbers a cell, and five bars."""
    for schedule in SCHEDULES:
        for model in PUBLISHED_MODELS:
            yield from _cell(schedule, model)
    for model in PUBLISHED_MODELS:
        yield _label(model)
        yield _label_as_steady_state(model, _ROUND, "rounds", "as many as a round of the artifact holds")
        called = int(throughput_run(model)["microbatches_per_call"])
        yield _label_as_steady_state(model, called, "benchmark", "as many as the throughput runs take")


# Column of bubble.csv -> what it is called, and its unit.
_FIELDS = {
    "layer_events": ("layer events", "events"),
    "makespan_ms": ("makespan", "ms"),
    "bubble_time_gpu_ms": ("bubble time", "GPU-ms"),
    "bubble_ratio_percent": ("bubble ratio", "%"),
    **{
        f"{part}_{column}": (f"{part} {metric}", unit)
        for part in ("fill", "switch", "drain", "intra")
        for column, metric, unit in (("time_gpu_ms", "time", "GPU-ms"), ("ratio_percent", "ratio", "%"))
    },
    "comm_total_ms": ("total communication", "ms"),
    "comm_exposed_ms": ("exposed communication", "ms"),
    "comm_exposed_ratio_percent": ("exposed communication ratio", "%"),
}


def _cell(schedule: str, model: str) -> Iterator[Claim]:
    subject = f"{method_name(schedule)} on {model_name(model)}"
    for column, (metric, unit) in _FIELDS.items():
        yield Claim(
            id=f"figure17/{schedule}/{model}/{column}",
            statement_id=f"figure17/{schedule}/{model}",
            statement=f"{subject}: {metric} of one call of 16 microbatches on 8 GPUs",
            metric=metric,
            unit=unit,
            published=printed("bubble", column, scheduler=schedule.replace("_", "-"), model=PUBLISHED_MODELS[model]),
            tolerance=0.0 if unit == "events" else None,
            needs=(figure17(schedule, model),),
            value=lambda run, column=column: cell_numbers(run)[column],
        )


# --- the bars "RoundPipe", beside "RoundPipe-Sync" -----------------------------------------------------------

# The artifact's simulator runs at most as many microbatches a round as there are GPUs.
_ROUND = 8


def _label(model: str) -> Claim:
    return Claim(
        id=f"figure17/asynchronous/{model}/label",
        source=f"{SOURCE}, bar RoundPipe",
        statement=f"RoundPipe on {model_name(model)}: the bar for asynchronous steps is switch plus intra of one call",
        metric="asynchronous bubble, as labelled",
        unit="%",
        published=_bar(model),
        needs=(figure17("roundpipe", model),),
        value=lambda run: sum(cell_numbers(run)[f"{part}_ratio_percent"] for part in ("switch", "intra")),
    )


def _label_as_steady_state(model: str, num_microbatches: int, which: str, why: str) -> Claim:
    return Claim(
        id=f"figure17/asynchronous/{model}/steady_state_{which}",
        source=f"{SOURCE}, bar RoundPipe",
        statement=(
            f"RoundPipe on {model_name(model)}: the bar is the bubble of asynchronous steps; calls of "
            f"{num_microbatches} microbatches, {why}"
        ),
        metric="bubble of calls back to back",
        unit="%",
        published=_bar(model),
        needs=(steady_state(model, num_microbatches),),
        value=lambda run: 100 * run["bubble_steady"],
        contradiction=(
            "the bar is the synchronous call with fill and drain set to 0, over an unchanged denominator; 60 calls "
            "simulated back to back leave {value} %"
        ),
    )


def _bar(model: str) -> Printed | None:
    return printed(
        "async_bubble", "bubble_percent", model=PUBLISHED_MODELS[model], num_microbatches_per_call="artifact label"
    )


# A hundredth of a percentage point: the last digit of the reference simulation, which is not the paper's.
_ONE_UNIT = 0.01


@section(20, "Asynchronous steps, simulated back to back")
def back_to_back() -> Iterator[Claim]:
    """Twenty values of an independent simulation: five models, calls of 8, 9, 10 and 16 microbatches."""
    for model, name in PUBLISHED_MODELS.items():
        for row in rows("async_bubble", model=name, kind="simulated"):
            num_microbatches = int(row["num_microbatches_per_call"])
            yield Claim(
                id=f"steady_state/{model}/{num_microbatches}",
                whose="another public source's",
                source="independent simulation of the artifact's model, 60 calls; the paper shows no such number",
                statement=(
                    f"RoundPipe on {model_name(model)}: bubble between the ends of calls 20 and 50, "
                    f"{num_microbatches} microbatches a call"
                ),
                metric="bubble between the ends of calls",
                unit="%",
                published=cell("async_bubble", "bubble_percent", row, f"{name}, {num_microbatches} microbatches"),
                wide_tolerance=_ONE_UNIT,
                needs=(steady_state(model, num_microbatches),),
                value=lambda run: 100 * run["bubble_between_ends"],
            )


_SENSE = "waiting can only take time"


@section(30, "Figure 17 with a causal fused stage", _SENSE)
def causal_claims() -> Iterator[Claim]:
    """The bubble of each model's call and of its calls back to back, and that waiting is never faster."""
    for model, name in PUBLISHED_MODELS.items():
        words = f"RoundPipe on {model_name(model)}, a fused stage that waits: bubble of one call"
        needs = (causal(model),)
        yield stated(f"causal/{model}/single", words, "%", needs, lambda run: 100 * run["bubble_makespan"])
        yield _not_faster(f"causal/{model}/single_not_faster", model, figure17("roundpipe", model), causal(model))
        for row in rows("async_bubble", model=name, kind="simulated"):
            count = int(row["num_microbatches_per_call"])
            yield from _back_to_back(model, count)


def _back_to_back(model: str, count: int) -> Iterator[Claim]:
    waits = steady_causal(model, count)
    words = f"RoundPipe on {model_name(model)}, a fused stage that waits: bubble of calls of {count} back to back"
    name = f"causal/{model}/steady_{count}"
    yield stated(name, words, "%", (waits,), lambda run: 100 * run["bubble_steady"])
    yield _not_faster(f"{name}_not_faster", model, steady_state(model, count), waits)


def _not_faster(name: str, model: str, *needs: Need) -> Claim:
    return Claim(
        id=name,
        statement_id="causal/waiting_is_not_faster",
        whose="ours against ours",
        statement=f"RoundPipe on {model_name(model)}: a fused stage that waits for its input is not faster",
        metric="time saved by waiting",
        unit="ms",
        published=Printed("0", _SENSE),
        relation="<=",
        tolerance=1e-6,
        needs=needs,
        value=lambda first, second: 1e3 * (float(first["step_time_s"]) - float(second["step_time_s"])),
    )
