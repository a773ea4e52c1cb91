"""Figures 10 and 11: throughput and longest sequences, measured on a machine that is not here.

A bar of figure 10 whose system a schedule stands for is set against that schedule with the settings of the run script
(experiment=figure10_published): `predicted` within 15 %, otherwise our model misses it, and the missing term is named.
"""

from collections.abc import Iterator
from typing import Any

from analysis.claims.claim import Claim, Record, Value
from analysis.claims.evidence import Need
from analysis.claims.printed import Printed, cell, table, where
from analysis.exhibits.style import method_name, model_name
from analysis.records.paper import PUBLISHED_MODELS
from rpbench.advice.published_runs import SYSTEMS

THROUGHPUT = "Figure 10: throughput on 8 RTX 4090"
LENGTHS = "Figure 11: longest sequences on 8 RTX 4090"

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

_MACHINE = "eight RTX 4090 and 800 GB of host memory"
_NAMES = {name: model for model, name in PUBLISHED_MODELS.items()}


def claims() -> Iterator[Claim]:
    """Every bar of both figures; what did not run is a claim as well."""
    for row in table("throughput"):
        published = cell("throughput", "tokens_per_s", row, f"{row['system']}, {row['model']}")
        yield _claim(
            row,
            "throughput",
            THROUGHPUT,
            "RoundPipe, figure 10 (section 5.2)",
            "throughput",
            "tokens/s",
            published,
        )
    for row in table("max_seq_len"):
        published = cell("max_seq_len", "max_seq_len_published_k", row, f"{row['system']}, {row['model']}")
        yield _claim(
            row,
            "max_seq_len",
            LENGTHS,
            "RoundPipe, figure 11 (section 5.2)",
            "longest sequence",
            "ktokens",
            published,
        )


def _claim(
    row: dict[str, str],
    name: str,
    section: str,
    figure: str,
    metric: str,
    unit: str,
    published: Printed | None,
) -> Claim:
    system, model = row["system"], _NAMES[row["model"]]
    if published is None:
        published = Printed(row["status"], where(name, "status", f"{row['system']}, {row['model']}", row["source"]))
    simulated = name == "throughput" and system in SYSTEMS
    return Claim(
        id=f"{name}/{system}/{model}",
        section=section,
        source="RoundPipe library, README" if system == "fsdp-offload" else figure,
        statement=f"{method_name(system)} on {model_name(model)}: {metric}",
        metric=metric,
        unit=unit if row["status"] == "ok" else "",
        published=published,
        **(_compared(system, model, published) if simulated else _not_here(system)),
    )


def _not_here(system: str) -> dict[str, Any]:
    return {"evidence": "measured", "not_testable": _needed(system)}


def _compared(system: str, model: str, published: Printed) -> dict[str, Any]:
    """What sets a bar against our schedule of its system."""
    known = published.value
    term = MISSES.get((system, model), "")
    return {
        "evidence": "predicted",
        "needs": (Need("figure10_published", {"mode.system": system, "model": model}),),
        "value": lambda row: _pace(row, published.text),
        "wide_tolerance": NEAR * known if isinstance(known, float) else None,
        "predicts": True,
        "contradiction": f"our schedule has {{value}}: {term}" if term else "",
    }


def _pace(row: Record, status: str) -> Value:
    """Our pace, or for a run that has none the words of the published table: what does not fit cannot run either."""
    if row["status"] != "ok":
        return status if status in NO_BAR else "OOM"
    return "ok" if status in NO_BAR else row["tokens_per_s"]


def _needed(system: str) -> str:
    if system == "mobius":
        return f"{_MACHINE}, and Mobius, whose source and settings are not public"
    return _MACHINE
