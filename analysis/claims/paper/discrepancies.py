"""Contradictions within the published data or with our evidence: each row of discrepancies.csv, from both sides.

Of every row, the published value is expected to be contradicted and the other value to be found again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from analysis.claims.claim import Claim, Need, Value, bubble_percent, figure17, hand_cuts, partitions, roofline, section
from analysis.claims.paper.tuning import CAPPED_PLANNER, capped_plan
from analysis.records.published import OUR_MODELS, Row, cell, rows, table

SECTION = "Discrepancies in the published data"


@dataclass(frozen=True)
class _Evidence:
    """The check of a discrepancy.

    Args:
        value: what the published value ought to be, from the records of `needs`.
        at_most: our value may be better, that is smaller, than the other value of the row.
    """

    kind: str
    value: Callable[..., Value]
    needs: tuple[Need, ...] = ()
    made_from: str = ""
    at_most: bool = False


@section(100, SECTION)
def claims() -> Iterator[Claim]:
    """Two claims a row: what was published, and what it ought to be."""
    for row in table("discrepancies"):
        evidence = _evidence(row)
        if evidence is None:
            yield _stated(row)
        else:
            yield _published(row, evidence)
            yield _corrected(row, evidence)


def _claim(row: Row, which: str, value: Callable[..., Value], statement: str, **more: Any) -> Claim:
    """A claim on one of the values of a row, `published` or `other`."""
    return Claim(
        id=f"discrepancies/{row['id']}/{which}",
        source=row["source"],
        statement=statement,
        metric=row["id"].replace("_", " "),
        unit=row["unit"],
        published=cell("discrepancies", f"{which}_value", row, row["id"]),
        value=value,
        **more,
    )


def _published(row: Row, evidence: _Evidence) -> Claim:
    return _claim(
        row,
        "published",
        evidence.value,
        f"{row['model'] or 'RTX 4090'}: the published value holds",
        evidence=evidence.kind,
        needs=evidence.needs,
        made_from=evidence.made_from,
        tolerance=_finer(row),
        contradiction=f"{row['what']}. Found here: {{value}} {row['unit']}",
    )


def _corrected(row: Row, evidence: _Evidence) -> Claim:
    return _claim(
        row,
        "other",
        evidence.value,
        f"{row['model'] or 'RTX 4090'}: the value it ought to be{' at most' if evidence.at_most else ''}",
        relation="<=" if evidence.at_most else "=",
        evidence=evidence.kind,
        needs=evidence.needs,
        made_from=evidence.made_from,
    )


def _stated(row: Row) -> Claim:
    """Two published values that differ, and nothing here to tell which is right."""
    return _claim(
        row,
        "published",
        lambda: float(row["other_value"]),
        f"{row['model'] or 'Environment'}: one value is stated throughout",
        evidence="published",
        made_from="analysis/published/discrepancies.csv",
        contradiction=f"{row['what']}: {{value}} {row['unit']}",
    )


def _finer(row: Row) -> float:
    """Half a unit of the last digit of the value with more digits: the two may differ by less than one's rounding."""
    values = [cell("discrepancies", column, row, row["id"]) for column in ("published_value", "other_value")]
    return min(value.half_unit for value in values if value is not None)


# --- evidence, by the kind of discrepancy --------------------------------------------------------------------


def _evidence(row: Row) -> _Evidence | None:
    model = OUR_MODELS.get(row["model"], "")
    for prefix, find in _FINDERS.items():
        if row["id"].startswith(prefix):
            return find(row, model)
    return None


def _best_fsdp(name: str, column: str, model: str) -> _Evidence:
    return _Evidence(
        "published",
        lambda: max(float(r[column]) for s in ("fsdp", "fsdp-offload") for r in rows(name, system=s, model=model)),
        made_from=f"analysis/published/{name}.csv, with and without offload",
    )


def _ratio(row: Row, model: str) -> _Evidence:
    """Reload as published over the corrected recompute time."""
    return _Evidence(
        "derived",
        lambda published, corrected: published["reload_s"] / corrected["recompute_s"],
        tuple(roofline(convention, "8x_rtx4090", model) for convention in ("artifact", "corrected")),
    )


def _peak(row: Row, model: str) -> _Evidence:
    def implied_tflops() -> float:
        threshold = next(rows("hardware", item="roofline_threshold", applies_to="rtx4090"))
        link = next(rows("hardware", item="interconnect_one_way", applies_to="rtx4090"))
        return float(threshold["value"]) * float(link["value"]) / 1e3

    return _Evidence("derived", implied_tflops, made_from="analysis/published/hardware.csv, threshold x link")


def _capped_planner_stages(row: Row, model: str) -> _Evidence:
    return _Evidence(
        "derived", lambda run: len(capped_plan(run).forward), (figure17("roundpipe", model),), CAPPED_PLANNER
    )


def _searched(schedule: str) -> Callable[[Row, str], _Evidence]:
    return lambda row, model: _Evidence(
        "simulated", bubble_percent, (partitions("search", schedule, model),), at_most=True
    )


def _hops(row: Row, model: str) -> _Evidence:
    """Hops that carry a tensor, from their total time."""
    published = next(rows("layer_timings", model=row["model"]))
    return _Evidence(
        "simulated", lambda run: 1e3 * run["comm_data_s"] / float(published["comm_ms"]), (figure17("roundpipe", model),)
    )


# Beginning of a row's id -> its evidence; a row that none fits is a statement against a statement.
_FINDERS: dict[str, Callable[[Row, str], _Evidence]] = {
    "fsdp_offload_throughput": lambda row, _: _best_fsdp("throughput", "tokens_per_s", row["model"]),
    "fsdp_offload_max_seq_len": lambda row, _: _best_fsdp("max_seq_len", "max_seq_len_published_k", row["model"]),
    "attention_flops_recompute": lambda _, model: _Evidence(
        "derived", lambda run: 1e3 * run["recompute_s"], (roofline("corrected", "8x_rtx4090", model),)
    ),
    "attention_flops_ratio": _ratio,
    "peak_behind_threshold": _peak,
    "planner_forward_stages_235b": _capped_planner_stages,
    "planner_forward_stages": lambda _, model: _Evidence(
        "derived", lambda run: run["num_stages"], (partitions("greedy", "roundpipe", model),)
    ),
    "untuned_1f1b_8b": lambda _, model: _Evidence("simulated", bubble_percent, (hand_cuts(),)),
    "untuned_1f1b": _searched("1f1b"),
    "untuned_interleaved_1f1b": _searched("interleaved_1f1b"),
    "untuned_roundpipe": _searched("roundpipe"),
    "hops_counted_twice": _hops,
}
