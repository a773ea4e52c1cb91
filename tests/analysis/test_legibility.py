"""Figures can be read: no label over another, none cut off, legends of what is drawn, units on every axis."""

from collections.abc import Callable

import pytest
from judged import JUDGED
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.catalogue import exhibits
from analysis.exhibits.figures.own import convergence, thousand_devices
from analysis.exhibits.figures.own.tradeoff import name_points
from analysis.records.experiments import Experiments
from baselines.bidirectional.dualpipe import dualpipe
from rpbench.cost.constant import unit_times
from rpbench.drawing.timeline_figure import bars_of, draw_timeline
from rpbench.ir.action import Kind
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape
from rpbench.sim.longest_path import simulate
from tests.analysis.legibility import defects


def _figure(change: Callable[..., object]) -> Figure:
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="black", label="line")
    axes.set(xlabel="time (s)", ylabel="loss (nats)")
    change(axes)
    return figure


def _kinds(figure: Figure) -> set[str]:
    return {defect.kind for defect in defects(figure)}


def test_a_clean_figure_has_no_defect() -> None:
    assert _kinds(_figure(lambda axes: axes.legend())) == set()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("overlap", lambda axes: [axes.text(0.5, 0.5, "one name"), axes.text(0.51, 0.5, "another")]),
        (
            "outside",
            lambda axes: axes.text(0.9, 0.5, "a name that leaves the page on the right of it").set_in_layout(False),
        ),
        ("clipped", lambda axes: axes.text(0.62, 0.2, "a name its axes cut", clip_on=True).set_in_layout(False)),
        ("unlabelled", lambda axes: axes.set_ylabel("")),
        (
            "legend",
            lambda axes: (
                axes.legend(handles=[axes.plot([], [], color="red", label="x")[0]]) and axes.lines[-1].remove()
            ),
        ),
    ],
)
def test_a_defect_is_seen(kind: str, change: Callable[..., object]) -> None:
    assert kind in _kinds(_figure(change))


def test_names_beside_points_are_apart_and_inside() -> None:
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.add_subplot()
    places = [(x / 3, y / 7) for x in range(4) for y in range(5)] + [(1.0, 0.0), (1.0, 0.01)]
    axes.scatter(*zip(*places, strict=True))
    axes.set(xlabel="memory (GB)", ylabel="bubble (%)")
    name_points(axes, [(x, y, f"schedule {number}") for number, (x, y) in enumerate(places)])
    assert _kinds(figure) == set()


def test_overlapped_pairs_are_drawn_as_pairs() -> None:
    schedule = dualpipe(Shape(4, 4, 8))
    partition = schedule.partition or symmetric((1,) * 4)
    timeline = simulate(schedule, unit_times(4).table(partition))
    bars = bars_of(timeline)
    pairs = sum(span.action.kind is Kind.OVERLAP for span in timeline.spans())
    assert pairs
    num_backwards = sum(text[0] in "BI" for *_, text in bars.labels)
    assert num_backwards == 4 * 8  # every stage runs the backward of every microbatch
    heights = {round(float(box[1, 1] - box[0, 1]), 3) for boxes in bars.boxes.values() for box in boxes}
    assert heights == {0.84, 0.42}
    assert _kinds(draw_timeline(timeline, "DualPipe", unit="slots")) <= {"unlabelled"}


def test_one_colour_and_marker_a_method() -> None:
    for looks in (style.METHODS, convergence.METHODS, thousand_devices._LOOKS, style.MODELS, style.PARTITIONS):
        seen = [(look.colour, look.marker) for look in looks.values()]
        assert len(seen) == len(set(seen))
    for name in style._NAMES:
        assert style.look_of(name) == style.look_of(name)
        assert style.look_of(name).name == style.method_name(name)


@pytest.mark.slow
def test_figures_of_the_report_can_be_read(experiments: Experiments) -> None:
    made = {each.id: each for each in exhibits(experiments)[0]}
    found = {name: defects(made[name].draw()) for name in JUDGED}  # type: ignore[misc]
    assert {name: each for name, each in found.items() if each} == {}
