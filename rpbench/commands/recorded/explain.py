"""`explain`: why two numbers differ - two records, a record or a row and a typed number, or two rows of tables."""

import difflib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any, TextIO, get_args

from rpbench.commands.recorded.explained_record import side_of_number, side_of_record
from rpbench.config.choices import ConfigError
from rpbench.explain.number import UNITS, Number, number_of
from rpbench.explain.side import Side
from rpbench.explain.split import Metric, explain
from rpbench.records import record
from rpbench.records.record import Record
from rpbench.registry import unknown_name

USAGE = (
    "explain A B [metric=pace|tflops|mfu] [results_dir=DIR]; A, B: a run id, or table=NAME:ROW; instead of B a number "
    "with its unit and what is known of it: tokens_per_s=N|tokens_per_s_per_device=N|step_time_s=S|"
    "tflops_per_device=N|mfu=SHARE [flops=causal|6n|palm|megatron|megatron_recompute] [peak_flops_per_s=N] "
    "key=value ..."
)
TABLE = "table="
OWN = ("results_dir", "metric")
WIDTH = 28  # of a bar, for the largest part


@dataclass(frozen=True)
class Asked:
    """The words of the command line: names of runs and tables, what the verb itself takes, and a typed number's."""

    names: tuple[str, ...]
    own: Mapping[str, str]
    typed: Mapping[str, str]

    @property
    def results(self) -> Path:
        return Path(self.own.get("results_dir", "results"))


SideOfRow = Callable[[str], Side]
SideOfNumber = Callable[[str, Number, Mapping[str, str]], Side]


def explain_numbers(
    arguments: Sequence[str], people: TextIO, side_of_row: SideOfRow, side_of_row_number: SideOfNumber
) -> dict[str, Any]:
    """The explanation as JSON-ready data; its table goes to `people`.

    Args:
        side_of_row: reads the row `NAME:ROW` of a published table.
        side_of_row_number: a typed number of a run that is like the one of such a row but for some settings.

    Raises:
        ValueError: for whatever in the request cannot be.
    """
    asked = _asked(arguments)
    metric = _metric(asked)
    try:
        answer = explain(*_sides(asked, side_of_row, side_of_row_number), metric).plain()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print_explanation(answer, people)
    return answer


def _asked(arguments: Sequence[str]) -> Asked:
    names, own, typed = [], {}, {}
    for item in arguments:
        key, equals, value = item.partition("=")
        if item.startswith(TABLE) or not equals:
            names.append(item)
        elif not value:
            raise ConfigError(f"cannot read {item!r}: write key=value, as in {USAGE}")
        elif key in own or key in typed:
            raise ConfigError(f"{item}: {key}= is given twice; leave one out")
        elif key in OWN:
            own[key] = value
        else:
            typed[key] = value
    if len(names) == 2 and typed:
        first = next(iter(typed))
        raise ConfigError(unknown_name("key", first, [*OWN]) + f"; a typed number takes the place of {names[1]}")
    if len(names) == 1 and not typed:
        raise ConfigError(f"explain {names[0]}: a second number is missing; {USAGE}")
    if not 1 <= len(names) <= 2:
        raise ConfigError(f"explain takes two numbers, not {len(names)}: {USAGE}")
    return Asked(tuple(names), own, typed)


def _metric(asked: Asked) -> Metric:
    usual = "mfu" if "mfu" in asked.typed else "tflops" if "tflops_per_device" in asked.typed else "pace"
    name = asked.own.get("metric", usual)
    if name not in get_args(Metric):
        raise ConfigError(unknown_name("metric", name, list(get_args(Metric))))
    return name  # type: ignore[return-value]  # one of them


def _sides(asked: Asked, side_of_row: SideOfRow, side_of_row_number: SideOfNumber) -> tuple[Side, Side]:
    first, *others = [
        side_of_row(name.removeprefix(TABLE)) if name.startswith(TABLE) else side_of_record(find(asked.results, name))
        for name in asked.names
    ]
    if others:
        return first, others[0]
    number, settings = number_of(asked.typed)
    name = asked.names[0]
    if name.startswith(TABLE):
        return first, side_of_row_number(name.removeprefix(TABLE), number, settings)
    return first, side_of_number(find(asked.results, name), number, settings)


def find(results: Path, name: str) -> Record:
    """The record whose run_id is, or begins with, a name.

    Raises:
        ConfigError: with the nearest names, or for a number without its unit.
    """
    found = record.beginning_with(results, name)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"run {name!r}: {len(found)} records of {results} begin with it; give more digits")
    if _is_number(name):
        raise ConfigError(
            f"{name}: no run of {results} begins with it, and a number needs its unit: "
            + ", ".join(f"{unit}={name}" for unit in UNITS)
        )
    known = sorted(path.parent.name for path in results.glob("*/record.json"))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    way_out = f"nearest: {', '.join(near)}" if near else "there are no records; run something, or give results_dir=DIR"
    raise ConfigError(f"run {name!r}: no record of {results} begins with it; {way_out}")


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


# --- the table -----------------------------------------------------------------------------------------------


def print_explanation(answer: Mapping[str, Any], people: TextIO) -> None:
    """The causes as a table."""
    width = shutil.get_terminal_size((120, 24)).columns
    a, b, rest = answer["a"], answer["b"], answer["unexplained"]
    lines = [f"B over A, {answer['metric_is']}: {_factor(answer['ratio'])}"]
    for name, side in (("A", a), ("B", b)):
        of_model = side["device_seconds"] / side["predicted_device_seconds"]
        lines.append(
            f"{name}  {side['label']}: {side['device_seconds']:.4g} device-{side['clock']} a {side['per']} "
            f"({side['evidence']}), {_factor(of_model)} of what the model says"
        )
    lines.append(f"{'factor':>8} {'log':>8} {'share':>7}  cause")
    largest = max([abs(row["log"]) for row in answer["causes"]] + [abs(rest["log"]), 1e-12])
    rows = [*answer["causes"], {**rest, "cause": "unexplained", "evidence": "the rest"}]
    lines += [_line(row, largest) for row in rows]
    lines.append(f"{_factor(exp(answer['log_ratio'])):>8} {answer['log_ratio']:>+8.3f} {'100 %':>7}  together")
    lines += [f"{name}: {note}" for name, side in (("A", a), ("B", b)) for note in side["notes"]]
    for line in lines:
        print(line if len(line) <= width else line[: max(20, width - 1)] + "…", file=people)


def _factor(value: float) -> str:
    """A factor with three decimals, or with three digits where it has none of these."""
    return f"{value:.3f}" if 0.01 <= value < 10_000 else f"{value:.2e}"


def _line(row: Mapping[str, Any], largest: float) -> str:
    share = row["share_of_difference"]
    text = "-" if share is None else f"{100 * share:.0f} %"
    bar = ("+" if row["log"] > 0 else "-") * round(WIDTH * abs(row["log"]) / largest)
    factor = f"{_factor(row['factor']):>8} {row['log']:>+8.3f} {text:>7}"
    return f"{factor}  {row['cause']:<16} {row['evidence']:<22} {bar}".rstrip()
