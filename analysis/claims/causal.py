"""What figure 17 would show if the fused stage's forward waited for its input, as it must on a machine."""

from collections.abc import Iterator

from analysis.claims.claim import Claim
from analysis.claims.evidence import causal, steady_causal
from analysis.claims.printed import cell, printed, rows
from analysis.exhibits.style import model_name
from analysis.records.paper import PUBLISHED_MODELS

SECTION = "Figure 17 with a causal fused stage"

# Models whose single call changes; in the others the fused stage has its input in time anyway.
_AFFECTED = ("gpt_oss_20b", "qwen3_32b")
# The same of calls back to back: microbatches a call.
_AFFECTED_CALLS = {"qwen3_1p7b": (8, 9, 10), "gpt_oss_20b": (8, 9, 10), "qwen3_32b": (8,)}
_WHY = (
    "the artifact lets the head's forward in the fused stage begin before its input has arrived; a fused stage that "
    "waits leaves a bubble of {value} %"
)


def claims() -> Iterator[Claim]:
    """The synchronous bar of each model and its calls back to back, in an order that a machine can keep."""
    for model in PUBLISHED_MODELS:
        yield _single_call(model)
    for model, name in PUBLISHED_MODELS.items():
        for row in rows("async_bubble", model=name, kind="simulated"):
            yield _back_to_back(model, row)


def _single_call(model: str) -> Claim:
    return Claim(
        id=f"causal/{model}/bubble_ratio_percent",
        section=SECTION,
        source="RoundPipe, figure 17 (section 5.8.1), bar RoundPipe-Sync",
        statement=f"RoundPipe on {model_name(model)}: the simulated bubble is that of a schedule a machine can run",
        metric="bubble ratio",
        unit="%",
        published=printed("bubble", "bubble_ratio_percent", scheduler="roundpipe", model=PUBLISHED_MODELS[model]),
        evidence="simulated",
        needs=(causal(model),),
        value=lambda run: 100 * run["bubble_makespan"],
        contradiction=_WHY if model in _AFFECTED else "",
    )


def _back_to_back(model: str, row: dict[str, str]) -> Claim:
    count = int(row["num_microbatches_per_call"])
    return Claim(
        id=f"causal/{model}/steady_{count}",
        section=SECTION,
        source="independent simulation of the artifact's model, 60 calls",
        statement=(
            f"RoundPipe on {model_name(model)}: the steady-state bubble is that of a schedule a machine can run, "
            f"{count} microbatches a call"
        ),
        metric="steady-state bubble",
        unit="%",
        published=cell("async_bubble", "bubble_percent", row, f"{row['model']}, {count} microbatches"),
        evidence="simulated",
        needs=(steady_causal(model, count),),
        value=lambda run: 100 * run["bubble_steady"],
        contradiction=_WHY if count in _AFFECTED_CALLS.get(model, ()) else "",
    )
