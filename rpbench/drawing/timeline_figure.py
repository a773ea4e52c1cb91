"""A timeline as a figure: one row a device, one bar an action, with colour and letter for its kind."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rpbench.drawing.timeline_svg import look_of
from rpbench.ir.action import Action, Kind, parts_of
from rpbench.ir.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PALE = 0.45  # fraction of white in the head of a bar
FONT_PT = 5.5
_LETTER_PT = 0.62 * FONT_PT  # width of a digit or a capital, rounded up
_WIDTH_IN = 10.0
_ACROSS = 0.92  # fraction of a drawing's width that its bars take
_EDGE_PT = 3.0  # narrower bars have no white edge: it would hide them

Box = np.ndarray  # (4, 2): corners in time and device
Label = tuple[float, float, float, str]  # middle, height of the middle, width, words


class Bars(NamedTuple):
    """The drawn parts of a timeline."""

    boxes: Mapping[str, list[Box]]  # by colour; the head of a bar is a box of its own, in a paler colour
    kinds: set[Kind]
    heads: set[Kind]  # kinds whose bars have a pale head
    labels: list[Label]


def draw_timeline(timeline: Timeline, title: str = "", *, unit: str = "s", per_second: float = 1.0) -> Figure:
    """The compute lanes of a timeline; the pale head of a bar is recomputation (or the fused stage's forward).

    Actions that run together share the height of their device. If a device has several stages, the number of the stage
    is before the letter, as in the text form of an action; a part of a sequence is behind the microbatch.

    `unit` is that of the axis, `s` or `slots`; a second of the timeline has `per_second` of them.
    """
    num_devices = timeline.schedule.shape.num_ranks
    figure = Figure(figsize=(_WIDTH_IN, 1.05 + 0.32 * min(num_devices, 40)), layout="constrained")
    axes = figure.add_subplot()
    bars = bars_of(timeline, per_second=per_second)
    length = per_second * float(timeline.makespan) / timeline.units_per_second or 1.0
    put_bars(axes, bars, 72 * _ACROSS * _WIDTH_IN / length)
    axes.set_xlim(0, length)
    _finish(axes, num_devices, title, unit)
    words = handles(bars.kinds, bars.heads)
    figure.legend(handles=words, fontsize=6.5, ncols=4, loc="outside lower center", frameon=False)
    return figure


def bars_of(timeline: Timeline, height: float = 0.84, per_second: float = 1.0) -> Bars:
    """The bars of a timeline's compute lanes, a device a unit high."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    kinds, heads, labels = set(), set(), []
    second = timeline.units_per_second / per_second
    shape = timeline.schedule.shape
    staged = shape.num_stages > shape.num_ranks or shape.num_backward_stages != shape.num_stages
    for span in timeline.spans():
        if span.lane != "compute" or span.end <= span.start:
            continue
        start, main, end = (float(time) / second for time in (span.start, span.main, span.end))
        parts = parts_of(span.action)
        for number, part in enumerate(parts):
            low = span.device - height / 2 + height * number / len(parts)
            high = low + height / len(parts)
            kinds.add(part.kind)
            colour, _ = look_of(part.kind)
            boxes[colour].append(_box(main, end, low, high))
            if main > start:
                heads.add(part.kind)
                boxes[paler(colour)].append(_box(start, main, low, high))
            labels.append(((start + end) / 2, (low + high) / 2, end - start, _words(part, staged)))
    return Bars(boxes, kinds, heads, labels)


def put_bars(axes: "Axes", bars: Bars, points: float, *, rasterized: bool = False) -> None:
    """Draw bars, with white edges and labels where they are wide enough; the caller sets the limits.

    A unit of time takes `points` printer's points; 0 draws no labels.
    """
    for colour, corners in bars.boxes.items():
        widths = [float(corner[2, 0] - corner[0, 0]) * points for corner in corners]
        edges = [0.25 if width >= _EDGE_PT else 0.0 for width in widths] if points else 0.0
        boxes = PolyCollection(
            np.stack(corners),  # type: ignore[arg-type]  # one array is faster than a list
            facecolors=colour,
            edgecolors="white",
            linewidths=edges,
            rasterized=rasterized,
        )
        axes.add_collection(boxes, autolim=False)
    for x, y, width, text in bars.labels:
        if len(text) * _LETTER_PT < width * points:
            words = axes.text(x, y, text, ha="center", va="center", fontsize=FONT_PT, clip_on=True)
            words.set_in_layout(False)  # it is inside the axes


def handles(kinds: Iterable[Kind], heads: Iterable[Kind] = ()) -> list[Patch]:
    """The legend."""
    words = {Kind.FB: "pale: forward of FB"}
    pale = [(paler(look_of(kind)[0]), words.get(kind, f"pale: recompute before {kind.name}")) for kind in sorted(heads)]
    looks = [*map(look_of, sorted(kinds)), *pale]
    return [Patch(color=colour, label=name) for colour, name in looks]


@cache
def paler(colour: str) -> str:
    """The colour of the head of a bar."""
    red, green, blue = (channel + _PALE * (1 - channel) for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def _words(action: Action, staged: bool) -> str:
    stage = str(action.stage) if staged else ""
    part = f".{action.part}" if action.part else ""
    return f"{stage}{action.kind.name}{action.microbatch}{part}"


def _box(start: float, end: float, low: float, high: float) -> Box:
    return np.array([(start, low), (start, high), (end, high), (end, low)])


def _finish(axes: "Axes", num_devices: int, title: str, unit: str) -> None:
    axes.set_ylim(num_devices - 0.5, -0.5)
    step = max(1, num_devices // 16)
    axes.set_yticks(range(0, num_devices, step), [str(device) for device in range(0, num_devices, step)])
    axes.set_xlabel(f"time ({unit})", fontsize=8)
    axes.set_ylabel("device", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, fontsize=9, loc="left")
