"""The look of figures: a colour and a marker a method, the names people read, a hatch a kind of evidence.

Colours are those of Okabe and Ito, "Color Universal Design" (2008); yellow only fills. Nothing is told by
colour alone: curves have markers, bars stand beside their names, their parts differ in lightness or hatch.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rpbench import yaml_file

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE = "#8C8C8C", "#D0D0D0"
LIGHTER = (VERMILION, "#E88A4D", "#F2B48C", "#FBE3D3")  # RoundPipe's vermilion, ever lighter

_STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("rpbench.mplstyle"), use_default_template=False)


@dataclass(frozen=True)
class Look:
    """Name, colour and marker of something that appears in several figures."""

    name: str
    colour: str
    marker: str


_FILE = yaml_file.read_keys(Path(__file__).with_suffix(".yaml"))


def looks(name: str) -> dict[str, Look]:
    """A table of `style.yaml`: names of things -> their looks."""
    return {key: _look(*row) for key, row in _FILE[name].items()}


def names(table: str) -> dict[str, str]:
    """A table of `style.yaml` that says what people read, in the order in which it is shown."""
    found: dict[str, str] = _FILE[table]
    return found


def _look(name: str, colour: str, marker: str) -> Look:
    return Look(name, globals().get(colour.upper(), colour), marker)


METHODS, MODELS, PARTITIONS, PARTS = map(looks, ("methods", "models", "partitions", "parts"))
_NAMES = names("names")  # schedules that have no look of their own
FAMILIES = {family: _look(*row["look"]) for family, row in _FILE["families"].items()}
_FAMILY_OF = {schedule: family for family, row in _FILE["families"].items() for schedule in row["schedules"]}

HATCHES = names("hatches")  # how a number is known
BUBBLES = names("bubbles")  # what each bubble of a record is


@contextmanager
def applied() -> Iterator[None]:
    """The style in force for figures that are made, or written, inside."""
    with matplotlib.rc_context(_STYLE):
        yield


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches in the style, which finds room for its labels."""
    with applied():
        yield Figure(figsize=(width, height), layout="constrained")


def model_panels(figure: Figure, models: Collection[str], **shared: Any) -> list[Axes]:
    """One row of panels, one a model, with its name as the title; `shared` as in `Figure.subplots`."""
    panels = list(figure.subplots(1, len(models), squeeze=False, **shared)[0])
    for axes, model in zip(panels, models, strict=True):
        axes.set_title(model_name(model))
    return panels


def grid_for_rows(axes: Axes, num_ticks: int = 0) -> None:
    """Vertical grid lines alone, for panels whose rows are bars or points; at most so many ticks, as `12,345`."""
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    if num_ticks:
        axes.locator_params(axis="x", nbins=num_ticks)
        axes.xaxis.set_major_formatter("{x:,.0f}")


def note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **font: Any) -> None:
    """Text beside a point in data coordinates, `shift` (right, up) in points away from it."""
    axes.annotate(text, at, shift, textcoords="offset points", **font)


def legend_below(figure: Figure, axes: Axes, ncols: int) -> None:
    """The legend of one panel, below all panels."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=ncols)


def bar_key(label: str, colour: str = "white", hatch: str = "") -> Patch:
    """The entry of a legend for bars of a colour and hatch."""
    return Patch(facecolor=colour, edgecolor="black", hatch=hatch, label=label)


def point_key(look: Look) -> Line2D:
    """The entry of a legend for points of a look."""
    return Line2D([], [], color=look.colour, marker=look.marker, linestyle="", label=look.name)


def model_name(model: str) -> str:
    """A model's name for people; one that is not in the paper keeps its own."""
    return MODELS[model].name if model in MODELS else model


def method_name(method: str) -> str:
    """A schedule's or system's name for people; one that is not known here keeps its own."""
    return METHODS[method].name if method in METHODS else _NAMES.get(method, method)


def look_of(schedule: str) -> Look:
    """A schedule's look: its own, or one made of what its neighbours do not use, the same in every figure."""
    if schedule in METHODS:
        return METHODS[schedule]
    known = sorted(_NAMES)
    place = known.index(schedule) if schedule in known else len(known)
    return Look(method_name(schedule), _FILE["further"][place % len(_FILE["further"])], "<>XPdhH8"[place % 8])


def family_of(schedule: str) -> str:
    return _FAMILY_OF[schedule]
