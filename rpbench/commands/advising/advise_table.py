"""The table of `advise` for people, as wide as the terminal, without colours."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rpbench.advice.ranking import AS_PLAIN
from rpbench.advice.rows import EXPORTS
from rpbench.ir.partition import parse
from rpbench.plan.contest.search import OUT_OF_TIME

ROWS, LATE_ROWS, MISFITS = 12, 4, 3
WIDE = 100  # columns from which the interval, the bubble and the lateness have room
KNOWN_AS = {"zero_3": "zero_3 (FSDP)", "data_parallel": "data_parallel (DDP)"}
# What the replicas of a pipeline share, by the stage of ZeRO.
STAGE = {"none": "", "optimizer": "zero_1", "gradients": "zero_2", "parameters": "zero_3"}
AXES = ("data", "pipeline", "tensor", "context", "expert")
# Causes of a step's seconds that their names do not explain; docs/howto/meshes.md has all.
MEANT = {
    "work": "kernels, recomputation and collectives of the busiest rank",
    "hops": "what transfers between stages add",
    "data": "sums and gathers of data parallelism that nothing hides",
    "tied": "the sum of the gradients of an embedding that two stages share",
    "fixed": "what the framework spends once a step whatever the sizes",
    "jitter": "waiting for the slowest node",
}
WITHIN = 16  # the largest factor of `order_turns`
NEAR = 0.1  # factors this near to 1 are told as percentages


def table(answer: Mapping[str, Any], width: int, asked: Sequence[str] = ()) -> list[str]:
    """The lines of an answer, for a terminal of `width` characters; why schedules `asked` for by name take no part."""
    found = _head(answer)
    nothing = not answer["ranking"] and not answer.get("ranking_late")
    found += [answer["smallest_change"]] if nothing and "smallest_change" in answer else [_columns(width)]
    found += [_row(row, width) for row in answer["ranking"][:ROWS]] + _more(answer["ranking"], ROWS)
    if late := answer.get("ranking_late"):
        found += ["gradients of older weights, which may cost tokens (docs/convergence.md); late=yes ranks them above:"]
        found += [_row(row, width) for row in late[:LATE_ROWS]] + _more(late, LATE_ROWS)
    found += [*_legend(answer, width), *_leads(answer), *_plan(answer)]
    behind = [*_on_ssd(answer), *_unsearched(answer)]
    behind += [f"left out: {name}: {why}" for name, why in _refused(answer, asked).items()]
    behind += [_why(row) for row in answer["ranking"][:2]] + meanings(answer["ranking"][:2])
    behind += [*_misfits(answer), *(line for line in notes(answer) if line not in found)]
    above, below = ([part for line in lines for part in _folded(line, width)] for lines in (found, behind))
    return [*above, *_commands(answer), *below]


def _more(rows: Sequence[Mapping[str, Any]], shown: int) -> list[str]:
    hidden = len(rows) - shown
    return [f"    and {hidden} more, in the JSON (--json)"] if hidden > 0 else []


def _legend(answer: Mapping[str, Any], width: int) -> Iterator[str]:
    """A legend of the columns that need one."""
    if not answer["ranking"] or width < WIDE:
        return
    gaps = any(row.get("gap") is not None and not row["searched_to_the_end"] for row in answer["ranking"])
    told = ["low, high: nine of ten outcomes"]
    told += ["gap: how much faster another plan of the same schedule may be at most, by a bound"] if gaps else []
    told += ["micro: sequences of a microbatch", "recompute: layers whose backward runs their forward again"]
    yield "; ".join(told)


def _leads(answer: Mapping[str, Any]) -> Iterator[str]:
    """By how much the first row leads, and which rows may be as fast; errors that two rows share are left out."""
    rows, leads = answer["ranking"], answer.get("leads") or []
    if not leads:
        return
    ends = f"{100 * leads[0]['low']:+.1f} to {100 * leads[0]['high']:+.1f} %"
    told = f"{100 * leads[0]['by']:.1f} %, nine of ten: {ends} (errors that both share left out)"
    yield f"{label(rows[0])} leads {label(rows[1])} by {told}"
    behind = [place for place, lead in enumerate(leads, 1) if lead["low"] > 0]
    if not behind:
        yield "no row of this list is surely slower than the first"
    elif behind[0] > 1:
        yield f"the first that is surely slower, nine of ten: {label(rows[behind[0]])}"


def _misfits(answer: Mapping[str, Any]) -> Iterator[str]:
    """Schedules that cannot fit, with the bound that proves it, and those of which no plan was found that fits."""
    for row in answer["does_not_fit"][:MISFITS]:
        device, host = row.get("least_memory_bytes"), row.get("least_host_memory_bytes")
        is_of_host = host and device <= (answer.get("device_memory_bytes") or device)
        least = f"{gigabytes(host if is_of_host else device or 0)} {'of the host' if is_of_host else 'a device'}"
        told = f"needs at least {least}" if device or host else f"lacks {lacks(row)}"
        yield f"does not fit: {label(row)} {told}"
    if others := answer["does_not_fit"][MISFITS:]:
        yield f"does not fit either: {', '.join(map(label, others))}"
    unknown = answer.get("none_found", [])
    for row in unknown[:MISFITS]:
        yield f"no plan found that fits, and no proof that there is none: {label(row)} lacks {lacks(row)}"
    if others := unknown[MISFITS:]:
        yield f"nor of {', '.join(map(label, others))}"


def notes(answer: Mapping[str, Any]) -> list[str]:
    """Changes that would alter the answer, assumptions, and choices without effect, a line each."""
    found = [*_levers(answer), *_turns(answer)]
    found += [answer["smallest_change"]] if "smallest_change" in answer else []
    found += [f"assumed {name}: {value}" for name, value in answer["assumed"].items()]
    return found + [f"not used: {name}: {why}" for name, why in answer.get("unused", {}).items()]


def label(row: Mapping[str, Any]) -> str:
    """A row's label: its schedule, and its mesh if any."""
    options, name = row["options"], KNOWN_AS.get(row["schedule"], str(row["schedule"]))
    if "data" not in options:
        return name
    sizes = [f"{axis}={options[axis]}" for axis in AXES if options[axis] > 1]
    chunks = [f"chunks={options['chunks_per_device']}"] if options["chunks_per_device"] > 1 else []
    shares = [STAGE[options["shares"]]] if options["pipeline"] > 1 and options["data"] > 1 else []
    return " ".join([name, *sizes, *filter(None, shares), *chunks])


