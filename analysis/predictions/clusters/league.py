"""League: given rows predicted by closed forms, by other tools and by us.

constant MFU                one fraction of the peak for all rows of a device, a precision and a class of models
                            (dense, experts): the median of these rows
bubble x efficiency         the same without the ideal bubble of the schedule
SimuMax, printed            what the tool's own table prints beside its measurements
ours, fitted                constants that were fitted on the rows as well
ours, held out              constants fitted without the row's group (`clusters_holdout.csv`)
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean, median

from analysis.predictions import tables
from analysis.predictions.clusters.case import STEP, TABLES, Case, Model, number, rows_of, step_log_sd
from analysis.predictions.clusters.fit import given
from analysis.predictions.clusters.holdout import FILE as HELD_OUT
from analysis.predictions.clusters.writing import NINE_IN_TEN, Predicted, part_of, score
from analysis.records.runs import grouped
from rpbench.mesh.job import Job

FILE = Path(__file__).resolve().parents[1] / "clusters_league.csv"


def table() -> list[dict[str, str]]:
    """One row for each set and contender, with separate rows for models with experts."""
    cases = [case for case in given(tuple(STEP)) if case.job and case.step_time_s and case.fits]
    return [
        _row(name, contender, chosen, predicted)
        for name, chosen in grouped(cases, part_of).items()
        if len(chosen) >= 4
        for contender, predict in CONTENDERS.items()
        if (predicted := predict(chosen))
    ]


def _by_efficiency(cases: Sequence[Case], bubble: Callable[[Job], float]) -> Predicted:
    """Seconds if all rows of a class reach the same fraction of their device's peak outside the bubble."""
    ideal = {case.id: _ideal_s(case.modelled) * (1.0 + bubble(case.modelled)) for case in cases}
    shares = {
        kind: median(ideal[case.id] / case.measured_s for case in own) for kind, own in grouped(cases, _class).items()
    }
    return {case.id: ideal[case.id] / shares[_class(case)] for case in cases}


def _class(case: Case) -> tuple[str, str, bool]:
    """Device, precision, and whether there are experts: rows with one utilisation."""
    job = case.modelled
    return job.machine.device.name, job.precision, job.architecture.experts is not None


def _ideal_s(job: Job) -> float:
    work = job.architecture.flops_per_token(job.seq_len) * job.tokens * (4 / 3 if job.recompute == "full" else 1.0)
    return work / job.machine.size / job.machine.device.flops_16


def simumax_printed(cases: Sequence[Case]) -> Predicted:
    """The seconds that SimuMax prints for rows of its own table."""
    ids = {case.id for case in cases}
    printed = {row["id"]: number(row["simumax_ms"]) for row in rows_of("measured", "simumax_b200")}
    return {name: value / 1e3 for name, value in printed.items() if name in ids and value}


def ours_held_out(cases: Sequence[Case]) -> Predicted:
    """With constants fitted without a row's group; the geometric mean over the axes."""
    ids = {case.id for case in cases}
    held = grouped((row for row in tables.read(HELD_OUT.stem) if row["id"] in ids), itemgetter("id"))
    return {name: geometric_mean(float(row["predicted_s"]) for row in rows) for name, rows in held.items()}


CONTENDERS: dict[str, Callable[[Sequence[Case]], Predicted]] = {
    "constant MFU": lambda cases: _by_efficiency(cases, lambda job: 0.0),
    "bubble x efficiency": lambda cases: _by_efficiency(
        cases, lambda job: (job.mesh.pipeline - 1) / (job.num_microbatches * job.chunks)
    ),
    "SimuMax, printed": simumax_printed,
    "ours, fitted": lambda cases: {case.id: Model().step_time_s(case) for case in cases},
    "ours, held out": ours_held_out,
}


def _row(name: str, contender: str, cases: Sequence[Case], predicted: Predicted) -> dict[str, str]:
    widths = {case.id: NINE_IN_TEN * step_log_sd(case) for case in cases} if contender.startswith("ours") else None
    found = score(cases, predicted, widths)
    return {
        "set": name,
        "contender": contender,
        "rows": str(found.rows),
        "median_error": f"{found.median:.3f}",
        "p90_error": f"{found.p90:.3f}",
        "bias": f"{found.bias:+.3f}",
        "pairs_right": str(found.right),
        "pairs": str(found.pairs),
        "inside_interval": "" if found.inside is None else f"{found.inside:.2f}",
    }


def table_text(found: Sequence[dict[str, str]]) -> str:
    rows = []
    for name, own in grouped(found, itemgetter("set")).items():
        by = {row["contender"]: row for row in own}
        plain, fitted, out = by["constant MFU"], by["ours, fitted"], by.get("ours, held out")
        held = out or fitted
        order = f"{100 * int(held['pairs_right']) / int(held['pairs']):.0f} %" if int(held["pairs"]) >= 5 else "-"
        cells = [name, fitted["rows"], _errors(plain), _errors(fitted), _errors(out) if out else "-"]
        rows.append([*cells, TABLES["targets"].get(name, "-"), order, f"{100 * float(held['inside_interval']):.0f} %"])
    heads = "set | rows | constant utilisation | ours, in sample | held out | target | order | inside"
    return tables.markdown(heads, rows)


def _errors(row: dict[str, str]) -> str:
    return f"{100 * float(row['median_error']):.1f}, {100 * float(row['p90_error']):.0f} %"
