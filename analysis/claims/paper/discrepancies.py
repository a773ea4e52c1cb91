"""Discrepancies within the published data or with our evidence, from discrepancies.csv.

For each row we expect to contradict the published value and to reproduce the other one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from analysis.claims.claim import Claim, Record, Value, bubble_percent, runs, section
from analysis.claims.paper.tuning import CAPPED_PLANNER, capped_plan
from analysis.records.published import OUR_MODELS, Row, cell, rows, table

SECTION = "Discrepancies in the published data"


@dataclass(frozen=True)
class _Evidence:
    """The check of a discrepancy."""

    kind: str
    value: Callable[..., Value]  # the correct value, from the row and the records of `needs`
    needs: tuple[str, ...] = ()  # runs, in the form of `analysis.claims.claim.runs`; `{model}` is the row's
    made_from: str = ""
    at_most: bool = False  # our value may be smaller than the other value of the row


@section(100, SECTION)
def claims() -> Iterator[Claim]:
    """A claim on the published and one on the other value of each row; only the first if we cannot tell which holds."""
    for row in table("discrepancies"):
        evidence = next((each for prefix, each in _EVIDENCE.items() if row["id"].startswith(prefix)), None)
        if evidence is None:
            yield _claim(
                row,
                "published",
                f"{row['model'] or 'Environment'}: one value is stated throughout",
                value=lambda row=row: float(row["other_value"]),
                evidence="published",
                made_from="analysis/published/discrepancies.csv",
                contradiction=f"{row['what']}: {{value}} {row['unit']}",
            )
            continue
        subject, model = row["model"] or "RTX 4090", OUR_MODELS.get(row["model"], "")
        given = {
            "value": lambda *found, row=row, evidence=evidence: evidence.value(row, *found),
            "evidence": evidence.kind,
            "needs": tuple(need for words in evidence.needs for need in runs(words.format(model=model))),
            "made_from": evidence.made_from,
        }
        contradiction = f"{row['what']}. Found here: {{value}} {row['unit']}"
        holds, ought = f"{subject}: the published value holds", f"{subject}: the value it ought to be"
        values = [cell("discrepancies", column, row, row["id"]) for column in ("published_value", "other_value")]
        finer = min(value.half_unit for value in values if value is not None)  # the other's rounding may hide it
        yield _claim(row, "published", holds, **given, tolerance=finer, contradiction=contradiction)
        relation = {"relation": "<="} if evidence.at_most else {}
        yield _claim(row, "other", f"{ought}{' at most' if relation else ''}", **given, **relation)


def _claim(row: Row, which: str, statement: str, **more: Any) -> Claim:
    """A claim on the `published` or the `other` value of a row."""
    return Claim(
        id=f"discrepancies/{row['id']}/{which}",
        source=row["source"],
        statement=statement,
        metric=row["id"].replace("_", " "),
        unit=row["unit"],
        published=cell("discrepancies", f"{which}_value", row, row["id"]),
        **more,
    )


# --- evidence, by the kind of discrepancy --------------------------------------------------------------------


def _best_fsdp(name: str, column: str) -> _Evidence:
    return _Evidence(
        "published",
        lambda row: max(
            float(found[column])
            for system in ("fsdp", "fsdp-offload")
            for found in rows(name, system=system, model=row["model"])
        ),
        made_from=f"analysis/published/{name}.csv, with and without offload",
    )


def _implied_tflops(_: Row) -> float:
    threshold = next(rows("hardware", item="roofline_threshold", applies_to="rtx4090"))
    link = next(rows("hardware", item="interconnect_one_way", applies_to="rtx4090"))
    return float(threshold["value"]) * float(link["value"]) / 1e3


def _hops(row: Row, run: Record) -> float:
    """Hops that carry a tensor, from their total time."""
    return 1e3 * float(run["comm_data_s"]) / float(next(rows("layer_timings", model=row["model"]))["comm_ms"])


def _bubble(_: Row, run: Record) -> float:
    return bubble_percent(run)


_FIGURE17 = ("figure17 schedule=roundpipe model={model}",)
_ROOFLINE = "roofline mode.convention={} cluster=8x_rtx4090 model={{model}}"
# Prefix of a row's id -> its evidence; the other rows set one published statement against another.
_EVIDENCE = {
    "fsdp_offload_throughput": _best_fsdp("throughput", "tokens_per_s"),
    "fsdp_offload_max_seq_len": _best_fsdp("max_seq_len", "max_seq_len_published_k"),
    "attention_flops_recompute": _Evidence(
        "derived", lambda _, run: 1e3 * run["recompute_s"], (_ROOFLINE.format("corrected"),)
    ),
    "attention_flops_ratio": _Evidence(  # reload as published over the corrected recompute time
        "derived",
        lambda _, published, corrected: published["reload_s"] / corrected["recompute_s"],
        (_ROOFLINE.format("artifact,corrected"),),
    ),
    "peak_behind_threshold": _Evidence(
        "derived", _implied_tflops, made_from="analysis/published/hardware.csv, threshold x link"
    ),
    "planner_forward_stages_235b": _Evidence(
        "derived", lambda _, run: len(capped_plan(run).forward), _FIGURE17, CAPPED_PLANNER
    ),
    "planner_forward_stages": _Evidence(
        "derived", lambda _, run: run["num_stages"], ("partitions partition=greedy schedule=roundpipe model={model}",)
    ),
    "untuned_1f1b_8b": _Evidence("simulated", _bubble, ("hand_cuts",)),
    **{
        f"untuned_{schedule}": _Evidence(
            "simulated", _bubble, (f"partitions partition=search schedule={schedule} model={{model}}",), at_most=True
        )
        for schedule in ("1f1b", "interleaved_1f1b", "roundpipe")
    },
    "hops_counted_twice": _Evidence("simulated", _hops, _FIGURE17),
}
