"""The table of `advise`, for people: as wide as the terminal, without colours, so that there are none to switch off."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rpbench.advice.ranking import UNSEARCHED

ROWS, LATE_ROWS, MISFITS = 12, 4, 3
WIDE = 66  # columns from which the interval, the bubble and the lateness have room
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
    found += _unfinished(answer)
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
        ended = "" if row["searched_to_the_end"] else "; not searched to the end"
        yield f"no plan found that fits: {label(row)} lacks {lacks(row)}{ended}"


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
    others = [f"sequences={options['microbatch_sequences']}"]
    others += [f"chunks={options['chunks_per_device']}"] if options["chunks_per_device"] > 1 else []
    return " ".join(
        [row["schedule"], *sizes, f"shard={options['shares']}", *others, f"recompute={options['recompute']}"]
    )


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
    return [f"{answer['model']} on {devices}, {tokens} (predicted)"]


def _columns(width: int) -> str:
    if width < WIDE:
        return f"{'tokens/s':>12} {'GB':>6}  schedule"
    return f"{'tokens/s':>12} {'low':>12} {'high':>12} {'GB':>6} {'bubble':>7} {'late':>4}  schedule"


def _row(row: Mapping[str, Any], width: int) -> str:
    pace, memory = f"{row['tokens_per_s']:>12,.0f}", f"{row['peak_memory_bytes'] / 1e9:>6.1f}"
    name = label(row) + ("" if row.get("searched_to_the_end", True) else " *")
    if width < WIDE:
        return f"{pace} {memory}  {name}"
    bubble = "-" if row.get("bubble") is None else f"{100 * max(0.0, row['bubble']):.0f} %"
    interval = f"{row['tokens_per_s_low']:>12,.0f} {row['tokens_per_s_high']:>12,.0f}"
    return f"{pace} {interval} {memory} {bubble:>7} {row['staleness_steps']:>4}  {name}"


def _unfinished(answer: Mapping[str, Any]) -> list[str]:
    if all(row.get("searched_to_the_end", True) for row in (*answer["ranking"], *answer.get("ranking_late", ()))):
        return []
    return ["* the best so far, not searched to the end; seconds=60 has time for all"]


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
