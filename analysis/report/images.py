"""Figures as data that a page can hold, each drawn once."""

import base64
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from analysis.exhibits.exhibit import Exhibit
from analysis.exhibits.figures.files import png_bytes, save_figure, svg_text
from rpbench.side_processes import side_processes

# Above this many bytes a vector drawing is a burden to scroll, and pixels are shown instead.
LARGEST_SVG_BYTES = 250_000
# Single timelines have hundreds of bars with words on them: no need to try.
_CROWDED = "timeline_"
# Takes as long as five others, and would otherwise be drawn alone at the end.
_MANY_AXES = "timelines"
_DOTS_PER_INCH = 130

Drawing = tuple[str, Callable[[], Figure]]


def draw_all(
    exhibits: Sequence[Exhibit], folder: Path | None = None, done: Callable[[str], object] = str
) -> dict[str, str]:
    """Data URI of every figure by its file stem; with a folder, PDF and PNG files of them as well.

    Two processes draw where there are two cores and a process can fork.

    Args:
        done: told the stem of each figure that is ready.
    """
    drawings = [item for exhibit in exhibits for item in drawings_of(exhibit).items()]
    images: dict[str, str] = {}
    drawn = _in_parallel(drawings, folder) if _can_fork(len(drawings)) else _one_by_one(drawings, folder)
    for stem, image in drawn:
        images[stem] = image
        done(stem)
    return images


def drawings_of(exhibit: Exhibit) -> dict[str, Callable[[], Figure]]:
    """What makes the figures of an exhibit, by file stem; its own figure first."""
    own = {exhibit.id: exhibit.draw} if exhibit.draw is not None else {}
    return own | dict(exhibit.drawings)


def _can_fork(num_figures: int) -> bool:
    forks = "fork" in multiprocessing.get_all_start_methods() and sys.platform == "linux"
    return num_figures > 1 and forks and (os.cpu_count() or 1) > 1


def _one_by_one(drawings: list[Drawing], folder: Path | None) -> Iterator[tuple[str, str]]:
    return ((stem, _draw(stem, draw, folder)) for stem, draw in drawings)


def _in_parallel(drawings: list[Drawing], folder: Path | None) -> Iterator[tuple[str, str]]:
    longest_first = sorted(range(len(drawings)), key=lambda number: not drawings[number][0].startswith(_MANY_AXES))
    with side_processes(2, "fork", _inherit, drawings, folder) as pool:
        yield from pool.map(_draw_inherited, longest_first)


# What a forked process gets from its parent's memory: what draws a figure need not be sent that way.
_inherited: list[tuple[list[Drawing], Path | None]] = []


def _inherit(drawings: list[Drawing], folder: Path | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interruption is the parent's to report
    _inherited.append((drawings, folder))


def _draw_inherited(number: int) -> tuple[str, str]:
    drawings, folder = _inherited[-1]
    stem, draw = drawings[number]
    return stem, _draw(stem, draw, folder)


def _draw(stem: str, draw: Callable[[], Figure], folder: Path | None) -> str:
    figure = draw()
    if folder is not None:
        save_figure(figure, stem, folder)
    if not stem.startswith(_CROWDED):
        drawing = svg_text(figure).encode()
        if len(drawing) <= LARGEST_SVG_BYTES:
            return _data_uri("svg+xml", drawing)
    saved = folder / f"{stem}.png" if folder is not None else None
    return _data_uri("png", saved.read_bytes() if saved else png_bytes(figure, _DOTS_PER_INCH))


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
