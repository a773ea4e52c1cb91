"""The table of `advise`, for people: as wide as the terminal, without colours, so that there are none to switch off."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rpbench.advice.ranking import UNSEARCHED

ROWS, LATE_ROWS, MISFITS = 12, 4, 3
WIDE = 100  # columns from which the interval, the bubble and the lateness have room
COMMAND = 400  # characters; a longer one is left to the JSON
AXES = ("data", "pipeline", "tensor", "context", "expert")
# Causes of a step's seconds that their names do not explain; docs/howto/meshes.md has all.
MEANT = {
    "work": "kernels, recomputation and collectives of the busiest rank",
    "data": "sums and gathers of data parallelism that nothing hides",
    "tied": "the sum of the gradients of an embedding that two stages share",
    "fixed": "what the framework spends once a step whatever the sizes",
    "jitter": "waiting for the slowest node",
}
WITHIN = 16  # times as much, as far as `order_turns` looks


def table(answer: Mapping[str, Any], width: int, asked: Sequence[str] = ()) -> list[str]:
    """The lines of an answer.

    Args:
        width: of the terminal, in characters.
        asked: schedules that the request names; those that take no part are told with the reason.
    """
    found = [*_head(answer), _columns(width)]
    found += [_row(row, width) for row in answer["ranking"][:ROWS]]
    if late := answer.get("ranking_late"):
        found += ["gradients of older weights, which may cost tokens (docs/convergence.md); late=yes ranks them above:"]
        found += [_row(row, width) for row in late[:LATE_ROWS]]
    found += [*_plan(answer), *_on_ssd(answer)]
    found += _unsearched(answer)
    found += [f"left out: {name}: {why}" for name, why in _refused(answer, asked).items()]
    found += [_why(row) for row in answer["ranking"][:2]] + meanings(answer["ranking"][:2])
    found += list(_misfits(answer))
    found += notes(answer)
    folded = [part for line in found for part in _folded(line, width)]
    return [*folded, *_command(answer)]


def _misfits(answer: Mapping[str, Any]) -> Iterator[str]:
    """What cannot fit, with the bound that says so, and what no plan was found for that fits."""
    for row in answer["does_not_fit"][:MISFITS]:
        bound = row.get("least_memory_bytes")
        told = f"needs at least {gigabytes(bound)} a device" if bound else f"lacks {lacks(row)}"
        yield f"does not fit: {label(row)} {told}"
    for row in answer.get("none_found", [])[:MISFITS]:
        yield f"no plan found that fits, and no proof that there is none: {label(row)} lacks {lacks(row)}"


def notes(answer: Mapping[str, Any]) -> list[str]:
    """What would change the answer, what was assumed, and what had no effect, a line each."""
    found = [*_levers(answer), *_turns(answer)]
    found += [answer["smallest_change"]] if "smallest_change" in answer else []
    found += [f"assumed {name}: {value}" for name, value in answer["assumed"].items()]
    return found + [f"not used: {name}: {why}" for name, why in answer.get("unused", {}).items()]


def label(row: Mapping[str, Any]) -> str:
    """What tells a row from the others: its schedule, and the mesh where there is one."""
    options = row["options"]
    if "data" not in options:
        return str(row["schedule"])
    sizes = [f"{name}={options[name]}" for name in AXES if options[name] > 1]
    chunks = [f"chunks={options['chunks_per_device']}"] if options["chunks_per_device"] > 1 else []
    return " ".join([row["schedule"], *sizes, f"shard={options['shares']}", *chunks])


def lacks(row: Mapping[str, Any]) -> str:
    """What a misfit lacks, rounded up: so much more is enough."""
    parts = [
        f"{gigabytes(row[key])} {where}"
        for key, where in (("device_lacks_bytes", "a device"), ("host_lacks_bytes", "of the host's memory"))
        if row[key]
    ]
    return " and ".join(parts)


def gigabytes(count: float) -> str:
    """Bytes in tenths of GB, rounded up."""
    return f"{math.ceil(count / 1e8) / 10:,.1f} GB"


def _head(answer: Mapping[str, Any]) -> list[str]:
    devices = f"{answer['num_devices']} device{'s' if answer['num_devices'] > 1 else ''} of {answer['cluster']}"
    tokens = f"{answer['seq_len']:,} tokens a sequence, {answer['tokens_per_step']:,} a step"
    if lengths := answer.get("lengths"):
        tokens = f"{len(lengths)} sequences of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} a step"
    found = [f"{answer['model']} on {devices}, {tokens} (predicted)"]
    if sizes := answer.get("parameters"):
        limit = answer["device_memory_bytes"]
        room = "" if limit is None else f"; {limit / 1e9:.1f} GB of each device for it"
        counted = ", ".join(f"{_large(count)} {name}" for name, count in sizes.items())
        found.append(f"parameters: {counted}{room}")
    return found


def _large(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e8 else f"{count / 1e6:,.2f} million"


def _columns(width: int) -> str:
    if width < WIDE:
        return f"{'tokens/s':>12} {'GB':>6}  schedule"
    return (
        f"{'tokens/s':>10} {'low':>8} {'high':>8} {'gap':>6} {'GB':>5} {'MFU':>4} {'bubble':>6} {'late':>4} "
        f"{'micro':>5} {'recompute':>11}  schedule"
    )


def _row(row: Mapping[str, Any], width: int) -> str:
    pace, memory = row["tokens_per_s"], row["peak_memory_bytes"] / 1e9
    if width < WIDE:
        return f"{pace:>12,.0f} {memory:>6.1f}  {label(row)}"

    def share(name: str, width: int) -> str:
        value = row.get(name)
        return f"{'-' if value is None else f'{100 * max(0.0, value):.0f} %':>{width}}"

    options = row["options"]
    where = f"  ({', '.join(row['runs_in'])})" if "runs_in" in row else ""
    low, high = row["tokens_per_s_low"], row["tokens_per_s_high"]
    return (
        f"{pace:>10,.0f} {low:>8,.0f} {high:>8,.0f} {gap(row):>6} {memory:>5.1f} "
        f"{share('mfu', 4)} {share('bubble', 6)} {row['staleness_steps']:>4} {options['microbatch_sequences']:>5} "
        f"{options['recompute']:>11}  {label(row)}{where}"
    )


def gap(row: Mapping[str, Any]) -> str:
    """By how much another plan of the contender may be faster at most."""
    found = row.get("gap")
    if found is None:
        return "-"
    return f"{100 * found:.1f} %" if found < 1 else f"{1 + found:.0f} x"


def _plan(answer: Mapping[str, Any]) -> Iterator[str]:
    """What the first row takes beside the command: where its layers and its memory go."""
    for row in answer["ranking"][:1]:
        if "memory" not in row:
            continue
        options, classes = row["options"], sorted(row["memory"].items(), key=lambda pair: -pair[1])
        again = "nothing" if options["recompute"] == "none" else f"as of recompute={options['recompute']}"
        if options["recompute"] == "fitting":
            kept = len(options["keeps"])
            again = f"all but {kept} stages" if kept else "everything"
        yield (
            f"plan: {row['schedule']}, {options['microbatch_sequences']:g} sequences a microbatch, layers by stage "
            f"{options['partition']}, recomputed: {again}"
        )
        yield "memory of the fullest device, GB: " + ", ".join(
            f"{name} {size / 1e9:.1f}" for name, size in classes if size >= 5e7
        )
        host = gigabytes(row["host_memory_bytes"]) if row["host_memory_bytes"] else "none"
        yield f"host memory: {host}; a day: {row['tokens_per_day'] / 1e9:,.2f} billion tokens"
        if row["usd_per_1e9_tokens"] is not None:
            yield f"10^9 tokens: {row['usd_per_1e9_tokens']:,.0f} US dollars"
        if row.get("export_note"):
            yield f"export: {row['export_note']}"
        if row.get("gap") is not None and not row["searched_to_the_end"]:
            yield "gap: how much faster another plan of the same schedule may be at most, by a bound"


def _on_ssd(answer: Mapping[str, Any]) -> Iterator[str]:
    """What rows have on SSDs, and how long these last."""
    for row in answer["ranking"]:
        if row.get("ssd_bytes"):
            days = row["ssd_days"]
            last = "" if days is None else f"; {days:,.0f} days of it use up the writes that they are rated for"
            size, written = gigabytes(row["ssd_bytes"]), gigabytes(row["ssd_written_bytes"])
            yield f"{label(row)}: {size} on SSDs, {written} written a step{last}"


def _unsearched(answer: Mapping[str, Any]) -> Iterator[str]:
    names = sorted(name for name, why in answer.get("left_out", {}).items() if why == UNSEARCHED)
    if names:
        yield f"NOT SEARCHED, {len(names)} schedules; seconds=60 has time for all: {', '.join(names)}"


def _refused(answer: Mapping[str, Any], asked: Sequence[str]) -> dict[str, str]:
    """Schedules that were asked for by name and take no part, each with the reason."""
    found = answer.get("left_out", {})
    return {name: why for name, why in found.items() if name.partition("(")[0] in asked and why != UNSEARCHED}


def _why(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {1000 * value:,.0f}" for name, value in row["why"].items() if value >= 0.0005)
    return f"{label(row)}: ms of a step: {parts}"


def meanings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the causes of some rows mean, in one line; none where the names say it."""
    there = {name for row in rows for name, seconds in row["why"].items() if seconds >= 0.0005}
    said = "; ".join(f"{name}: {words}" for name, words in MEANT.items() if name in there)
    return [said] if said else []


