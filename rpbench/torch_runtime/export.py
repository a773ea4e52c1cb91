"""Export: a schedule in the form another program reads, by name; what `show ... format=` prints."""

import json
from collections.abc import Callable, Mapping

from rpbench.ir.schedule import Schedule, to_text
from rpbench.ir.timeline import Timeline
from rpbench.torch_runtime.frameworks import (
    FRAMEWORKS,
    deepspeed_parts,
    megatron_options,
    megatron_virtual_stages,
    table_lines,
)
from rpbench.torch_runtime.tables import make_table
from rpbench.torch_runtime.torch_csv import placement_of, to_csv

Times = Callable[[], Timeline]  # simulated when asked for: only one form needs it


def export(schedule: Schedule, form: str, times: Times, *, csv_path: str = "schedule.csv") -> str:
    """The text of a schedule in one of `FORMS`.

    Args:
        times: gives its timeline.
        csv_path: the name that a framework's options give the table.

    Raises:
        ValueError: for an unknown form, or a schedule that the form cannot hold, with the reason.
    """
    if form not in FORMS:
        raise ValueError(f"format={form}: one of {', '.join(FORMS)}")
    return FORMS[form](schedule, times, csv_path)


def chrome_trace(timeline: Timeline) -> str:
    """A timeline for chrome://tracing or Perfetto, one JSON object."""
    return json.dumps(timeline.to_chrome_trace()) + "\n"


def _framework_lines(schedule: Schedule, times: Times, csv_path: str) -> str:
    """Options of torchtitan and, as comments, of AutoModel."""
    first, *others = FRAMEWORKS
    text = table_lines(schedule, csv_path, first).to_toml() + "\n"
    for other in others:
        lines = table_lines(schedule, csv_path, other).to_toml().splitlines()
        text += "\n".join([f"# --- {other}", *(f"# {line}" for line in lines)]) + "\n"
    return text


def _megatron(schedule: Schedule, times: Times, csv_path: str) -> str:
    """One option a line; the order stays Megatron's own. Equal virtual stages also in Megatron's older words."""
    if schedule.partition is None:
        raise ValueError("format=megatron_layout writes a partition, and this schedule has none: name a model")
    table = make_table(schedule)
    options = megatron_options(schedule.partition, schedule.shape.num_ranks, placement_of(table))
    text = "".join(f"--{name} {value}\n" for name, value in options.items())
    equal = megatron_virtual_stages(schedule.partition, schedule.shape.num_ranks)
    if equal is not None:
        text += "# or, because the stages are equal, instead of the layout:\n"
        text += "".join(f"# --{name} {value}\n" for name, value in equal.items())
    return text


def _deepspeed(schedule: Schedule, times: Times, csv_path: str) -> str:
    """The boundaries as a JSON list."""
    if schedule.partition is None:
        raise ValueError("format=deepspeed_parts writes a partition, and this schedule has none: name a model")
    return json.dumps(deepspeed_parts(schedule.partition)) + "\n"


FORMS: Mapping[str, Callable[[Schedule, Times, str], str]] = {
    "text": lambda schedule, times, csv_path: to_text(schedule),
    "torch_csv": lambda schedule, times, csv_path: to_csv(schedule),
    "chrome_trace": lambda schedule, times, csv_path: chrome_trace(times()),
    "megatron_layout": _megatron,
    "torchtitan": _framework_lines,
    "deepspeed_parts": _deepspeed,
}
