"""Names beside points: each where it hides no other name, no marker and stays inside the axes."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

_GAP_PX = 5.0  # between a marker's middle and its name
_MARKER_PX = 4.5  # half the size of a marker
_TIED_PX = 12.0  # from here on a line ties a name to its point


def name_points(axes: Axes, points: Sequence[tuple[float, float, str]], fontsize: float = 6.4) -> None:
    """Write names beside points, the nearest free place first; a name that went far is tied to its point.

    The layout of the figure is settled first, so all limits must be set before.

    Args:
        points: x, y in data coordinates, and the name.
    """
    figure = axes.get_figure(root=True)
    if figure is None:
        return
    figure.draw_without_rendering()
    inside = axes.get_window_extent()
    spots = [axes.transData.transform(point[:2]) for point in points]
    taken = [Bbox.from_bounds(x - _MARKER_PX, y - _MARKER_PX, 2 * _MARKER_PX, 2 * _MARKER_PX) for x, y in spots]
    to_data = axes.transData.inverted()
    for (x, y), (*at, name) in sorted(zip(spots, points, strict=True), key=lambda pair: -pair[0][1]):
        text = axes.annotate(name, (at[0], at[1]), (0, 0), textcoords="data", fontsize=fontsize, va="bottom", ha="left")
        size = text.get_window_extent()
        box = _free(_places(x, y, size.width, size.height), inside, taken)
        taken.append(box)
        text.set_position(tuple(to_data.transform((box.x0, box.y0))))
        text.set_in_layout(False)
        if abs(_away(box, x, y)) > _TIED_PX:
            end = to_data.transform((min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)))
            axes.plot([at[0], end[0]], [at[1], end[1]], color="#8C8C8C", linewidth=0.3, zorder=0.5)


def _places(x: float, y: float, width: float, height: float) -> Iterator[Bbox]:
    """Boxes round a point: right, left, above and below of it, then further and further up and down."""
    for far in range(60):
        for sign in (1, -1) if far else (1,):
            low = y - height / 2 + sign * far * height / 2
            yield Bbox.from_bounds(x + _GAP_PX, low, width, height)
            yield Bbox.from_bounds(x - _GAP_PX - width, low, width, height)
            if far > 1:
                yield Bbox.from_bounds(x - width / 2, low, width, height)


def _free(places: Iterator[Bbox], inside: Bbox, taken: Sequence[Bbox]) -> Bbox:
    """The first place that is free; the first of all where none is."""
    first = None
    for box in places:
        first = first or box
        within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
        if within and not any(box.overlaps(other) for other in taken):
            return box
    assert first is not None
    return first


def _away(box: Bbox, x: float, y: float) -> float:
    """Pixels from a point to a box."""
    wide = max(box.x0 - x, x - box.x1, 0.0)
    high = max(box.y0 - y, y - box.y1, 0.0)
    return float((wide**2 + high**2) ** 0.5)