def _levers(answer: Mapping[str, Any]) -> Iterator[str]:
    """What each change brings to the first; those that bring less than a thousandth in one line."""
    idle = []
    for lever in answer["levers"]:
        if lever["gain"] is None:
            yield f"{lever['name']}: cannot be had"
        elif abs(lever["gain"]) < 0.0005:
            idle.append(lever["name"])
        else:
            yield f"{lever['name']}: {100 * lever['gain']:+.1f} %"
    if idle:
        yield f"no gain: {'; '.join(idle)}"


def _turns(answer: Mapping[str, Any]) -> Iterator[str]:
    """What puts the second before the first."""
    if len(answer["ranking"]) < 2 or not answer.get("order_turns"):
        return
    second = label(answer["ranking"][1])
    never = [turn["name"] for turn in answer["order_turns"] if turn["factor"] is None]
    for turn in answer["order_turns"]:
        if turn["factor"] is not None:
            yield f"{second} would be first with {turn['name']} {turn['factor']:.2g} times as fast, both plans kept"
    if never:
        yield f"{second} stays behind with up to {WITHIN} times faster or slower {', '.join(never)}, both plans kept"


def _command(answer: Mapping[str, Any]) -> Iterator[str]:
    """The command of the first, on a line of its own, to be copied."""
    for row in answer["ranking"][:1]:
        short = len(row["command"]) <= COMMAND
        yield row["command"] if short else "each row's command is in the JSON (--json), as `command`"


def _folded(line: str, width: int) -> list[str]:
    """A line in as many as the terminal takes; rows keep their columns at the front."""
    return textwrap.wrap(line, max(20, width - 1), subsequent_indent="    ", drop_whitespace=True) or [""]
