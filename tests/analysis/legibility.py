"""What a reader could not read of a figure: labels over one another, labels cut off, legends of what is not drawn.

Everything is asked of matplotlib's own renderer, in the pixels it would draw, so a figure is judged as it is printed.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox, BboxBase

from analysis.exhibits import style

_TOUCH_PX = 1.0  # boxes hold a little air, so a pixel of overlap is none of ink
_OUTSIDE_PX = 2.0
_NUMBER = re.compile(r"[-+−]?[\d.,]+(e[-+]?\d+)?|\$.*\$")
_PAINTS = ("get_color", "get_facecolor", "get_edgecolor", "get_markerfacecolor", "get_markeredgecolor")


@dataclass(frozen=True)
class Defect:
    """One thing that cannot be read, or is told wrongly.

    Args:
        kind: `overlap`, `clipped`, `outside`, `unlabelled` or `legend`.
        what: the labels it is about.
    """

    kind: str
    what: str


def defects(figure: Figure) -> list[Defect]:
    """Every defect of a figure at the size it is saved with."""
    with style.applied():
        FigureCanvasAgg(figure).draw()
        labels = [(text, text.get_window_extent()) for text in _shown(figure)]
        found = [*_overlaps(labels), *_cut_off(figure, labels)]
        for axes in figure.axes:
            found += [*_axes_without_words(axes), *_legend_of_nothing(axes)]
    return found


def _shown(figure: Figure) -> Iterator[Text]:
    """Texts that leave ink: visible, not empty, and with every parent visible."""
    hidden = {id(child) for artist in figure.findobj(_is_hidden) for child in artist.findobj(Text)}
    seen: set[int] = set()
    ticks = {id(text) for axes in figure.axes for text in _out_of_view(axes)}
    for text in figure.findobj(Text):
        if id(text) in seen or id(text) in hidden or id(text) in ticks:
            continue
        seen.add(id(text))
        if text.get_visible() and text.get_text().strip() and (text.get_alpha() or 1) > 0:
            yield text


def _is_hidden(artist: Artist) -> bool:
    return not artist.get_visible()


def _out_of_view(axes: Axes) -> Iterator[Text]:
    """Labels of ticks that a locator made beyond the limits: they are never drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        slack = 1e-9 * (abs(low) + abs(high))
        drawn = {id(tick) for tick in axis._update_ticks()}  # type: ignore[union-attr]
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if id(tick) not in drawn or not low - slack <= tick.get_loc() <= high + slack:
                yield tick.label1
                yield tick.label2
    if not axes.axison:
        yield from axes.get_xticklabels() + axes.get_yticklabels() + [axes.xaxis.label, axes.yaxis.label]


def _overlaps(labels: Sequence[tuple[Text, Bbox]]) -> Iterator[Defect]:
    """Labels over labels; one rotated by less than a right angle is judged by its box when it lies straight."""
    straight = [(text, box) for text, box in labels if text.get_rotation() % 90 == 0]
    straight.sort(key=lambda pair: pair[1].x0)
    for number, (first, box) in enumerate(straight):
        for other, beside in straight[number + 1 :]:
            if beside.x0 > box.x1:
                break
            if _shared(box, beside):
                yield Defect("overlap", f"{first.get_text()!r} and {other.get_text()!r}")


def _shared(one: Bbox, other: Bbox) -> bool:
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(wide > _TOUCH_PX and high > _TOUCH_PX)


def _cut_off(figure: Figure, labels: Iterable[tuple[Text, Bbox]]) -> Iterator[Defect]:
    """Labels that leave the page, and those that their axes cut."""
    for text, box in labels:
        if _leaves(box, figure.bbox):
            yield Defect("outside", repr(text.get_text()))
        elif text.get_clip_on() and (clip := text.get_clip_box()) is not None and _leaves(box, clip):
            yield Defect("clipped", repr(text.get_text()))


def _leaves(box: Bbox, bounds: BboxBase) -> bool:
    beyond = (bounds.x0 - box.x0, box.x1 - bounds.x1, bounds.y0 - box.y0, box.y1 - bounds.y1)
    return bool(max(beyond) > _OUTSIDE_PX)


def _axes_without_words(axes: Axes) -> Iterator[Defect]:
    """An axis of numbers that no label of its panel, or of one beside it, names; ticks that carry none."""
    if not axes.axison or not axes.get_visible():
        return
    for axis in (axes.xaxis, axes.yaxis):
        words = [label.get_text() for label in axis.get_ticklabels() if label.get_visible() and label.get_text()]
        if axis.get_visible() and any(map(_is_number, words)) and not _named(axes, axis.axis_name):
            yield Defect("unlabelled", f"{axis.axis_name} of {axes.get_title(loc='left')!r}: {words[:3]}")


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text.strip()))


def _named(axes: Axes, name: str) -> bool:
    """Whether an axis has a label; in a grid one at its row or column, or one of the figure, is enough."""
    figure = axes.get_figure()
    shared = getattr(figure, f"_sup{name}label", None)
    if shared is not None and shared.get_text():
        return True
    mine = axes.get_subplotspec()
    for other in figure.axes if figure is not None else ():
        place = other.get_subplotspec()
        beside = mine is not None and place is not None and _aligned(mine, place, name)
        if (other is axes or beside) and getattr(other, f"get_{name}label")().strip():
            return True
    return False


def _aligned(one: SubplotSpec, other: SubplotSpec, name: str) -> bool:
    span = "colspan" if name == "x" else "rowspan"
    same_grid = one.get_gridspec() is other.get_gridspec()
    return same_grid and bool(set(getattr(one, span)) & set(getattr(other, span)))


def _legend_of_nothing(axes: Axes) -> Iterator[Defect]:
    """Entries of an axes' legend in a colour that nothing of the figure is drawn in."""
    legend = axes.get_legend()
    if legend is None:
        return
    inside = {id(artist) for artist in legend.findobj()}
    figure = axes.get_figure()
    drawn = _colours(artist for artist in (figure or axes).findobj(_is_drawn) if id(artist) not in inside)
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        if handle is not None and not _colours([handle]) & drawn:
            yield Defect("legend", repr(text.get_text()))


def _is_drawn(artist: Artist) -> bool:
    return artist.get_visible() and isinstance(artist, Line2D | Patch | Collection)


def _colours(artists: Iterable[Artist]) -> set[tuple[float, ...]]:
    """The colours of lines, markers, faces and edges, without their opacity."""
    found: set[tuple[float, ...]] = set()
    for artist in artists:
        for getter in _PAINTS:
            if hasattr(artist, getter):
                found |= {tuple(row[:3]) for row in to_rgba_array(getattr(artist, getter)()) if row[3] > 0}
    return found
