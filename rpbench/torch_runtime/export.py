"""Export: a schedule in the form another program reads, by name; what `show ... format=` prints."""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rpbench.ir.schedule import Schedule, to_text
from rpbench.ir.timeline import Timeline
from rpbench.torch_runtime.frameworks import (
    FRAMEWORKS,
    deepspeed_parts,
    megatron_options,
    megatron_virtual_stages,
    roundpipe_host_bytes,
    roundpipe_plan,
    table_lines,
)
from rpbench.torch_runtime.tables import make_table
from rpbench.torch_runtime.torch_csv import placement_of, to_csv
from rpbench.workload.architecture import Architecture

Times = Callable[[], Timeline]  # simulated when asked for: only one form needs it


class Given(NamedTuple):
    """What a form may ask for beside the schedule.

    Args:
        times: gives its timeline.
        csv_path: the name that a framework's options give the table.
        model: what is trained; None where there are no shapes.
        host_memory_bytes: of a host, where it is known.
        microbatch_sequences: of a microbatch.
    """

    times: Times
    csv_path: str = "schedule.csv"
    model: Architecture | None = None
    host_memory_bytes: int | None = None
    microbatch_sequences: int = 1


def export(schedule: Schedule, form: str, given: Given) -> str:
    """The text of a schedule in one of `FORMS`.

    Raises:
        ValueError: for an unknown form, or a schedule that the form cannot hold, with the reason.
    """
    if form not in FORMS:
        raise ValueError(f"format={form}: one of {', '.join(FORMS)}")
    return FORMS[form](schedule, given)


def chrome_trace(timeline: Timeline) -> str:
    """A timeline for chrome://tracing or Perfetto, one JSON object."""
    return json.dumps(timeline.to_chrome_trace()) + "\n"


def _framework_lines(schedule: Schedule, given: Given) -> str:
    """Options of torchtitan and, as comments, of AutoModel."""
    first, *others = FRAMEWORKS
    text = table_lines(schedule, given.csv_path, first, sequences=given.microbatch_sequences).to_toml() + "\n"
    for other in others:
        found = table_lines(schedule, given.csv_path, other, sequences=given.microbatch_sequences)
        lines = found.to_toml().splitlines()
        text += "\n".join([f"# --- {other}", *(f"# {line}" for line in lines)]) + "\n"
    return text


def _megatron(schedule: Schedule, given: Given) -> str:
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


def _deepspeed(schedule: Schedule, given: Given) -> str:
    """The boundaries as a JSON list."""
    if schedule.partition is None:
        raise ValueError("format=deepspeed_parts writes a partition, and this schedule has none: name a model")
    return json.dumps(deepspeed_parts(schedule.partition)) + "\n"


def _roundpipe(schedule: Schedule, given: Given) -> str:
    """The released library's plan as one JSON object, with the host's memory where the model has a shape."""
    if schedule.partition is None:
        raise ValueError("format=roundpipe writes a partition, and this schedule has none: name a model")
    plan = roundpipe_plan(schedule.partition)
    if given.model is not None:
        needed = roundpipe_host_bytes(given.model)
        plan["host_bytes"] = needed
        if given.host_memory_bytes is not None:
            plan["fits_host"] = {pin: num_bytes <= given.host_memory_bytes for pin, num_bytes in needed.items()}
    return json.dumps(plan) + "\n"


FORMS: Mapping[str, Callable[[Schedule, Given], str]] = {
    "text": lambda schedule, given: to_text(schedule),
    "torch_csv": lambda schedule, given: to_csv(schedule),
    "chrome_trace": lambda schedule, given: chrome_trace(given.times()),
    "megatron_layout": _megatron,
    "torchtitan": _framework_lines,
    "deepspeed_parts": _deepspeed,
    "roundpipe": _roundpipe,
}
