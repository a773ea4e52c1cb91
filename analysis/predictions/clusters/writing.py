"""Predictions of all withheld rows, with intervals, as `analysis/predictions/clusters.csv`, and their scores.

Errors are predicted / measured - 1. Pairs are rows of one model and device whose device time for a token differs by
more than 5 %. The sealed table stays as it was committed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import exp, log
from statistics import median
from typing import NamedTuple

from analysis.predictions import tables
from analysis.predictions.clusters.case import MEMORY, Case, Model, Row, rows_of, step_log_sd, unseen
from analysis.predictions.clusters.fit import SETS, asked, given

CLEAR = 1.05
Predicted = Mapping[str, float]  # id -> seconds of a step, or bytes


class Score(NamedTuple):
    rows: int  # number of compared rows
    # median, p90: of absolute errors
    median: float
    p90: float
    bias: float  # median of the errors
    # right, pairs: pairs in the right order, and all pairs
    right: int
    pairs: int
    inside: float | None  # fraction of rows in their intervals; None without intervals

    @property
    def order(self) -> str:
        """Percent of pairs in the right order; a dash for few pairs."""
        return f"{100 * self.right / self.pairs:.0f}" if self.pairs >= 5 else "-"


def score(
    cases: Sequence[Case],
    predicted: Predicted,
    widths: Mapping[str, float] | None = None,
    quantity: str = "step_time_s",
) -> Score:
    """The score of a predicted `quantity` of given rows, without pairs for peak bytes.

    Rows without a prediction do not count; `widths` are half those of the logarithms of their intervals.
    """
    known = [case for case in cases if case.id in predicted and getattr(case, quantity)]
    errors = {case.id: predicted[case.id] / getattr(case, quantity) - 1 for case in known}
    right, pairs = _pairs(known, predicted) if quantity == "step_time_s" else (0, 0)
    sizes = sorted(map(abs, errors.values()))
    inside = None
    if widths is not None:
        inside = sum(abs(log(1 + error)) <= widths[name] for name, error in errors.items()) / len(errors)
    p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return Score(len(errors), median(sizes), p90, median(errors.values()), right, pairs, inside)


def _pairs(cases: Sequence[Case], predicted: Predicted) -> tuple[int, int]:
    groups = defaultdict(list)
    for case in cases:
        scale = case.devices / case.tokens
        job = case.job
        key = (job.architecture.name, job.architecture.hidden, job.machine.device.name) if job else case.set_name
        groups[key].append((case.measured_s * scale, predicted[case.id] * scale))
    right = pairs = 0
    for members in groups.values():
        for (a, ours_a), (b, ours_b) in combinations(members, 2):
            if max(a, b) > CLEAR * min(a, b):
                pairs += 1
                right += (a > b) == (ours_a > ours_b)
    return right, pairs


def part_of(case: Case) -> str:
    """The set of a row, with `experts` or `dense` for sets that have both."""
    if case.set_name not in ("megatron_bridge", "dgxc_benchmarking", "nemo_automodel") or case.job is None:
        return case.set_name
    return f"{case.set_name}, {'experts' if case.job.architecture.experts else 'dense'}"


FILE = tables.FOLDER / "clusters.csv"
_STEP, _PEAK = ([f"{name}{end}" for end in ("", "_low", "_high")] for name in ("step_time_s", "peak_memory_bytes"))
COLUMNS = ("id", "status", *_STEP, "tokens_per_s_per_gpu", *_PEAK, "note")
NINE_IN_TEN = 1.645
WIDE = 1.12  # factor of the interval of the bytes of `orders`
BEYOND = 1.03  # of a device's memory: predictions of given runs that fit are below it, of the others above


def predictions() -> Iterable[dict[str, str]]:
    """One row for each withheld case."""
    model = Model()
    for name in sorted(set(SETS) - {"vocab_stage_times"}):
        for case in asked(name):
            yield row_of(case, model)
    yield from orders()


def orders() -> Iterable[dict[str, str]]:
    """Rows about orders alone, from their own tables: iterations of known stages, and relative throughput."""
    stages = {row["id"]: row for row in tables.read("vocab_stage_times")}
    for row in rows_of("challenge", "vocab_stage_times"):
        known, tokens = stages[row["id"]], int(row["micro_batch"]) * int(row["num_microbatches"]) * int(row["seq"])
        low, step, high = (float(known[f"iteration_ms{end}"]) / 1e3 for end in ("_low", "", "_high"))
        need = float(known["peak_memory_bytes"])
        cells = (step, low, high, tokens / step / int(row["gpus"]), need, need / WIDE, need * WIDE)
        found = {"id": row["id"], "status": "ok"}
        found |= {name: f"{cell:.6g}" for name, cell in zip(COLUMNS[2:], cells, strict=False)}
        yield found | {"note": "simulated from the printed times of its stages: vocab_stage_times.csv"}
    for row in rows_of("challenge", "schedules_measured"):
        found = dict.fromkeys(COLUMNS, "")
        yield found | {"id": row["id"], "status": "not_modelled", "note": "a relative pace, in schedules_measured.csv"}


def row_of(case: Case, model: Model) -> dict[str, str]:
    found = dict.fromkeys(COLUMNS, "")
    found |= {"id": case.id, "status": "not_modelled", "note": case.note}
    if case.job is None and case.said is None:
        return found
    found["status"] = "ok"
    if "time" in case.asks:
        step = model.step_time_s(case)
        found |= _spread(_STEP, step, exp(NINE_IN_TEN * step_log_sd(case)), ".5g")
        wider = ", ".join(each.name for each in unseen(case))
        found["note"] = "; ".join(filter(None, (case.note, f"wider interval: {wider}" if wider else "")))
        found["tokens_per_s_per_gpu"] = f"{case.repeats * case.tokens / step / case.devices:.5g}"
    if "memory" in case.asks:
        found["status"] = "OOM" if out_of_memory(case, model) else "ok"
        found |= _spread(_PEAK, model.memory_bytes(case), exp(NINE_IN_TEN * MEMORY[case.set_name]), ".0f")
    return found


def _spread(names: Iterable[str], value: float, margin: float, form: str) -> dict[str, str]:
    """A value and the ends of its interval, which are a factor away."""
    return {name: format(each, form) for name, each in zip(names, (value, value / margin, value * margin), strict=True)}


def out_of_memory(case: Case, model: Model) -> bool:
    """True if the predicted memory is clearly beyond the device's."""
    return case.job is not None and bool(model.memory_bytes(case) > BEYOND * case.job.machine.device.memory_bytes)


