"""Regression: every cell of every experiment, field by field, as it came out when its values were accepted.

`analysis/claims/expected/<experiment>.csv` has a row for each record: the choices of its cell, and the fields that
exhibits and statements rest on. A cell is one claim. Fields of a simulation are exact but for rounding; of a measured
run those that do not depend on the machine's pace - parity, counts, bytes - are held to the same.
"""

from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from analysis.claims.claim import Claim, Record
from analysis.claims.evidence import Need
from analysis.claims.expected import CONTRADICTIONS, FOLDER, STATEMENTS, read_table
from analysis.claims.printed import Printed

SECTION = "Every cell as it was accepted"
AS_ACCEPTED = "as accepted"
_TRAINED = 1e-3  # of a loss: another version of torch adds in another order, and steps carry that on
_LOSSES = ("loss", "loss_curve")
REL_TOLERANCE = 1e-6  # of a number that is computed; another platform rounds the last bits otherwise
_CELL = "cell."  # how columns begin that say which cell a row is of
CONTENDER = "contender"

# Fields that exhibits and statements rest on, of whatever experiment has them.
COMPUTED = (
    "makespan_s",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_low",
    "tokens_per_s_high",
    "bubble_makespan",
    "bubble_span",
    "bubble_over_ideal",
    "bubble_steady",
    "fill_s",
    "switch_s",
    "drain_s",
    "intra_s",
    "comm_total_s",
    "comm_data_s",
    "comm_exposed_s",
    "transfer_exposed_s",
    "recompute_s",
    "reload_s",
    "reload_over_recompute",
    "ideal_bubble",
    "ridge_flop_per_byte",
    "smallest_compute_bound_batch",
    "forward_flops_per_token",
    "intensity_flop_per_byte",
    "memory_margin",
    "loss",
    "loss_curve",
    "loss_curve_s",
    "bubble_slots",
)
# What does not depend on how fast a machine is: also of runs that are measured.
EXACT = (
    "status",
    "evidence",
    "partition_layers",
    "num_stages",
    "num_backward_stages",
    "num_updates",
    "num_actions",
    "num_layer_events",
    "staleness_steps",
    "weight_versions",
    "tokens_per_step",
    "peak_in_flight",
    "peak_memory_bytes",
    "host_memory_bytes",
    "h2d_bytes",
    "d2h_bytes",
    "net_bytes",
    "grad_max_abs_diff",
    "weight_max_abs_diff",
    "versions_as_reference",
    "num_microbatches_verified",
    "total_parameters",
    "trainable_parameters",
    "parity",
)
# A plan of a measured run is searched on times that were measured before it.
_OF_A_PLAN: tuple[str, ...] = (
    "partition_layers",
    "num_stages",
    "num_backward_stages",
    "num_actions",
    "num_updates",
    "num_layer_events",
)
_OF_A_PLAN += ("peak_in_flight", "peak_memory_bytes", "host_memory_bytes", "h2d_bytes", "d2h_bytes", "net_bytes")


def claims() -> Iterator[Claim]:
    """A claim for each row of each expected table."""
    for path in sorted(FOLDER.glob("*.csv")):
        if path.stem not in (CONTRADICTIONS, STATEMENTS):
            for row in read_table(path.stem):
                yield _claim(path.stem, row)


def _claim(experiment: str, row: Mapping[str, str]) -> Claim:
    choices = {key.removeprefix(_CELL): value for key, value in row.items() if key.startswith(_CELL) and value}
    declared = {key: value for key, value in row.items() if not key.startswith(_CELL) and key != CONTENDER and value}
    contender = row.get(CONTENDER) or None
    words = " ".join(filter(None, (*choices.values(), contender))) or experiment
    return Claim(
        id=f"regression/{experiment}/{words}",
        statement_id=f"regression/{experiment}",
        whose="ours",
        section=SECTION,
        source=f"analysis/claims/expected/{experiment}.csv",
        statement=f"experiment={experiment}, {words}: every field as it was accepted",
        metric="fields that differ",
        unit="",
        published=Printed(AS_ACCEPTED, f"analysis/claims/expected/{experiment}.csv"),
        evidence=declared.get("evidence") or "simulated",
        needs=(Need(experiment, choices, contender),),
        value=lambda run: compared(run, declared),
    )


def compared(run: Record, declared: Mapping[str, str]) -> str:
    """`as accepted`, or the fields of a record that are not what they were, with both values."""
    differing = [
        f"{name} {written(run.get(name))} for {text}"
        for name, text in declared.items()
        if not _same(run.get(name), text)
    ]
    return "; ".join(differing) or AS_ACCEPTED


def row_of(choices: Mapping[str, str], run: Record) -> dict[str, str]:
    """What an expected table says of a record."""
    names = fields_of(run)
    cell = {f"{_CELL}{key}": value for key, value in choices.items()}
    kept = {name: written(run[name]) for name in names if _is_there(run.get(name))}
    return {**cell, CONTENDER: run.get(CONTENDER) or "", **kept}


def fields_of(run: Record) -> tuple[str, ...]:
    """The fields of a record that can be held to what they were."""
    if run["evidence"] != "measured":
        return (*EXACT, *COMPUTED)
    planned_here = run["mode"] == "duel" or run["cost"] == "profiled"
    return tuple(name for name in EXACT if not (planned_here and name in _OF_A_PLAN))


def written(value: Any) -> str:
    """A value as a table has it: numbers in ten digits, lists between semicolons, as `3x1.5` where they repeat."""
    if isinstance(value, list):
        if len(value) > 1 and len(set(map(str, value))) == 1:
            return f"{len(value)}x{written(value[0])}"
        return ";".join(map(written, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _is_there(value: Any) -> bool:
    return value is not None and value == value and value != []


def _same(value: Any, text: str, rel_tolerance: float) -> bool:
    if isinstance(value, list):
        parts = _unfolded(text)
        same = (_same(item, part, rel_tolerance) for item, part in zip(value, parts, strict=False))
        return len(parts) == len(value) and all(same)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value) == text
    try:
        return isclose(value, float(text), rel_tol=rel_tolerance, abs_tol=1e-12)
    except ValueError:
        return False


def _unfolded(text: str) -> list[str]:
    count, times, value = text.partition("x")
    return [value] * int(count) if times and count.isdigit() else text.split(";")
