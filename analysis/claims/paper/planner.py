"""The released planner: the stage counts it makes, how its plans simulate, and what the artifact simulated instead."""

from collections.abc import Callable, Iterator

from analysis.claims.claim import Claim, Record, section
from analysis.claims.evidence import figure17, partitions
from analysis.claims.printed import Row, cell, printed, table
from analysis.exhibits.style import model_name
from analysis.records.paper import PUBLISHED_MODELS
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.ir.partition import Partition
from rpbench.plan.greedy import LIMIT_24GB_CARD_BYTES, plan_released
from rpbench.workload.architecture import Architecture

_NAMES = {name: model for model, name in PUBLISHED_MODELS.items()}

CAPPED_PLANNER = "rpbench.plan.greedy for the model of the record, under LIMIT_24GB_CARD_BYTES"

# Models for which the artifact simulated another number of stages than the planner makes.
_OTHER_COUNTS = ("gpt_oss_20b", "qwen3_32b")


@section(50, "The released planner", "independent re-run of the released planner on the artifact's timings")
def claims() -> Iterator[Claim]:
    """Counts with and without the memory cap of a 24 GB card, bubbles of the plans, counts of the artifact."""
    for row in table("planner"):
        if row["memory_cap"] == "none":
            yield from _uncapped(row)
        else:
            yield from _capped(row)
    for model in PUBLISHED_MODELS:
        yield from _counts_of_the_artifact(model)


_COUNTS: dict[str, tuple[str, Callable[[Record], float]]] = {
    "forward_stages": ("forward stages", lambda run: run["num_stages"]),
    "backward_stages": ("backward stages", lambda run: run["num_backward_stages"]),
}

_BUBBLES: dict[str, tuple[str, Callable[[Record], float]]] = {
    "sync_bubble_percent": ("bubble ratio", lambda run: 100 * run["bubble_makespan"]),
    "switch_plus_intra_percent": (
        "switch and intra ratio",
        lambda run: 100 * (run["switch_s"] + run["intra_s"]) / (run["num_devices"] * run["makespan_s"]),
    ),
}


def _uncapped(row: Row) -> Iterator[Claim]:
    model = _NAMES[row["model"]]
    for column, (metric, value) in (_COUNTS | _BUBBLES).items():
        published = cell("planner", column, row, f"{row['model']}, no memory cap")
        if published is not None:
            counts = column in _COUNTS
            yield Claim(
                id=f"planner/{model}/{column}",
                whose="another public source's",
                statement=f"{model_name(model)}: {metric} of the released planner's cut, no memory cap",
                metric=metric,
                unit="stages" if counts else "%",
                published=published,
                tolerance=0.0 if counts else None,
                evidence="derived" if counts else "simulated",
                needs=(partitions("greedy", "roundpipe", model),),
                value=value,
            )


def _capped(row: Row) -> Iterator[Claim]:
    model = _NAMES[row["model"]]
    for column, direction in (("forward_stages", "forward"), ("backward_stages", "backward")):
        yield Claim(
            id=f"planner/{model}/{column}_24gb",
            whose="another public source's",
            statement=f"{model_name(model)}: {direction} stages of the released planner's cut, cap of a 24 GB card",
            metric=f"{direction} stages, capped",
            unit="stages",
            published=cell("planner", column, row, f"{row['model']}, {row['memory_cap']}"),
            tolerance=0.0,
            evidence="derived",
            needs=(figure17("roundpipe", model),),
            made_from=CAPPED_PLANNER,
            value=lambda run, direction=direction: len(getattr(capped_plan(run), direction)),
        )


def capped_plan(run: Record) -> Partition:
    """The released planner's cut of a run's model when a stage and the next one share a 24 GB card."""
    model = Architecture(**run["config"]["model"])
    tokens = published_tokens_per_microbatch(model.published_name or "")
    times = published_times(model.published_name or "")
    return plan_released(
        times, run["num_devices"], sizes=model_bytes(model, tokens), memory_limit_bytes=LIMIT_24GB_CARD_BYTES
    )


def _counts_of_the_artifact(model: str) -> Iterator[Claim]:
    for direction, (metric, value) in zip(("forward", "backward"), _COUNTS.values(), strict=True):
        differs = model in _OTHER_COUNTS and direction == "forward"
        yield Claim(
            id=f"planner/{model}/artifact_{direction}_stages",
            source="RoundPipe, artifact, partitions behind figure 17",
            statement=f"{model_name(model)}: the simulated cut has as many {direction} stages as the planner makes",
            metric=metric,
            unit="stages",
            published=printed(
                "partitions", "num_stages", scheduler="roundpipe", model=PUBLISHED_MODELS[model], direction=direction
            ),
            tolerance=0.0,
            evidence="derived",
            needs=(partitions("greedy", "roundpipe", model),),
            value=value,
            contradiction="the released planner makes {value} of the same timings" if differs else "",
        )
