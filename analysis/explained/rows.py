"""Rows of published tables as sides of `rpbench explain`, written `TABLE:ROW`.

bloom_a100_topologies:35              a run on a mesh: its number in `analysis/published/measured/`
throughput:roundpipe/qwen3-1.7b       a bar of figure 10 (`throughput_a800`: figure 12)
scaling:roundpipe/qwen3-1.7b/4        a point of figure 15
"""

from collections.abc import Mapping
from dataclasses import replace

from analysis.predictions.clusters.case import Case, Row, rows_of
from analysis.predictions.clusters.fit import SETS
from analysis.predictions.clusters.jobs import cases_of_row
from analysis.predictions.compare import PLATFORMS, case_of
from analysis.records.published import OUR_MODELS
from rpbench.config.choices import ConfigError
from rpbench.cost.published import published_rows
from rpbench.explain.predicted import side_of_case, side_of_job, with_settings
from rpbench.explain.side import Number, Rate, Side, counted_flops
from rpbench.registry import unknown_name

SYSTEM_TABLES = ("throughput", "throughput_a800", "scaling")
NAMES = [*SYSTEM_TABLES, *SETS]
# Tables that print a rate -> how they count FLOPs (`rpbench.explain.side.CONVENTIONS`).
RATES = {"llm_foundry_fsdp": "palm", "bloom_a100_topologies": "megatron_recompute"}


def row_names(name: str) -> list[str]:
    """The names of a table's rows, as `side_of` takes them."""
    if name in SYSTEM_TABLES:
        return ["/".join(_key(name, row)) for row in published_rows(f"{name}.csv")]
    return [case.id.split("/")[1] for row in rows_of("measured", name) for case in cases_of_row(row)]


def side_of(word: str) -> Side:
    """The side of `TABLE:ROW`; ConfigError if there is no such row, or it has no time or no model."""
    name, _, row = word.partition(":")
    if name not in NAMES:
        raise ConfigError(f"table={word}: {unknown_name('table', name, NAMES)}")
    if name in SYSTEM_TABLES:
        return _of_system(name, row)
    case = case_of_row(name, row)
    job, notes = case.modelled, (case.note,) if case.note else ()
    slower = job.software.constants["session"] if case.early else 1.0
    side = side_of_job(job, case.measured_s / case.repeats, case.id.replace("/", ":"), slower=slower, notes=notes)
    if case.set_name in RATES:
        flops = counted_flops(job.architecture, job.seq_len, RATES[case.set_name])
        side = replace(side, rate=Rate(flops, job.machine.device.flops_16))
    source = f"analysis/published/measured/{case.set_name}.csv, whose README names source and licence"
    return replace(side, notes=(*side.notes, source))


def case_of_row(name: str, row: str) -> Case:
    """The run of a row on a mesh; ConfigError as of `side_of`."""
    found = {each["id"].split("/")[1]: each for each in rows_of("measured", name)}
    number = row.rstrip("b")  # `b` marks the second of two configurations, which stands in brackets
    if number not in found:
        raise ConfigError(f"table={name}:{row}: {unknown_name('row', row, list(found))}")
    cases = {case.id.split("/")[1]: case for case in cases_of_row(found[number])}
    case = cases.get(row)
    if case is None:
        raise ConfigError(f"table={name}:{row}: the row has one configuration; write table={name}:{number}")
    if case.job is None:
        raise ConfigError(f"table={name}:{row} is not modelled: {case.note}; take another row")
    if not case.step_time_s:
        why = "it ran out of memory" if case.verdict == "oom" else "it prints no time"
        raise ConfigError(f"table={name}:{row} has no pace to explain: {why}; take another row")
    return case


def _of_system(table: str, row: str) -> Side:
    wanted = tuple(row.split("/"))
    rows = {_key(table, each): each for each in published_rows(f"{table}.csv")}
    if wanted not in rows:
        raise ConfigError(f"table={table}:{row}: {unknown_name('row', row, ['/'.join(key) for key in rows])}")
    found = rows[wanted]
    if found["status"] != "ok":
        raise ConfigError(f"table={table}:{row} has no pace to explain: it is {found['status']}; take another row")
    clusters = {published: name for name, published in PLATFORMS.items()}
    try:
        case = case_of(found["system"], clusters[found["platform"]], OUR_MODELS[found["model"]], int(found["num_gpus"]))
        return side_of_case(case, float(found["tokens_per_s"]), f"{table}:{row}")
    except (KeyError, ValueError) as error:
        raise ConfigError(f"table={table}:{row} is not modelled: {error}; take another row") from None


def _key(table: str, row: Row) -> tuple[str, ...]:
    more = (row["num_gpus"],) if table == "scaling" else ()
    return (row["system"], row["model"], *more)


def side_of_number(word: str, number: Number, settings: Mapping[str, str]) -> Side:
    """A typed number of a run that differs from a row's by some settings.

    ConfigError as of `side_of`, and for a setting that a row cannot take; ValueError for a rate without a peak.
    """
    name, _, row = word.partition(":")
    words = " ".join(f"{key}={value}" for key, value in settings.items())
    if name in SYSTEM_TABLES:
        raise ConfigError(f"{words or number.unit}: settings stand beside rows of {', '.join(SETS)}, or beside a run")
    if name not in SETS:
        side_of(word)  # says what is wrong
    job = with_settings(case_of_row(name, row).modelled, settings)
    own = side_of_job(job, None, f"{number.unit}={number.value:g} {words}".strip())
    rate = number.rate(job.architecture, job.seq_len, own.work)
    seconds = number.device_seconds(job.machine.size, job.tokens, rate)
    notes = (f"what is not typed is as in {word}",)
    return replace(own, seconds=seconds, evidence="given", rate=rate, notes=notes)
