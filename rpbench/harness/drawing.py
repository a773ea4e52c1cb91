"""A timeline as a figure: one row a device, one bar an action, colour and letter for its kind.

Drawing is separate from simulating; nothing here runs unless a figure is asked for.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe-Ito: forward blue, backward vermilion, the halves of a backward apart, recomputation pale.
COLOURS = {
    Kind.F: "#56B4E9",
    Kind.B: "#E69F00",
    Kind.FB: "#D55E00",
    Kind.I: "#F0C05A",
    Kind.W: "#009E73",
    Kind.R: "#CFCFCF",
    Kind.STEP: "#CC79A7",
    Kind.HF: "#8FD3F4",
    Kind.HB: "#F7B267",
}
NAMES = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.FB: "FB fused forward and backward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.R: "R recompute",
    Kind.STEP: "STEP optimizer",
    Kind.HF: "HF share of the head, forward",
    Kind.HB: "HB share of the head, backward",
}
_OTHER = "#999999"
_MOST_LABELS = 420  # above this many bars, letters would be dust


def draw_timeline(timeline: Timeline, title: str = "", *, width_in: float = 10.0) -> Figure:
    """The compute lanes of a timeline; the pale head of a bar is recomputation (or the fused stage's forward)."""
    num_devices = timeline.schedule.shape.num_ranks
    figure = Figure(figsize=(width_in, 0.7 + 0.3 * min(num_devices, 40)), layout="constrained")
    axes = figure.add_subplot()
    bars, heads, labels = _bars(timeline)
    for kind, corners in bars.items():
        edge = 0.25 if len(labels) <= _MOST_LABELS else 0.05
        axes.add_collection(
            PolyCollection(corners, facecolors=COLOURS.get(kind, _OTHER), edgecolors="white", linewidths=edge)
        )
    if heads:
        axes.add_collection(PolyCollection(heads, facecolors="white", alpha=0.45, linewidths=0))
    if len(labels) <= _MOST_LABELS:
        for x, y, text in labels:
            axes.text(x, y, text, ha="center", va="center", fontsize=5.5, clip_on=True)
    _finish(axes, timeline, bars, bool(heads), title)
    return figure


def _bars(
    timeline: Timeline,
) -> tuple[dict[Kind, list[np.ndarray]], list[np.ndarray], list[tuple[float, float, str]]]:
    bars: dict[Kind, list[np.ndarray]] = defaultdict(list)
    heads: list[np.ndarray] = []
    labels = []
    second = timeline.units_per_second
    for span in timeline.spans():
        if span.lane != "compute" or span.end <= span.start:
            continue
        start, main, end = (float(time) / second for time in (span.start, span.main, span.end))
        action = parts_of(span.action)[0]
        bars[action.kind].append(_box(start, end, span.device))
        if main > start:
            heads.append(_box(start, main, span.device))
        labels.append(((start + end) / 2, float(span.device), f"{action.kind.name}{action.microbatch}"))
    return bars, heads, labels


def _box(start: float, end: float, device: int) -> np.ndarray:
    low, high = device - 0.42, device + 0.42
    return np.array([(start, low), (start, high), (end, high), (end, low)])


def _finish(axes: "Axes", timeline: Timeline, bars: dict[Kind, list[np.ndarray]], heads: bool, title: str) -> None:
    num_devices = timeline.schedule.shape.num_ranks
    axes.set_xlim(0, float(timeline.makespan) / timeline.units_per_second or 1)
    axes.set_ylim(num_devices - 0.5, -0.5)
    step = max(1, num_devices // 16)
    axes.set_yticks(range(0, num_devices, step), [str(device) for device in range(0, num_devices, step)])
    axes.set_xlabel("time in s", fontsize=8)
    axes.set_ylabel("device", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, fontsize=9, loc="left")
    handles = [Patch(color=COLOURS.get(kind, _OTHER), label=NAMES.get(kind, kind.name)) for kind in sorted(bars)]
    if heads:
        handles.append(Patch(facecolor="#F3E3C3", label="pale: recompute, or forward of FB"))
    axes.legend(handles=handles, fontsize=6.5, ncols=4, loc="upper right", bbox_to_anchor=(1, 1.16), frameon=False)
