"""Figures as files beside the pages: for wide pages, phones, dark pages and downloads."""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Exhibit
from analysis.exhibits.figures.files import save_dark, save_figure, save_png, svg_text
from rpbench.records.provenance import usable_cores
from rpbench.side_processes import forks, inherited

WIDTH_INCHES = 4.4
_MOST_PANELS = 12  # too many to stack on a phone
_LEAST_HEIGHT_INCHES = 1.7
_LINE = 44  # characters below an axis; half as many beside it
_LONG_LABEL = 20  # characters; longer labels do not fit into two columns


def stacked(figure: Figure) -> bool:
    """Stack the panels of a figure; False, and nothing done, for one column or too many panels.

    A panel that shared an axis with its neighbour gets the neighbour's labels.
    """
    panels = [axes for axes in figure.axes if axes.get_subplotspec() is not None and axes.get_visible()]
    panels.sort(key=lambda axes: (axes.get_subplotspec().rowspan.start, axes.get_subplotspec().colspan.start))  # type: ignore[union-attr]
    columns = {axes.get_subplotspec().colspan.start for axes in panels}  # type: ignore[union-attr]
    if len(columns) < 2 or len(panels) > _MOST_PANELS:
        return False
    wide, high = figure.get_size_inches()
    each = max(_LEAST_HEIGHT_INCHES, 0.85 * high / (len(panels) // len(columns)))
    with style.applied():
        _label(panels)
        for words, write in (
            (figure.get_supxlabel(), figure.supxlabel),
            (figure.get_supylabel(), figure.supylabel),
            (figure.get_suptitle(), figure.suptitle),
        ):
            if words:
                write(fill(words, _LINE), fontsize=8.5)
        grid = figure.add_gridspec(len(panels), 1)
        for place, axes in enumerate(panels):
            axes.set_subplotspec(grid[place])
            axes.tick_params(labelleft=True, labelbottom=True)
        figure.set_size_inches(min(WIDTH_INCHES, wide), len(panels) * each + _legend(figure) + 0.3)
    return True


def _legend(figure: Figure) -> float:
    """Replace all legends by one below the panels; its height in inches."""
    named = [
        (handle, text.get_text())
        for legend in figure.legends
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True)
        if handle is not None
    ]
    if not named:
        return 0.0
    for legend in tuple(figure.legends):
        legend.remove()
    handles, labels = zip(*named, strict=True)
    columns = 1 if max(map(len, labels)) > _LONG_LABEL else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return 0.18 * -(-len(labels) // columns)


def _label(panels: list[Axes]) -> None:
    """Move a shared x label below the last panel, and repeat a shared y label on each."""
    across = [axes for axes in panels if axes.get_xlabel()]
    if len(across) == 1:
        words = across[0].get_xlabel()
        across[0].set_xlabel("")
        panels[-1].set_xlabel(words)
    up = [axes.get_ylabel() for axes in panels if axes.get_ylabel()]
    for axes in panels:
        if len(axes.get_title(loc="left")) > _LINE:
            axes.set_title(fill(axes.get_title(loc="left"), _LINE))
        axes.set_xlabel(fill(axes.get_xlabel(), _LINE))
        axes.set_ylabel(fill(axes.get_ylabel() or (up[0] if len(up) == 1 else ""), _LINE // 2))


LARGEST_SVG_BYTES = 250_000  # larger vector drawings scroll slowly: pixels are shown instead
_CROWDED = "timeline_"  # single timelines have hundreds of labelled bars and always exceed that
_MANY_AXES = "timelines"  # takes as long as five others, so it is drawn first
_PIXELS_PER_INCH = 96
_DOTS_PER_INCH = 144  # a figure opens at most about 1.6 times as large as on the page
_DOTS_PER_INCH_BESIDE = 120  # of a picture to download beside its vector drawing

# A file stem, its drawing function, and whether it is one of an exhibit's further drawings.
Drawing = tuple[str, Callable[[], Figure], bool]


@dataclass(frozen=True)
class Shown:
    """A file that a page shows, its size in pixels, and its file for dark pages if it needs one."""

    name: str
    width: int
    height: int
    dark: str = ""


@dataclass(frozen=True)
class Image:
    """The files of a figure, in one folder."""

    wide: Shown
    narrow: Shown | None  # for a phone, with stacked panels; None for one panel
    files: tuple[str, ...]  # to download; of a further drawing only the one that is shown


def draw_all(exhibits: Sequence[Exhibit], folder: Path, done: Callable[[str], object] = str) -> dict[str, Image]:
    """Draw every figure into a folder and call `done` with its stem; the files of each by its stem.

    Two processes draw if there are two cores and processes can fork.
    """
    drawings = [
        (stem, draw, stem in exhibit.drawings) for exhibit in exhibits for stem, draw in drawings_of(exhibit).items()
    ]
    images: dict[str, Image] = {}
    drawn: Iterable[tuple[str, Image]] = ((drawing[0], _draw(*drawing, folder)) for drawing in drawings)
    if len(drawings) > 1 and sys.platform == "linux" and usable_cores() > 1:
        drawn = _in_parallel(drawings, folder)
    for stem, image in drawn:
        images[stem] = image
        done(stem)
    return images


def drawings_of(exhibit: Exhibit) -> dict[str, Callable[[], Figure]]:
    """The drawing functions of an exhibit by file stem; its own figure first."""
    own = {exhibit.id: exhibit.draw} if exhibit.draw is not None else {}
    return own | dict(exhibit.drawings)


def _in_parallel(drawings: list[Drawing], folder: Path) -> Iterator[tuple[str, Image]]:
    def draw(number: int) -> tuple[str, Image]:
        return drawings[number][0], _draw(*drawings[number], folder)

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interruption is the parent's to report

    longest_first = sorted(range(len(drawings)), key=lambda number: not drawings[number][0].startswith(_MANY_AXES))
    with forks(2, draw, begin) as pool:
        yield from pool.map(inherited, longest_first)


def _draw(stem: str, draw: Callable[[], Figure], is_one_of_many: bool, folder: Path) -> Image:
    figure = draw()
    if is_one_of_many:
        shown = _shown(figure, stem, folder)
        return Image(shown, None, (shown.name,))
    pdf, png = (path.name for path in save_figure(figure, stem, folder, _DOTS_PER_INCH_BESIDE))
    wide = _shown(figure, stem, folder)
    narrow = None
    if stacked(again := draw()):
        narrow = _shown(again, f"{stem}.narrow", folder)
    return Image(wide, narrow, (png, pdf, wide.name) if wide.name.endswith(".svg") else (png, pdf))


def _shown(figure: Figure, stem: str, folder: Path) -> Shown:
    """The vector drawing, or pixels if that is too large."""
    folder.mkdir(parents=True, exist_ok=True)
    width, height = (round(_PIXELS_PER_INCH * inches) for inches in figure.get_size_inches())
    if not stem.startswith(_CROWDED):
        drawing = svg_text(figure)
        if len(drawing) <= LARGEST_SVG_BYTES:
            (folder / f"{stem}.svg").write_text(drawing, encoding="utf-8")
            return Shown(f"{stem}.svg", width, height)
    path = save_png(figure, folder / f"{stem}.png", _DOTS_PER_INCH)
    return Shown(path.name, width, height, save_dark(path).name)
