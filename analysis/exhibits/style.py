"""The look of figures: colours and markers of methods, names, hatches of kinds of evidence.

Colours are those of Okabe and Ito, "Color Universal Design" (2008); yellow only fills. Never rely on colour alone:
curves have markers, bars stand beside their names, their parts differ in lightness or hatch.
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
LIGHTER = (VERMILION, "#E88A4D", "#F2B48C", "#FBE3D3")  # shades of RoundPipe's vermilion

_STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("rpbench.mplstyle"), use_default_template=False)


@dataclass(frozen=True)
class Look:
    name: str
    colour: str
    marker: str


_FILE = yaml_file.read_keys(Path(__file__).with_suffix(".yaml"))


def looks(name: str) -> dict[str, Look]:
    """A table of looks in `style.yaml`."""
    return {key: _look(*row) for key, row in _FILE[name].items()}


def names(table: str) -> dict[str, str]:
    """A table of names in `style.yaml`, in the order in which they are shown."""
    return dict(_FILE[table])


def _look(name: str, colour: str, marker: str) -> Look:
    return Look(name, globals().get(colour.upper(), colour), marker)


METHODS, MODELS, PARTITIONS, PARTS = map(looks, ("methods", "models", "partitions", "parts"))
_NAMES = names("names")  # of schedules without a look
FAMILIES = {family: _look(*row["look"]) for family, row in _FILE["families"].items()}
_FAMILY_OF = {schedule: family for family, row in _FILE["families"].items() for schedule in row["schedules"]}

HATCHES = names("hatches")  # by kind of evidence
BUBBLES = names("bubbles")  # descriptions of each bubble of a record


@contextmanager
def applied() -> Iterator[None]:
    """Apply the style to figures that are made or written inside."""
    with matplotlib.rc_context(_STYLE):
        yield


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """A figure in the style; sizes are in inches."""
    with applied():
        yield Figure(figsize=(width, height), layout="constrained")


def model_panels(figure: Figure, models: Collection[str], **shared: Any) -> list[Axes]:
    """A row of panels with models as titles; `shared` as in `Figure.subplots`."""
    panels = list(figure.subplots(1, len(models), squeeze=False, **shared)[0])
    for axes, model in zip(panels, models, strict=True):
        axes.set_title(model_name(model))
    return panels


def grid_for_rows(axes: Axes, num_ticks: int = 0) -> None:
    """Vertical grid lines only, for rows of bars or points; optionally at most `num_ticks` ticks such as `12,345`."""
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    if num_ticks:
        axes.locator_params(axis="x", nbins=num_ticks)
        axes.xaxis.set_major_formatter("{x:,.0f}")


def note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **font: Any) -> None:
    """Text beside a point in data coordinates, moved by `shift` (right, up) in points."""
    axes.annotate(text, at, shift, textcoords="offset points", **font)


def legend_below(figure: Figure, axes: Axes, ncols: int) -> None:
    """The legend of one panel, below all panels."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=ncols)


def bar_key(label: str, colour: str = "white", hatch: str = "") -> Patch:
    """A legend entry for bars."""
    return Patch(facecolor=colour, edgecolor="black", hatch=hatch, label=label)


def point_key(look: Look) -> Line2D:
    """A legend entry for points."""
    return Line2D([], [], color=look.colour, marker=look.marker, linestyle="", label=look.name)


def model_name(model: str) -> str:
    """A model's readable name, if it has one."""
    return MODELS[model].name if model in MODELS else model


def method_name(method: str) -> str:
    """The readable name of a schedule or system, if it has one."""
    return METHODS[method].name if method in METHODS else _NAMES.get(method, method)


def look_of(schedule: str) -> Look:
    """A schedule's declared look, or a generated one that is the same in every figure."""
    if schedule in METHODS:
        return METHODS[schedule]
    known = sorted(_NAMES)
    place = known.index(schedule) if schedule in known else len(known)
    return Look(method_name(schedule), _FILE["further"][place % len(_FILE["further"])], "<>XPdhH8"[place % 8])


def family_of(schedule: str) -> str:
    return _FAMILY_OF[schedule]