SEALED = tables.FOLDER / "sealed_760beda"
OUTCOMES_FILE = SEALED / "outcomes.csv"
PAGE = tables.FOLDER.parents[1] / "docs" / "second_round.md"
PACES = {"internevo", "llm_foundry_fsdp", "megatron_bridge", "torchtitan", "zero_bubble_table4"}  # these print rates


def answered() -> list[tuple[Case, Row]]:
    """Rows that were predicted blind, with measurements that are known now."""
    known = {row["id"]: row for row in tables.read("clusters", SEALED) if row["status"] == "ok"}
    return [(case, known[case.id]) for case in given(SETS) if case.id in known]


def predicted_s(case: Case, row: Row) -> float:
    """The predicted seconds; for a row that prints a rate, those of its tokens at the predicted rate."""
    if case.set_name in PACES:
        return case.repeats * case.tokens / float(row["tokens_per_s_per_gpu"]) / case.devices
    return float(row["step_time_s"])


def rows() -> list[Row]:
    """Each quantity that was predicted and is known now."""
    found = []
    for case, row in answered():
        if case.step_time_s and row["step_time_s"]:
            scale = predicted_s(case, row) / float(row["step_time_s"])
            found.append(_row(case, row, "step_time_s", case.step_time_s, scale))
        if case.memory_bytes and row["peak_memory_bytes"]:
            found.append(_row(case, row, "peak_memory_bytes", case.memory_bytes, 1.0))
    return found


def _row(case: Case, row: Row, quantity: str, measured: float, scale: float) -> Row:
    predicted, low, high = (scale * float(row[f"{quantity}{end}"]) for end in ("", "_low", "_high"))
    return {
        "id": case.id,
        "quantity": quantity,
        **{name: f"{value:.5g}" for name, value in (("predicted", predicted), ("low", low), ("high", high))},
        "measured": f"{measured:.5g}",
        "error": f"{predicted / measured - 1:+.3f}",
        "inside": "yes" if low <= measured <= high else "no",
    }


def summary() -> list[tuple[str, str, Score]]:
    """(set, quantity, score) of the blind round, of the rows that are known now."""
    found = []
    for words, field, quantity, set_of in (
        ("step", "step_time_s", "step_time_s", part_of),
        ("memory", "memory_bytes", "peak_memory_bytes", lambda case: case.set_name),
    ):
        known = {case.id: (case, row) for case, row in answered() if getattr(case, field) and row[quantity]}
        said = {
            name: predicted_s(*pair) if words == "step" else float(pair[1][quantity]) for name, pair in known.items()
        }
        widths = {name: log(float(row[f"{quantity}_high"]) / float(row[quantity])) for name, (_, row) in known.items()}
        for name in sorted({set_of(case) for case, _ in known.values()}):
            cases = [case for case, _ in known.values() if set_of(case) == name]
            found.append((name, words, score(cases, said, widths, field)))
    return found


def table_text(found: list[tuple[str, str, Score]]) -> str:
    rows = []
    for name, quantity, each in found:
        error = f"{100 * each.median:.1f}, {100 * each.p90:.0f} %"
        values = [name, quantity, str(each.rows), error, f"{100 * each.bias:+.1f} %", each.order]
        rows.append([*values, f"{100 * (each.inside or 0):.0f} %"])
    return tables.markdown("set | quantity | rows | median, 90 % | bias | order | inside", rows)