def recomputed(row: Mapping[str, Any]) -> str:
    """The recomputation of a row's backwards: all, none, a part of a layer, or a number of layers."""
    options = row["options"]
    word, kept = str(options["recompute"]), sum(options.get("kept_layers", ()))
    if word not in ("fitting", "except_last"):
        return word
    layers = sum(parse(options["partition"]).backward)
    return {0: "all", layers: "none"}.get(kept, f"{layers - kept} of {layers}")


def lacks(row: Mapping[str, Any]) -> str:
    """Memory that a misfit lacks, rounded up to what is enough."""
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
    model = answer["model"].removesuffix(f"-seq_len-{answer['seq_len']}")
    found = [f"{model} on {devices}, {tokens} (predicted)"]
    if sizes := answer.get("parameters"):
        limit = answer["device_memory_bytes"]
        room = "" if limit is None else f"; each device has room for {limit / 1e9:.1f} GB"
        large = {
            name: (count / 1e9, "billion") if count >= 1e8 else (count / 1e6, "million")
            for name, count in sizes.items()
        }
        counted = ", ".join(f"{count:,.2f} {unit} {name}" for name, (count, unit) in large.items())
        found.append(f"parameters: {counted}{room}")
    return found


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
        f"{recomputed(row):>11}  {label(row)}{where}"
    )


def gap(row: Mapping[str, Any]) -> str:
    """By how much another plan of the schedule may be faster at most."""
    found = row.get("gap")
    if found is None:
        return "-"
    return f"{100 * found:.1f} %" if found < 1 else f"{1 + found:.0f} x"


def _plan(answer: Mapping[str, Any]) -> Iterator[str]:
    """Details of the first row: where its layers and its memory go."""
    for row in answer["ranking"][:1]:
        if "memory" not in row:
            continue
        options, classes = row["options"], sorted(row["memory"].items(), key=lambda pair: -pair[1])
        size, again = options["microbatch_sequences"], recomputed(row)
        yield (
            f"plan: {label(row)}, {size:g} sequence{'' if size == 1 else 's'} a microbatch, layers by stage "
            f"{options['partition']}, recomputed: {f'{again} layers' if ' of ' in again else again}"
        )
        yield "memory of the fullest device, GB: " + ", ".join(
            f"{name} {size / 1e9:.1f}" for name, size in classes if size >= 5e7
        )
        host = gigabytes(row["host_memory_bytes"]) if row["host_memory_bytes"] else "none"
        yield f"host memory: {host}; a day: {row['tokens_per_day'] / 1e9:,.2f} billion tokens"
        if row["usd_per_1e9_tokens"] is not None:
            yield f"10^9 tokens: {row['usd_per_1e9_tokens']:,.0f} US dollars"


