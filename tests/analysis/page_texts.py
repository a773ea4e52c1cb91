"""Whether the texts of a figure stay on its page and apart."""

from itertools import chain, pairwise

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text


def check_texts(figure: Figure) -> None:
    figure.draw_without_rendering()
    ticks = [
        [label for label in axis.get_ticklabels() if label.get_text() and _in_view(axis, label)]
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
    ]
    tick_texts = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels()}
    others = [text for text in figure.findobj(Text) if text not in tick_texts and text.get_text()]
    for text in [*others, *chain.from_iterable(ticks)]:
        box = text.get_window_extent()
        inside = figure.bbox.padded(1)
        assert inside.contains(box.x0, box.y0), f"{text.get_text()!r} leaves the page"
        assert inside.contains(box.x1, box.y1), f"{text.get_text()!r} leaves the page"
    for labels in ticks:
        for first, second in pairwise(labels):
            assert not first.get_window_extent().overlaps(second.get_window_extent()), first.get_text()


def _in_view(axis: Axis, label: Text) -> bool:
    low, high = sorted(axis.get_view_interval())
    place = label.get_position()[0 if axis.axis_name == "x" else 1]
    return bool(low <= place <= high)
