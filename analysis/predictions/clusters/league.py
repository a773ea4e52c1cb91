"""League: the same given rows predicted by closed forms, by other tools' printed predictions and by us.

    constant MFU                one share of the peak for all rows of a device: the median of the given ones
    bubble x efficiency         the same after the ideal bubble of the schedule has been taken out
    SimuMax, printed            what the tool's own table prints beside its measurements
    ours, fitted                constants that have seen the rows
    ours, held out              constants that have not seen the row's group (`clusters_holdout.csv`)

Errors are predicted / measured - 1; pairs are of one model and device, more than 5 % apart.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import median

from analysis.predictions.clusters.case import Case, Model, number, rows_of
from analysis.predictions.clusters.holdout import FILE as HELD_OUT
from analysis.predictions.clusters.problems import given
from analysis.predictions.clusters.spread import STEP, step_log_sd
from analysis.predictions.clusters.writing import NINE_IN_TEN

FILE = Path(__file__).resolve().parents[1] / "clusters_league.csv"
COLUMNS = ("set", "contender", "rows", "median_error", "p90_error", "bias", "pairs_right", "pairs", "inside_interval")
CLEAR = 1.05
Predicted = Mapping[str, float]  # id -> seconds of a step


def table() -> list[dict[str, str]]:
    """One row for each set and contender."""
    found = []
    for name in STEP:
        cases = [case for case in given((name,)) if case.job and case.step_time_s and case.fits]
        if len(cases) < 4:
            continue
        for contender, predict in CONTENDERS.items():
            predicted = predict(cases)
            if predicted:
                found.append(_row(name, contender, cases, predicted))
    return found


def constant_mfu(cases: Sequence[Case]) -> Predicted:
    """Seconds if all rows of a device reached the same share of its peak."""
    return _by_efficiency(cases, lambda case: 0.0)


def bubble_and_efficiency(cases: Sequence[Case]) -> Predicted:
    """Seconds if they did outside of the ideal bubble."""
    return _by_efficiency(cases, _bubble)


def _by_efficiency(cases: Sequence[Case], bubble: Callable[[Case], float]) -> Predicted:
    ideal = {case.id: _ideal_s(case) * (1.0 + bubble(case)) for case in cases}
    shares = defaultdict(list)
    for case in cases:
        assert case.job is not None
        assert case.step_time_s is not None
        shares[case.job.machine.device.name].append(ideal[case.id] / case.step_time_s)
    return {case.id: ideal[case.id] / median(shares[case.job.machine.device.name]) for case in cases if case.job}


def _ideal_s(case: Case) -> float:
    job = case.job
    assert job is not None
    work = job.architecture.flops_per_token(job.seq_len) * job.tokens * (4 / 3 if job.recompute == "full" else 1.0)
    return work / job.machine.size / job.machine.device.flops_16


def _bubble(case: Case) -> float:
    assert case.job is not None
    return (case.job.mesh.pipeline - 1) / (case.job.num_microbatches * case.job.chunks)


def simumax_printed(cases: Sequence[Case]) -> Predicted:
    """What SimuMax prints for the given rows of its own table."""
    ids = {case.id for case in cases}
    printed = {row["id"]: number(row["simumax_ms"]) for row in rows_of("measured", "simumax_b200")}
    return {name: value / 1e3 for name, value in printed.items() if name in ids and value}


def ours(cases: Sequence[Case]) -> Predicted:
    """With the constants as committed."""
    model = Model()
    return {case.id: model.step_time_s(case) for case in cases}


def ours_held_out(cases: Sequence[Case]) -> Predicted:
    """With constants that have not seen a row's group; the geometric mean over the axes that hold it out."""
    ids, found = {case.id for case in cases}, defaultdict(list)
    with HELD_OUT.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["id"] in ids:
                found[row["id"]].append(log(float(row["predicted_s"])))
    return {name: exp(sum(values) / len(values)) for name, values in found.items()}


CONTENDERS: dict[str, Callable[[Sequence[Case]], Predicted]] = {
    "constant MFU": constant_mfu,
    "bubble x efficiency": bubble_and_efficiency,
    "SimuMax, printed": simumax_printed,
    "ours, fitted": ours,
    "ours, held out": ours_held_out,
}


def _row(name: str, contender: str, cases: Sequence[Case], predicted: Predicted) -> dict[str, str]:
    chosen = [case for case in cases if case.id in predicted]
    errors = {case.id: predicted[case.id] / case.step_time_s - 1 for case in chosen if case.step_time_s}
    sizes = sorted(abs(error) for error in errors.values())
    right, pairs = _pairs(chosen, predicted)
    inside = ""
    if contender.startswith("ours"):
        covered = [abs(log(1 + errors[case.id])) <= NINE_IN_TEN * step_log_sd(case) for case in chosen]
        inside = f"{sum(covered) / len(covered):.2f}"
    return {
        "set": name,
        "contender": contender,
        "rows": str(len(chosen)),
        "median_error": f"{median(sizes):.3f}",
        "p90_error": f"{sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]:.3f}",
        "bias": f"{median(errors.values()):+.3f}",
        "pairs_right": str(right),
        "pairs": str(pairs),
        "inside_interval": inside,
    }


def _pairs(cases: Sequence[Case], predicted: Predicted) -> tuple[int, int]:
    """Pairs in the right order, and all that are more than 5 % apart: of paces a device and token."""
    groups = defaultdict(list)
    for case in cases:
        job = case.job
        assert job is not None
        assert case.step_time_s is not None
        scale = job.machine.size / job.tokens
        key = (job.architecture.name, job.architecture.hidden, job.machine.device.name)
        groups[key].append((case.step_time_s * scale, predicted[case.id] * scale))
    right = pairs = 0
    for members in groups.values():
        for (a, ours_a), (b, ours_b) in combinations(members, 2):
            if max(a, b) > CLEAR * min(a, b):
                pairs += 1
                right += (a > b) == (ours_a > ours_b)
    return right, pairs


def write() -> int:
    """Write the file; returns the number of rows."""
    found = table()
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return len(found)