def _on_ssd(answer: Mapping[str, Any]) -> Iterator[str]:
    """Bytes that rows keep on SSDs, and how long the SSDs last."""
    for row in answer["ranking"]:
        if row.get("ssd_bytes"):
            days = row["ssd_days"]
            last = "" if days is None else f"; {days:,.0f} days of it use up the writes that they are rated for"
            size, written = gigabytes(row["ssd_bytes"]), gigabytes(row["ssd_written_bytes"])
            yield f"{label(row)}: {size} on SSDs, {written} written a step{last}"


def _unsearched(answer: Mapping[str, Any]) -> Iterator[str]:
    names = sorted(name for name, why in answer.get("left_out", {}).items() if why == OUT_OF_TIME)
    if names:
        yield f"NOT SEARCHED, {len(names)} schedules; seconds=60 has time for all: {', '.join(names)}"
    alone = sorted(name for name, why in answer.get("left_out", {}).items() if why == AS_PLAIN)
    if alone:
        yield f"not listed, {AS_PLAIN}: {', '.join(alone)}"


def _refused(answer: Mapping[str, Any], asked: Sequence[str]) -> dict[str, str]:
    """Schedules that were asked for by name and take no part -> the reason."""
    found = answer.get("left_out", {})
    return {name: why for name, why in found.items() if name.partition("(")[0] in asked and why != OUT_OF_TIME}


def _why(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {1000 * value:,.0f}" for name, value in row["why"].items() if value >= 0.0005)
    return f"{label(row)}: ms of a step: {parts}"


def meanings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line that explains causes with unclear names; none if there are none."""
    there = {name for row in rows for name, seconds in row["why"].items() if seconds >= 0.0005}
    said = "; ".join(f"{name}: {words}" for name, words in MEANT.items() if name in there)
    return [said] if said else []


def _levers(answer: Mapping[str, Any]) -> Iterator[str]:
    """The gain of the first row by each change; gains below a thousandth share one line."""
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
    """Changes that put the second row before the first."""
    if len(answer["ranking"]) < 2 or not answer.get("order_turns"):
        return
    second = label(answer["ranking"][1])
    never = [turn["name"] for turn in answer["order_turns"] if turn["factor"] is None]
    for turn in answer["order_turns"]:
        if turn["factor"] is not None:
            yield f"{second} would be first with {turn['name']} {_pace(turn['factor'])}, both plans kept"
    if never:
        yield f"{second} stays behind with up to {WITHIN} times faster or slower {', '.join(never)}, both plans kept"


def _pace(factor: float) -> str:
    if abs(factor - 1) >= NEAR:
        return f"{factor:.2g} times as fast"
    return f"{100 * abs(factor - 1):.2g} % {'faster' if factor > 1 else 'slower'}"


def _commands(answer: Mapping[str, Any]) -> Iterator[str]:
    """Commands that run the first row here and elsewhere, each on a line of its own, to be copied."""
    for row in answer["ranking"][:1]:
        yield "to run it here:"
        yield row["command"]
    able = next((row for row in answer["ranking"] if row.get("export")), None)
    if able is None:
        yield from (f"({row['export_note']})" for row in answer["ranking"][:1] if row.get("export_note"))
        return
    whose = "it" if able is answer["ranking"][0] else f"{label(able)}, the first row that a framework runs"
    form = able["export"].rpartition("format=")[2]
    yield f"to start {whose}, written for {next(name for name, each in EXPORTS.items() if each == form)}:"
    if able.get("export_note"):
        yield f"({able['export_note']})"
    yield able["export"]


def _folded(line: str, width: int) -> list[str]:
    """A line wrapped to the terminal's width, further lines indented."""
    return textwrap.wrap(line, max(20, width - 1), subsequent_indent="    ", drop_whitespace=True) or [""]
