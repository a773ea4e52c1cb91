"""Figure 10, action by action: throughput on eight RTX 4090, beside our schedules with the run script's settings.

A bar of figure 10 whose system a schedule stands for is set against that schedule with the settings of the run script
(experiment=figure10_published): `predicted` within 15 %, otherwise our model misses it, and the missing term is named.
"""

from collections.abc import Iterator

from analysis.claims.claim import Claim, Value, section
from analysis.claims.evidence import Need, Record
from analysis.claims.printed import Printed, Row, cell, table, where
from analysis.exhibits.style import method_name, model_name
from analysis.records.paper import PUBLISHED_MODELS
from rpbench.advice.published_runs import SYSTEMS

_NAMES = {name: model for model, name in PUBLISHED_MODELS.items()}
# How far a predicted bar may be from the published one.
NEAR = 0.15
# What the published table has in the place of a bar.
NO_BAR = ("OOM", "N/A")
_EXPERTS = "the interpreter's loop over experts has no actions"
_REFRESH = "the pass that refreshes the weights on the host has no actions"
_GATHERS = "gathers, scatters and copies wait for nothing in the schedule; in DeepSpeed they stand behind computation"
_SUMS = (
    "DeepSpeed sums all gradients, twice the bytes of a scatter, behind the computation; the schedule scatters beside"
)
_FOOTPRINT = "its footprint is 1.06 times the memory; which class of tensors is counted too large is not known"
_PRIVATE = "its batch and settings are not public"
# Bars that our schedule misses by more than that, with the term that it lacks.
MISSES = {
    ("roundpipe", "gpt_oss_20b"): _EXPERTS,
    ("roundpipe", "qwen3_235b_lora"): _EXPERTS,
    ("roundpipe-sync", "qwen3_32b"): _REFRESH,
    ("roundpipe-sync", "qwen3_235b_lora"): _EXPERTS,
    ("zero-2", "qwen3_1p7b"): _SUMS,
    ("zero-infinity", "gpt_oss_20b"): _GATHERS,
    ("zero-infinity", "qwen3_235b_lora"): _GATHERS,
    ("fsdp", "llama31_8b"): _FOOTPRINT,
    ("mobius", "qwen3_32b"): _PRIVATE,
    ("mobius", "qwen3_235b_lora"): _PRIVATE,
}


@section(120, "Figure 10: throughput on 8 RTX 4090, action by action", "RoundPipe, figure 10 (section 5.2)")
def claims() -> Iterator[Claim]:
    """Every bar of a system that one of our schedules stands for."""
    for row in table("throughput"):
        if row["system"] in SYSTEMS:
            yield _claim(row)


def _claim(row: Row) -> Claim:
    system, model = row["system"], _NAMES[row["model"]]
    of = f"{row['system']}, {row['model']}"
    published = cell("throughput", "tokens_per_s", row, of)
    if published is None:
        published = Printed(row["status"], where("throughput", "status", of, row["source"]))
    known = published.value
    term = MISSES.get((system, model), "")
    return Claim(
        id=f"by_action/{system}/{model}",
        statement_id=f"by_action/{system}",
        statement=f"{method_name(system)} on {model_name(model)}: throughput",
        metric="throughput",
        unit="tokens/s" if row["status"] == "ok" else "",
        published=published,
        evidence="predicted",
        needs=(Need("figure10_published", {"mode.system": system, "model": model}),),
        value=lambda record: _pace(record, published.text),
        wide_tolerance=NEAR * known if isinstance(known, float) else None,
        predicts=True,
        contradiction=f"our schedule has {{value}}: {term}" if term else "",
    )


def _pace(row: Record, status: str) -> Value:
    """Our pace, or for a run that has none the words of the published table: what does not fit cannot run either."""
    if row["status"] != "ok":
        return status if status in NO_BAR else "OOM"
    return "ok" if status in NO_BAR else row["tokens_per_s"]
