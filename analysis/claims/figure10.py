"""Figures 10 and 11: throughput and longest sequences, measured on a machine that is not here."""

from collections.abc import Iterator

from analysis.claims.claim import Claim
from analysis.claims.printed import Printed, cell, table, where
from analysis.exhibits.style import method_name, model_name
from analysis.records.paper import PUBLISHED_MODELS

THROUGHPUT = "Figure 10: throughput on 8 RTX 4090"
LENGTHS = "Figure 11: longest sequences on 8 RTX 4090"

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
    return Claim(
        id=f"{name}/{system}/{model}",
        section=section,
        source="RoundPipe library, README" if system == "fsdp-offload" else figure,
        statement=f"{method_name(system)} on {model_name(model)}: {metric}",
        metric=metric,
        unit=unit if row["status"] == "ok" else "",
        published=published,
        evidence="measured",
        not_testable=_needed(system),
    )


def _needed(system: str) -> str:
    if system == "mobius":
        return f"{_MACHINE}, and Mobius, whose source and settings are not public"
    return _MACHINE
