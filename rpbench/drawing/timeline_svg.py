"""A timeline as SVG text, and the colours and names of kinds of actions in every drawing."""

from html import escape

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.timeline import Timeline

# Colour and name of each kind, from the Okabe-Ito palette: forward blue, backward orange, recomputation pale.
_LOOKS = {
    Kind.F: ("#56B4E9", "F forward"),
    Kind.B: ("#E69F00", "B backward"),
    Kind.FB: ("#D55E00", "FB fused forward and backward"),
    Kind.I: ("#F0C05A", "I input gradient"),
    Kind.W: ("#009E73", "W weight gradient"),
    Kind.R: ("#CFCFCF", "R recompute"),
    Kind.STEP: ("#CC79A7", "STEP optimizer"),
    Kind.STEP_REST: ("#CC79A7", "STEP_REST optimizer of the host"),
    Kind.HF: ("#8FD3F4", "HF shard of the head, forward"),
    Kind.HB: ("#F7B267", "HB shard of the head, backward"),
}


def look_of(kind: Kind) -> tuple[str, str]:
    """The colour of a kind of actions, and its readable name."""
    return _LOOKS.get(kind, ("#999999", kind.name))


_WIDTH, _LEFT, _TOP, _ROW = 960.0, 60.0, 44.0, 22.0
_LETTERS_FROM = 14.0  # px; narrower bars have no text


def timeline_svg(timeline: Timeline, title: str) -> str:
    """The compute lanes of a timeline, a row a device; hovering over a bar names its action and times in seconds."""
    second, num_devices = timeline.units_per_second, timeline.schedule.shape.num_ranks
    begin = float(min(timeline.start, default=0)) / second
    span = float(timeline.makespan) / second or 1.0
    scale = (_WIDTH - _LEFT - 10) / span
    bars, kinds = [], set()
    for each in timeline.spans():
        if each.lane != "compute" or each.end <= each.start:
            continue
        action = parts_of(each.action)[0]
        kinds.add(action.kind)
        start, end = float(each.start) / second, float(each.end) / second
        x, width = _LEFT + (start - begin) * scale, (end - start) * scale
        name = f"{each.action} on device {each.device}: {start:.6g} s to {end:.6g} s"
        bars.append(
            _bar(x, _TOP + each.device * _ROW, width, action.kind, name, f"{action.kind.name}{action.microbatch}")
        )
    labels = [_text(4, _TOP + device * _ROW + 14, f"device {device}") for device in range(num_devices)]
    foot = _TOP + num_devices * _ROW + 16
    axis = [_text(_LEFT, foot, f"{begin:.4g} s"), _text(_WIDTH - 70, foot, f"{begin + span:.4g} s")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {foot + 8:g}" font-family="sans-serif" '
        f'font-size="11">{_text(_LEFT, 14, title)}{_legend(kinds)}{"".join(labels)}{"".join(bars)}{"".join(axis)}</svg>'
    )


def _bar(x: float, y: float, width: float, kind: Kind, name: str, letters: str) -> str:
    inner = _text(x + 2, y + 13, letters) if width >= _LETTERS_FROM else ""
    return (
        f'<g><title>{escape(name)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{_ROW - 4:g}" '
        f'fill="{look_of(kind)[0]}" stroke="white" stroke-width="0.3"/>{inner}</g>'
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}">{escape(words)}</text>'


def _legend(kinds: set[Kind]) -> str:
    marks, x = [], _LEFT
    for kind in sorted(kinds):
        colour, name = look_of(kind)
        marks.append(f'<rect x="{x:g}" y="22" width="10" height="10" fill="{colour}"/>{_text(x + 14, 31, name)}')
        x += 26 + 6 * len(name)
    return "".join(marks)
