"""Targets for the errors of the predictions of the 4090 figures, and whether they hold."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product, starmap
from math import log
from statistics import median

from analysis.predictions import compare
from analysis.predictions.compare import Cell
from analysis.predictions.tables import Row, read
from analysis.records.published import DENSE, EXPERTS, OUR_MODELS, PUBLISHED_MODELS
from rpbench.predict import SYSTEMS

GATED = ("megatron-pp", "megatron-tp", "zero-2", "zero-infinity", "fsdp")
BASELINES = (*GATED, "mobius")  # Mobius' settings are not public: it counts for the headline target only
CLEAR = 1.2  # the order of pairs with a larger ratio counts


@dataclass(frozen=True)
class Target:
    """A target, what was measured against it, and whether it holds."""

    name: str
    measured: str
    held: bool


def targets() -> list[Target]:
    return [make() for make in _TARGETS]


def committed(table: str) -> dict[Cell, Row]:
    """The committed predictions for the known machine, by cell."""
    rows = (row for row in read(table) if row["platform"] == compare.PLATFORMS[compare.KNOWN])
    return {Cell(table, row["system"], OUR_MODELS[row["model"]]): row for row in rows}


def _both(table: str, systems: Iterable[str], models: Iterable[str]) -> dict[Cell, tuple[float, float]]:
    """Predicted and published value of every cell with both."""
    column, rows = "tokens_per_s" if table == "throughput" else "max_seq_len_k", committed(table)
    found = {}
    for cell in starmap(partial(Cell, table), product(systems, models)):
        known = compare.published_value(cell)[1]
        if known and cell in rows and rows[cell][column]:
            found[cell] = float(rows[cell][column]), known
    return found


def errors(table: str, systems: Iterable[str], models: Iterable[str] = tuple(PUBLISHED_MODELS)) -> dict[Cell, float]:
    """Predicted over published less 1 of every cell with both values, from the committed tables."""
    return {cell: ours / known - 1 for cell, (ours, known) in _both(table, systems, models).items()}


def _within(name: str, found: dict[Cell, float], limit: float) -> Target:
    text = ", ".join(f"{cell.model} {off:+.1%}" for cell, off in found.items())
    return Target(f"{name} within {limit:.0%}", text, all(abs(off) <= limit for off in found.values()))


def _median_within(name: str, found: dict[Cell, float], limit: float) -> Target:
    middle = median(map(abs, found.values()))
    return Target(f"{name}, median within {limit:.0%}", f"{middle:.1%} of {len(found)} cells", middle <= limit)


def _each_baseline() -> Target:
    worst, off = max(errors("throughput", GATED).items(), key=lambda item: abs(item[1]))
    return Target(
        "running baselines, each within 15%", f"largest {worst.system} {worst.model} {off:+.1%}", abs(off) <= 0.15
    )


def _order() -> Target:
    agree: dict[bool, list[bool]] = {True: [], False: []}  # of pairs that are clearly apart, and of closer ones
    wrong = []
    for model in PUBLISHED_MODELS:
        cells = _both("throughput", SYSTEMS, [model]).items()
        for (a, (ours_a, known_a)), (b, (ours_b, known_b)) in combinations(cells, 2):
            same = (ours_a > ours_b) == (known_a > known_b)
            clear = max(known_a, known_b) > CLEAR * min(known_a, known_b)
            agree[clear].append(same)
            if clear and not same:
                wrong.append(f"{a.system}/{b.system} on {model}")
    counts = [f"{sum(each)} of {len(each)}" for each in agree.values()]
    text = f"{counts[0]}, and {counts[1]} closer pairs" + "".join(f"; wrong: {pair}" for pair in wrong)
    return Target(f"order of every pair in a column that differs by more than {CLEAR}x", text, all(agree[True]))


def _verdicts() -> Target:
    rows = committed("throughput")
    wrong = [cell for cell, row in rows.items() if compare.published_value(cell)[0] != row["status"]]
    margins = [(abs(float(row["memory_margin"])), cell) for cell, row in rows.items() if row["memory_margin"]]
    least, where = min(margins, key=lambda item: (item[0], item[1].system, item[1].model))
    text = f"{len(rows) - len(wrong)} of {len(rows)}; least margin {least:.1%} ({where.system} {where.model})"
    text += "".join(f"; wrong: {cell.system} {cell.model}" for cell in wrong)
    return Target("every verdict (runs, OOM, N/A)", text, not wrong)


_MEASURED_LENGTHS = tuple(system for system in SYSTEMS if system not in ("mobius", "roundpipe-sync"))


def _length_share() -> Target:
    both = _both("max_seq_len", _MEASURED_LENGTHS, PUBLISHED_MODELS)
    far = {cell: ours / known - 1 for cell, (ours, known) in both.items() if abs(ours - known) > 1}
    far = {cell: off for cell, off in far.items() if abs(off) > 0.2}
    near = len(both) - len(far)
    words = ", ".join(f"{cell.system} {cell.model} {off:+.0%}" for cell, off in far.items())
    text = f"{near} of {len(both)}" + (f"; not {words}" if far else "")
    return Target("longest sequence, 85% within 20% or one step", text, near / len(both) >= 0.85)


def _headline() -> Target:
    """RoundPipe over the best other system of each model."""
    pairs: list[tuple[str, float, float]] = []
    for model in PUBLISHED_MODELS:
        both = _both("throughput", ("roundpipe", *BASELINES), [model])
        own = both.pop(Cell("throughput", "roundpipe", model), None)
        if own and both:
            ours, known = (own[side] / max(value[side] for value in both.values()) for side in (0, 1))
            pairs.append((model, ours, known))
    offs = [ours / known - 1 for _, ours, known in pairs]
    shown = zip(pairs, offs, strict=True)
    text = ", ".join(f"{model} {ours:.2f} for {known:.2f} ({off:+.0%})" for (model, ours, known), off in shown)
    return Target("headline speed-ups within 10%", text, all(abs(off) <= 0.1 for off in offs))


def bias_and_coverage() -> dict[str, tuple[int, float, int]]:
    """For each system: cells, mean logarithmic error, published values inside the interval; all in-sample."""
    rows, found = committed("throughput"), {}
    for system in SYSTEMS:
        offs, inside = errors("throughput", [system]), 0
        for cell in offs:
            low, high = (float(rows[cell][f"tokens_per_s_{end}"]) for end in ("low", "high"))
            inside += low <= (compare.published_value(cell)[1] or 0) <= high
        if offs:
            found[system] = len(offs), sum(log(1 + off) for off in offs.values()) / len(offs), inside
    return found


def held_out_coverage(axis: str = "") -> tuple[int, int]:
    """Held-out published values inside their intervals, and all; `axis` is `model`, `system`, `platform` or any."""
    inside, held_rows = 0, [row for row in read("holdout") if axis in ("", row["held_out"])]
    for held in held_rows:
        low, high = ((1 + float(held["error"])) * float(held[f"{end}_ratio"]) for end in ("low", "high"))
        inside += low <= 1 <= high
    return inside, len(held_rows)


_TARGETS: tuple[Callable[[], Target], ...] = (
    lambda: _within(
        "RoundPipe, dense, no throughput constant fitted", errors("throughput", ["roundpipe"], DENSE), 0.05
    ),
    lambda: _within("RoundPipe, MoE, one constant for both", errors("throughput", ["roundpipe"], EXPERTS), 0.1),
    lambda: _within(
        "RoundPipe, MoE, fitted on one and tested on the other,",
        {Cell("throughput", "roundpipe", row["model"]): float(row["error"]) for row in read("experts_holdout")},
        0.2,
    ),
    lambda: _within("RoundPipe-sync, dense", errors("throughput", ["roundpipe-sync"], DENSE), 0.08),
    lambda: _within("RoundPipe-sync, MoE", errors("throughput", ["roundpipe-sync"], EXPERTS), 0.15),
    lambda: _median_within("running baselines", errors("throughput", GATED), 0.06),
    _each_baseline,
    _order,
    _verdicts,
    lambda: _median_within("longest sequence", errors("max_seq_len", _MEASURED_LENGTHS), 0.1),
    _length_share,
    _headline,
)
NUM_TARGETS = len(_TARGETS)


def text() -> str:
    lines = [f"{'held' if each.held else 'MISSED':7s} {each.name}\n        {each.measured}" for each in targets()]
    lines += ["", "system           cells  signed mean error  published value inside the interval"]
    summary = bias_and_coverage()
    lines += [f"{name:16s} {num:5d}  {bias:+17.1%}  {inside}" for name, (num, bias, inside) in summary.items()]
    total, inside = (sum(row[i] for row in summary.values()) for i in (0, 2))
    lines.append(f"{'all, in-sample':16s} {total:5d}  {'':17s}  {inside} of {total}; nine of ten are expected")
    for axis in ("model", "system", "platform"):
        out, cells = held_out_coverage(axis)
        lines.append(f"{axis + ' held out':16s} {cells:5d}  {'':17s}  {out} of {cells}, out-of-sample")
    return "\n".join(lines)
