"""Excerpts of a schedule for error messages: the rows around some actions, which are marked as in `0F0 >0B0< 0B1`."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from rpbench.ir.action import Action, text
from rpbench.ir.schedule import Schedule, ScheduleError

MAX_ROWS = 4
WIDTH = 100  # columns of a line; a row too long for it is elided around its marks


def broken(
    schedule: Schedule,
    rule: str,
    numbers: Iterable[int] = (),  # of the actions to mark, counted over `schedule.items()`
    *,
    way_out: str = "",  # a last line
    notes: Mapping[int, str] | None = None,  # number of a marked action -> words between its rank and its row
) -> ScheduleError:
    """The error that says which rule is broken and shows where, in eight lines at most."""
    lines = [rule, *marked_rows(schedule, numbers, notes or {})]
    return ScheduleError("\n".join([*lines, f"  {way_out}"] if way_out else lines))


def marked_rows(schedule: Schedule, numbers: Iterable[int], notes: Mapping[int, str]) -> list[str]:
    """One line for each row with one of the actions, `MAX_ROWS` lines at most."""
    lanes = list(schedule.items())
    starts = [0]
    for _, _, row in lanes:
        starts.append(starts[-1] + len(row))
    marks: dict[int, list[int]] = {}
    for number in numbers:
        # If several lanes start at one number, all but the last are empty.
        lane = bisect_right(starts, number) - 1
        marks.setdefault(lane, []).append(number)

    heads, shown = [], sorted(marks.items())[:MAX_ROWS]
    for lane, marked in shown:
        device, name, _ = lanes[lane]
        note = "; ".join(notes[number] for number in marked if number in notes)
        heads.append(f"  rank {device}" + ("" if name == "compute" else f"/{name}") + (f" {note}" if note else ""))
    margin = max(map(len, heads), default=0) + 3
    lines = [
        head.ljust(margin) + elided(lanes[lane][2], [number - starts[lane] for number in marked], WIDTH - margin)
        for head, (lane, marked) in zip(heads, shown, strict=True)
    ]
    if len(marks) > MAX_ROWS:
        lines.append(f"  ... and {len(marks) - MAX_ROWS} more")
    return lines


def elided(row: Sequence[Action], marks: Sequence[int], width: int) -> str:
    """The row in about `width` columns: the marked actions and as many of their neighbours as fit."""
    kept = {mark: f">{text(row[mark])}<" for mark in marks}
    room = width - sum(len(token) + 1 for token in kept.values()) - 4 * (len(kept) + 1)
    for distance in range(1, len(row)):
        near = {place for mark in marks for place in (mark - distance, mark + distance) if 0 <= place < len(row)}
        for place in sorted(near - kept.keys()):
            token = text(row[place])
            room -= len(token) + 1
            if room < 0:
                return _joined(kept, len(row))
            kept[place] = token
    return _joined(kept, len(row))


def _joined(kept: Mapping[int, str], length: int) -> str:
    tokens, expected = [], 0
    for place in sorted(kept):
        if place > expected:
            tokens.append("...")
        tokens.append(kept[place])
        expected = place + 1
    return " ".join(tokens if expected == length else [*tokens, "..."])
