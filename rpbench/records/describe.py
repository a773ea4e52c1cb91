"""One line for people about a record, and a short table of it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from rpbench import registry
from rpbench.records.record import Record

Clock = Literal["seconds", "slots"]

BUSY = 0.15  # cores that other programs may have before it is worth a warning
IN_SLOTS = "times are slots, not seconds; cost=analytic or other costs in seconds give them"


def clock(row: Mapping[str, Any]) -> Clock:
    """The unit of fields that end in `_s`: slots for `cost=unit` on a virtual clock, a dry run, or an import's word."""
    evidence = row.get("evidence")
    in_slots = evidence == "dry" or (row.get("cost") == "unit" and evidence == "simulated")
    return "slots" if in_slots or row.get("clock") == "slots" else "seconds"


def unit(row: Mapping[str, Any]) -> Literal["s", "slots"]:
    return "slots" if clock(row) == "slots" else "s"


def under_unit(row: Mapping[str, Any], key: str) -> str:
    """The name of a record's field with its unit: `makespan_s`, or `makespan_slots`."""
    is_time = key.endswith("_s") and not key.endswith("_per_s")
    return f"{key.removesuffix('_s')}_slots" if is_time and clock(row) == "slots" else key


# Keys whose values the line begins with.
_SEEN = ("schedule", "model", "num_devices", "num_microbatches", "partition", "mode.system", "mode")


def describe(row: Record) -> str:
    """A sentence about a run: its request, its result, and what takes no time in it."""
    outcome = _DESCRIBED.get(row["mode"], (_schedule, _timed))[1]
    if row["status"] != "ok":
        return f"{label(row)}: {row['status']}, {row['reason']}"
    out = left_out(row)
    return f"{label(row)}{outcome(row)}" + (f"; left out: {out}" if out else "") + _way_to_seconds(row)


def label(row: Record) -> str:
    """The run as requested, with the beginning of its id, so that no two runs share a label."""
    what = _DESCRIBED.get(row["mode"], (_schedule, _timed))[0]
    asked = [item.lstrip("+") for item in row.get("overrides", ())]
    more = " ".join(item for item in asked if item.partition("=")[0] not in _SEEN)
    return " ".join(filter(None, (what(row), more, f"[{row['run_id'][:8]}]")))


def left_out(row: Record) -> str:
    """The work that takes no time in this run; "" where all is charged, or times are slots."""
    asked = row.get("config", {})
    if row.get("mesh") is not None and row["evidence"] == "predicted":
        return ""
    if asked.get("charge") == "bytes" and row.get("num_steps") == 1 and row.get("host_memory_bytes"):
        return "the host's update after the last backward (num_steps=3 has it, between steps)"
    in_hops = row["mode"] == "simulate" and asked.get("charge") == "hops" and asked.get("tuning_budget") is None
    if not in_hops or row["cost"] == "unit" or asked.get("model", {}).get("name") == "abstract":
        return ""
    entry = registry.entries().get(row.get("generator", ""))
    streams = asked.get("offload") == "none" and entry is not None and entry.separate_cuts
    parts = ["transfers of weights and gradients"] if streams else []
    machine = "" if asked.get("cluster", {}).get("memory_bytes_per_s") else "cluster=NAME "
    words = f"{machine}charge=bytes{' offload=all' if streams else ''}"
    return f"{' and '.join([*parts, 'the optimizer'])} (charged with {words})"


def _way_to_seconds(row: Record) -> str:
    """The hint how to get seconds, for slots of a model on a known machine; else ""."""
    config = row.get("config", {})
    is_known = config.get("cluster", {}).get("matmul_flops_per_s") and config.get("model", {}).get("name") != "abstract"
    return "; cost=analytic gives seconds" if is_known and clock(row) == "slots" else ""


def table(row: Record) -> list[str]:
    """The main figures of a run, a line each."""
    memory, dtype = max(row.get("peak_memory_bytes") or [0]), row.get("config", {}).get("dtype")
    wider = row.get("backend") not in (None, "emulated") and dtype in ("float32", "float64")
    counted = f", counted in 16 bits, not in {dtype}" if wider else ""
    shown = {
        "run": f"{row['run_id'][:8]} ({row['status']}{', ' + row['evidence'] if row.get('evidence') else ''})",
        "makespan": _number(row.get("makespan_s"), f" {unit(row)}"),
        "step": _number(row.get("step_time_s"), f" {unit(row)}"),
        "tokens/s": _number(row.get("tokens_per_s"), "", ",.0f"),
        "bubble": _number(row.get("bubble_makespan"), " of the devices' time", ".2%"),
        "memory": f"{memory / 1e9:.1f} GB on the fullest device{counted}" if memory else "",
    }
    return [f"{name:<10}{value}" for name, value in shown.items() if value]


def _number(value: float | None, unit: str, form: str = ".6g") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _schedule(row: Record) -> str:
    return f"{row['schedule']} {row['model']} {row['num_devices']}x{row['num_microbatches']} {row['partition']}"


def _timed(row: Record) -> str:
    if "terms_s" in row:
        return f": step {row['step_time_s']:.6g} s, {row['tokens_per_s']:,.0f} tokens/s of all devices"
    text = f": makespan {row['makespan_s']:.6g} {unit(row)}, bubble {100 * row['bubble_makespan']:.2f} %"
    if (row.get("foreign_cpu_share") or 0.0) > BUSY and "replay_makespan_s" in row:
        text += (
            f" while other programs kept {row['foreign_cpu_share']:.2f} cores busy "
            f"({row['replay_makespan_s']:.6g} s by each action's own processor time)"
        )
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


def _over_ours(row: Record) -> str:
    pace = f"{row['step_time_s']:.3f} s, " if "step_time_s" in row else ""
    return f": {pace}{row['verdict']}" + (f" ({row['verdict_reason']})" if row["verdict_reason"] else "")


def _went_on(row: Record) -> str:
    if "weight_max_abs_diff" in row:
        return (
            f": killed {row['num_failures']}, steps done again {row['lost_steps']}, weights within "
            f"{row['weight_max_abs_diff']:g} of training without failures"
        )
    return (
        f": failures {row['num_failures']}, steps done again {row['lost_steps']}, microbatches "
        f"{row['lost_microbatches']}, goodput {row['goodput']:.1%} of the pace without failures"
    )


# Label and outcome of a record, by mode.
_MEASURED = ": {makespan_s:.3f} s, replay {replay_makespan_s:.3f} s, "
_DESCRIBED: dict[str, tuple[Callable[[Record], str], Callable[[Record], str]]] = {
    "predict": (_system, _pace),
    "roofline": ("closed forms of {model} on {cluster}".format_map, " ({convention})".format_map),
    "duel": ("duel {model} {contender}".format_map, f"{_MEASURED}{{partition_layers}}".format_map),
    "torch_duel": ("torch duel {model} {contender}".format_map, f"{_MEASURED}{{verdict}}".format_map),
    "gpu_duel": ("GPU duel {model} {contender}".format_map, _over_ours),
    "failures": (lambda row: f"{row['policy']} {_schedule(row)}", _went_on),
}
