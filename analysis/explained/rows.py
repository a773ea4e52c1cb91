"""Rows of published tables as sides: `NAME:ROW`, the folder's name apart.

    bloom_a100_topologies:35              a run under a mesh: its number in `analysis/published/measured/`
    throughput:roundpipe/qwen3-1.7b       a bar of figure 10 (`throughput_a800`: 12; `scaling`: 15, behind a third /,
                                          the devices)
"""

from dataclasses import replace

from analysis.predictions.cases import PLATFORMS, case_of
from analysis.predictions.clusters.case import Case, Row, rows_of
from analysis.predictions.clusters.problems import SOURCES
from analysis.records.paper import PUBLISHED_MODELS
from rpbench.cost.published import published_rows
from rpbench.explain.of_case import side_of_case
from rpbench.explain.of_job import rated, side_of_job
from rpbench.explain.side import Side
from rpbench.harness.choices import ConfigError
from rpbench.mesh.job import Job
from rpbench.registry import unknown_name

SYSTEM_TABLES = ("throughput", "throughput_a800", "scaling")
# How a table counts the rate that it prints: its column, FLOPs of a token, and the peak it divides by.
RATES = {
    "llm_foundry_fsdp": ("mfu_pct", "palm"),
    "bloom_a100_topologies": ("tflops_reported", "megatron_recompute"),
}


def names() -> list[str]:
    """The tables that have sides."""
    return [*SYSTEM_TABLES, *SOURCES]


def side_of(word: str) -> Side:
    """The side of `NAME:ROW`.

    Raises:
        ConfigError: for a table or row that is not there, that prints no time, or that is not modelled.
    """
    name, _, row = word.partition(":")
    if name not in names():
        raise ConfigError(f"table={word}: {unknown_name('table', name, names())}")
    if name in SYSTEM_TABLES:
        return _of_system(name, row)
    case = case_of_row(name, row)
    assert case.job is not None
    assert case.step_time_s is not None
    return _of_job(case, case.job)


def job_of(word: str) -> Job | None:
    """What ran in a row under a mesh; None for rows of systems."""
    name, _, row = word.partition(":")
    return case_of_row(name, row).job if name in SOURCES else None


def case_of_row(name: str, row: str) -> Case:
    """The run of a row under a mesh, modelled and timed.

    Raises:
        ConfigError: as of `side_of`.
    """
    found = {each["id"].split("/")[1]: each for each in rows_of("measured", name)}
    number = row.rstrip("b")  # of a row with two configurations, the one in brackets
    if number not in found:
        raise ConfigError(f"table={name}:{row}: {unknown_name('row', row, list(found))}")
    cases = {case.id.split("/")[1]: case for case in SOURCES[name].read(found[number])}
    case = cases.get(row)
    if case is None:
        raise ConfigError(f"table={name}:{row}: the row has one configuration; write table={name}:{number}")
    if case.job is None:
        raise ConfigError(f"table={name}:{row} is not modelled: {case.note}; take another row")
    if not case.step_time_s:
        why = "it ran out of memory" if case.verdict == "oom" else "it prints no time"
        raise ConfigError(f"table={name}:{row} has no pace to explain: {why}; take another row")
    return case


def _of_job(case: Case, job: Job) -> Side:
    assert case.step_time_s is not None
    slower = job.software.constants["session"] if case.early else 1.0
    side = side_of_job(
        job,
        case.step_time_s / case.repeats,
        case.id.replace("/", ":"),
        slower=slower,
        notes=(case.note,) if case.note else (),
    )
    column, convention = RATES.get(case.set_name, ("", ""))
    if column:
        peak = job.machine.gpu.flops_16 if column.startswith("mfu") else None
        side = rated(job, side, convention, peak)
    return replace(side, notes=(*side.notes, _source(case.set_name)))


def _source(name: str) -> str:
    return f"analysis/published/measured/{name}.csv, whose README names source and licence"


def _of_system(table: str, row: str) -> Side:
    wanted = tuple(row.split("/"))
    rows = {_key(table, each): each for each in published_rows(f"{table}.csv")}
    if wanted not in rows:
        raise ConfigError(f"table={table}:{row}: {unknown_name('row', row, ['/'.join(key) for key in rows])}")
    found = rows[wanted]
    if found["status"] != "ok":
        raise ConfigError(f"table={table}:{row} has no pace to explain: it is {found['status']}; take another row")
    models = {published: name for name, published in PUBLISHED_MODELS.items()}
    clusters = {published: name for name, published in PLATFORMS.items()}
    try:
        case = case_of(found["system"], clusters[found["platform"]], models[found["model"]], int(found["num_gpus"]))
        return side_of_case(case, float(found["tokens_per_s"]), f"{table}:{row}")
    except (KeyError, ValueError) as error:
        raise ConfigError(f"table={table}:{row} is not modelled: {error}; take another row") from None


def _key(table: str, row: Row) -> tuple[str, ...]:
    more = (row["num_gpus"],) if table == "scaling" else ()
    return (row["system"], row["model"], *more)
