"""Our schedules on torch's own runtime: their cost, the time that our graph explains, and equal gradients.

A measured claim is refuted only when its whole interval lies beyond the bound; a busy machine widens intervals.
"""

from collections.abc import Iterator
from functools import partial

from analysis.claims.claim import Claim, Need, Record, claim, section
from analysis.records.published import Printed
from rpbench.run.modes.duel.contenders import ENGINES, TABLE, torch_contenders
from rpbench.run.modes.duel.findings import derived_fields

SCHEDULES = ("1f1b", "zb_v")
EXPERIMENT = "torch_duel"
MOST_OVER_OWN = 1.02
LEAST_EXPLAINED = 0.9
_EXPLAINED = ("replay_over_wall", "high")
_SOURCE = "docs/torch_runtime.md"
AGREE = "as its runs say"


@section(130, "Our tables on torch's runtime", _SOURCE)
def claims() -> Iterator[Claim]:
    """For each schedule: cost, fraction that the replay explains, parity, and fields that follow from the runs."""
    all_runs = tuple(Need(EXPERIMENT, contender=each.name) for each in torch_contenders(SCHEDULES))
    for schedule in SCHEDULES:
        needs = tuple(Need(EXPERIMENT, contender=f"{schedule}/{role}") for role in ENGINES)
        for what, bound, value, behind in (
            ("cost", f"{MOST_OVER_OWN}", _least_over_own, needs),
            ("replay", f"{1 - LEAST_EXPLAINED:.1f}", lambda *rows: 1 - _end(_of(TABLE, rows), *_EXPLAINED), needs),
            ("parity", "0", _largest_difference, needs),
            ("figures", AGREE, partial(_recomputed, schedule), all_runs),
        ):
            name, published = f"torch_duel/{{schedule}}/{what}", Printed(bound, _SOURCE)
            yield claim(name, value, needs=behind, published=published, schedule=schedule)


def _of(role: str, rows: tuple[Record, ...]) -> Record:
    return next(row for row in rows if row["role"] == role)


def _end(row: Record, name: str, end: str) -> float:
    """An end of an interval; ValueError without one, because nothing was compared."""
    value = row.get(f"{name}_{end}")
    if row["status"] != "ok" or value is None:
        raise ValueError(f"{row['contender']}: no interval of {name}: {row.get('verdict_reason') or row['reason']}")
    return float(value)


def _least_over_own(*rows: Record) -> float:
    """From undisturbed comparisons if there are enough, else from all."""
    table = _of(TABLE, rows)
    clean = table.get("over_own") is not None
    return _end(table, "over_own" if clean else "over_own_disturbed", "low")


def _largest_difference(*rows: Record) -> float:
    ours = [row for row in rows if row["engine"] != "torch's schedule"]
    return max(float(row[key]) for row in ours for key in ("grad_max_abs_diff", "weight_max_abs_diff"))


def _recomputed(schedule: str, *rows: Record) -> str:
    """The fields of a schedule's records that differ when computed again from the runs in them."""
    due = derived_fields({row["contender"]: row for row in rows})
    wrong = [
        f"{row['contender']} {name}"
        for row in rows
        if row["schedule"] == schedule
        for name, value in due.get(row["contender"], {}).items()
        if not _same(row.get(name), value)
    ]
    return ", ".join(wrong) or AGREE


def _same(found: object, due: object) -> bool:
    if isinstance(found, dict) and isinstance(due, dict):
        return found.keys() == due.keys() and all(_same(found[key], due[key]) for key in due)
    if isinstance(found, float) and isinstance(due, float):
        return abs(found - due) <= 1e-9 * max(1.0, abs(due))
    return found == due
