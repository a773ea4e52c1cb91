"""One line for people about a record."""

from collections.abc import Callable

from rpbench.harness.record import Record


def describe(row: Record) -> str:
    """What was run and what came out."""
    what, outcome = _DESCRIBED.get(row["mode"], (_schedule, _timed))
    if row["status"] != "ok":
        return f"{what(row)}: {row['status']}, {row['reason']}"
    return f"{what(row)}{outcome(row)}"


def _schedule(row: Record) -> str:
    return f"{row['schedule']} {row['model']} {row['num_devices']}x{row['num_microbatches']} {row['partition']}"


def _timed(row: Record) -> str:
    unit = "slots" if row["cost"] == "unit" and row["evidence"] == "simulated" else "s"
    text = f": makespan {row['makespan_s']:.6g} {unit}, bubble {100 * row['bubble_makespan']:.2f} %"
    if "grad_max_abs_diff" in row:
        text += f", gradients within {row['grad_max_abs_diff']:g} of plain training"
    return text


def _system(row: Record) -> str:
    system = row.get("system") or row["schedule"]
    return f"{system} {row['model']} on {row['num_devices']} of {row['cluster']}, predicted"


def _pace(row: Record) -> str:
    if "tokens_per_s_low" not in row:  # the published run, action by action
        return f": {row['tokens_per_s']:,.0f} tokens/s"
    rate, low, high = (row[f"tokens_per_s{end}"] for end in ("", "_low", "_high"))
    return f": {rate:,.0f} tokens/s ({low:,.0f} to {high:,.0f}), {row['memory_margin']:.0%} of memory left"


def _formulas(row: Record) -> str:
    return f"closed forms of {row['model']} on {row['cluster']}"


def _convention(row: Record) -> str:
    return f" ({row['convention']})"


def _contender(row: Record) -> str:
    return f"duel {row['model']} {row['contender']}"


def _clocked(row: Record) -> str:
    return f": {row['makespan_s']:.3f} s, replay {row['replay_makespan_s']:.3f} s, {row['partition_layers']}"


def _entrant(row: Record) -> str:
    return f"torch duel {row['model']} {row['contender']}"


def _over_own(row: Record) -> str:
    return f": {row['makespan_s']:.3f} s, replay {row['replay_makespan_s']:.3f} s, {row['verdict']}"


_DESCRIBED: dict[str, tuple[Callable[[Record], str], Callable[[Record], str]]] = {
    "predict": (_system, _pace),
    "roofline": (_formulas, _convention),
    "duel": (_contender, _clocked),
    "torch_duel": (_entrant, _over_own),
}
