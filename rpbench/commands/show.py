"""`show`: a schedule as text, and what a person would ask about it first."""

import sys
from pathlib import Path
from typing import TextIO

from rpbench.config.request import Request
from rpbench.ir.schedule import to_text
from rpbench.run.assemble import Assembled, assemble


def drawing_path(name: str) -> Path:
    """The file to draw to.

    Raises:
        ValueError: for an ending that is not svg, pdf or png.
    """
    path = Path(name)
    if path.suffix not in (".svg", ".pdf", ".png"):
        raise ValueError(f"draw={name}: the ending decides the format; take .svg, .pdf or .png")
    return path


def show_schedule(request: Request, out: TextIO, form: str = "text") -> Assembled:
    """Print a checked schedule in its text form, or another one, to `out`, its sizes to stderr.

    Raises:
        ValueError: if the schedule cannot be built or does not hold, or the form cannot hold it.
    """
    assembled = assemble(request)
    schedule = assembled.schedule
    out.write(to_text(schedule) if form == "text" else _exported(request, assembled, form))
    out.flush()
    source = f" ({assembled.entry.source})" if assembled.entry else ""
    shape = schedule.shape
    print(
        f"{schedule.name}{source}: {shape.num_ranks} devices, {shape.num_stages} forward and "
        f"{shape.num_backward_stages} backward stages, {shape.num_microbatches} microbatches, "
        f"{schedule.num_actions} actions; checked: complete, placed, free of deadlock",
        file=sys.stderr,
    )
    return assembled


def _exported(request: Request, assembled: Assembled, form: str) -> str:
    from rpbench.sim.longest_path import simulate
    from rpbench.torch_runtime.export import Given, export  # torch's forms; text needs none of them

    given = Given(
        lambda: simulate(assembled.schedule, assembled.costs),
        model=assembled.model,
        host_memory_bytes=assembled.cluster.host_memory_bytes,
        microbatch_sequences=request.workload.microbatch_sequences,
    )
    return export(assembled.schedule, form, given)


def draw_schedule(assembled: Assembled, path: Path, unit: str) -> None:
    """Draw the simulated timeline of a schedule, in `unit`, to a file; its ending decides the format."""
    from rpbench.drawing.timeline_figure import draw_timeline
    from rpbench.sim.longest_path import simulate

    timeline = simulate(assembled.schedule, assembled.costs)
    draw_timeline(timeline, assembled.schedule.name, unit=unit).savefig(path, dpi=200)
    print(f"drawn to {path}", file=sys.stderr)
