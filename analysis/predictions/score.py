"""The bars: errors of the predictions of the 4090 figures, and the bars that they hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log
from statistics import median

from analysis.predictions import compare
from analysis.predictions.compare import Cell
from analysis.predictions.tables import read
from analysis.records.published import OUR_MODELS, PUBLISHED_MODELS
from rpbench.predict import SYSTEMS

DENSE = ("qwen3_1p7b", "llama31_8b", "qwen3_32b")
EXPERTS = ("gpt_oss_20b", "qwen3_235b_lora")
# Mobius' settings are not public: it is reported, and counts for no bar but the headline.
GATED = ("megatron-pp", "megatron-tp", "zero-2", "zero-infinity", "fsdp")
BASELINES = (*GATED, "mobius")
CLEAR = 1.2


@dataclass(frozen=True)
class Bar:
    """A bar, what was measured against it, and whether it holds."""

    name: str
    measured: str
    held: bool


def bars() -> list[Bar]:
    return [make() for make in _BARS]


def errors(table: str, systems: Sequence[str], models: Sequence[str] = tuple(PUBLISHED_MODELS)) -> dict[Cell, float]:
    """Predicted over published less 1 of every cell that has a value on both sides, from the committed tables."""
    found = {}
    for system in systems:
        for model in models:
            cell = Cell(table, system, model)
            ours, (_, known) = committed(cell)[1], compare.published_value(cell)
            if ours and known:
                found[cell] = ours / known - 1
    return found


def committed(cell: Cell) -> tuple[str, float | None]:
    """Status and value of a cell as it was predicted and committed."""
    column = "tokens_per_s" if cell.table == "throughput" else "max_seq_len_k"
    for row in read(cell.table):
        key = cell.key.split("/")
        if [cell.table, row["system"], row["platform"], row["model"]] == key:
            return row["status"], float(row[column]) if row[column] else None
    return "", None


def _within(name: str, found: dict[Cell, float], limit: float) -> Bar:
    text = ", ".join(f"{cell.model} {off:+.1%}" for cell, off in found.items())
    return Bar(f"{name} within {limit:.0%}", text, all(abs(off) <= limit for off in found.values()))


def _held_out_experts() -> Bar:
    offs = {row["model"]: float(row["error"]) for row in read("experts_holdout")}
    text = ", ".join(f"{model} {off:+.1%}" for model, off in offs.items())
    held = all(abs(off) <= 0.2 for off in offs.values())
    return Bar("RoundPipe, MoE, fitted on one and tested on the other, within 20%", text, held)


def _median_within(name: str, found: dict[Cell, float], limit: float) -> Bar:
    middle = median(map(abs, found.values()))
    return Bar(f"{name}, median within {limit:.0%}", f"{middle:.1%} of {len(found)} cells", middle <= limit)


def _each_baseline() -> Bar:
    worst = max(errors("throughput", GATED).items(), key=lambda item: abs(item[1]))
    text = f"largest {worst[0].system} {worst[0].model} {worst[1]:+.1%}"
    return Bar("running baselines, each within 15%", text, abs(worst[1]) <= 0.15)


def _order() -> Bar:
    good = total = near_good = near = 0
    wrong = []
    for model in PUBLISHED_MODELS:
        offs = errors("throughput", list(SYSTEMS), [model])
        for a, b in combinations(offs, 2):
            known_a, known_b = (compare.published_value(cell)[1] or 0 for cell in (a, b))
            ours_a, ours_b = (committed(cell)[1] or 0 for cell in (a, b))
            agrees = (ours_a > ours_b) == (known_a > known_b)
            if max(known_a, known_b) > CLEAR * min(known_a, known_b):
                good, total = good + agrees, total + 1
                if not agrees:
                    wrong.append(f"{a.system}/{b.system} on {model}")
            else:
                near_good, near = near_good + agrees, near + 1
    text = f"{good} of {total}, and {near_good} of {near} closer pairs" + "".join(f"; wrong: {pair}" for pair in wrong)
    return Bar(f"order of every pair in a column that differs by more than {CLEAR}x", text, good == total)


def _verdicts() -> Bar:
    right, wrong, least = 0, [], (1.0, "")
    for row in read("throughput"):
        if row["platform"] != compare.PLATFORMS[compare.KNOWN]:
            continue
        model = OUR_MODELS[row["model"]]
        status, _ = compare.published_value(Cell("throughput", row["system"], model))
        if status == row["status"]:
            right += 1
        else:
            wrong.append(f"{row['system']} {model}")
        if row["memory_margin"]:
            least = min(least, (abs(float(row["memory_margin"])), f"{row['system']} {model}"))
    text = f"{right} of {right + len(wrong)}; least margin {least[0]:.1%} ({least[1]})"
    return Bar("every verdict (runs, OOM, N/A)", text + "".join(f"; wrong: {each}" for each in wrong), not wrong)


def _lengths() -> dict[Cell, float]:
    return errors("max_seq_len", [system for system in SYSTEMS if system not in ("mobius", "roundpipe-sync")])


def _length_share() -> Bar:
    near, far = 0, []
    for cell, off in _lengths().items():
        _, known = compare.published_value(cell)
        _, ours = committed(cell)
        if abs(off) <= 0.2 or abs((ours or 0) - (known or 0)) <= 1:
            near += 1
        else:
            far.append(f"{cell.system} {cell.model} {off:+.0%}")
    share = near / (near + len(far))
    text = f"{near} of {near + len(far)}" + (f"; not {', '.join(far)}" if far else "")
    return Bar("longest sequence, 85% within 20% or one step", text, share >= 0.85)


def speedups(value: Callable[[Cell], float | None]) -> dict[str, float]:
    """RoundPipe over the best other system of each model with one."""
    found = {}
    for model in PUBLISHED_MODELS:
        others = [value(Cell("throughput", system, model)) for system in BASELINES]
        own = value(Cell("throughput", "roundpipe", model))
        if own and any(others):
            found[model] = own / max(other for other in others if other)
    return found


def _headline() -> Bar:
    known = speedups(lambda cell: compare.published_value(cell)[1])
    ours = speedups(lambda cell: committed(cell)[1])
    offs = {model: ours[model] / known[model] - 1 for model in known}
    text = ", ".join(f"{model} {ours[model]:.2f} for {known[model]:.2f} ({off:+.0%})" for model, off in offs.items())
    return Bar("headline speed-ups within 10%", text, all(abs(off) <= 0.1 for off in offs.values()))


def bias_and_coverage() -> dict[str, tuple[int, float, int]]:
    """Per system: cells, signed mean error (of logarithms), published values inside the interval; all in-sample."""
    rows = {(row["system"], row["platform"], row["model"]): row for row in read("throughput")}
    found = {}
    for system in SYSTEMS:
        offs = errors("throughput", [system])
        inside = 0
        for cell in offs:
            _, key_system, platform, model = cell.key.split("/")
            row, known = rows[key_system, platform, model], compare.published_value(cell)[1] or 0
            inside += float(row["tokens_per_s_low"]) <= known <= float(row["tokens_per_s_high"])
        if offs:
            found[system] = len(offs), sum(log(1 + off) for off in offs.values()) / len(offs), inside
    return found


def held_out_coverage(axis: str = "") -> tuple[int, int]:
    """Published values inside the interval around what is predicted with their own in no fit, and all.

    Args:
        axis: `model`, `system` or `platform`; all of them if empty.
    """
    inside, held_rows = 0, [row for row in read("holdout") if axis in ("", row["held_out"])]
    for held in held_rows:
        low, high = ((1 + float(held["error"])) * float(held[f"{end}_ratio"]) for end in ("low", "high"))
        inside += low <= 1 <= high
    return inside, len(held_rows)


_BARS: tuple[Callable[[], Bar], ...] = (
    lambda: _within(
        "RoundPipe, dense, no throughput constant fitted", errors("throughput", ["roundpipe"], DENSE), 0.05
    ),
    lambda: _within("RoundPipe, MoE, one constant for both", errors("throughput", ["roundpipe"], EXPERTS), 0.1),
    _held_out_experts,
    lambda: _within("RoundPipe-sync, dense", errors("throughput", ["roundpipe-sync"], DENSE), 0.08),
    lambda: _within("RoundPipe-sync, MoE", errors("throughput", ["roundpipe-sync"], EXPERTS), 0.15),
    lambda: _median_within("running baselines", errors("throughput", GATED), 0.06),
    _each_baseline,
    _order,
    _verdicts,
    lambda: _median_within("longest sequence", _lengths(), 0.1),
    _length_share,
    _headline,
)
NUM_BARS = len(_BARS)


def text() -> str:
    lines = [f"{'held' if bar.held else 'MISSED':7s} {bar.name}\n        {bar.measured}" for bar in bars()]
    lines += ["", "system           cells  signed mean error  published value inside the interval"]
    summary = bias_and_coverage()
    lines += [f"{name:16s} {num:5d}  {bias:+17.1%}  {inside}" for name, (num, bias, inside) in summary.items()]
    total, inside = (sum(row[i] for row in summary.values()) for i in (0, 2))
    lines.append(f"{'all, in-sample':16s} {total:5d}  {'':17s}  {inside} of {total}; nine of ten are expected")
    for axis in ("model", "system", "platform"):
        out, cells = held_out_coverage(axis)
        lines.append(f"{axis + ' held out':16s} {cells:5d}  {'':17s}  {out} of {cells}, out-of-sample")
    return "\n".join(lines)
