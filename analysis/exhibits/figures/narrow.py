"""A figure for a phone: its panels below one another, in the width of a hand."""

from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style

WIDTH_INCHES = 4.4
_MOST_PANELS = 12  # more of them below one another would be a scroll, not a figure
_LEAST_HEIGHT_INCHES = 1.7
_LINE = 44  # characters below an axis; half as many beside it
_LONG_LABEL = 20  # characters of which two do not stand beside one another


def stacked(figure: Figure) -> bool:
    """Put the panels of a figure below one another; False, and nothing done, for one column or too many panels.

    A panel that shared an axis with its neighbour gets the labels that its neighbour showed for it.
    """
    panels = _panels(figure)
    columns = {axes.get_subplotspec().colspan.start for axes in panels}  # type: ignore[union-attr]
    if len(columns) < 2 or len(panels) > _MOST_PANELS:
        return False
    with style.applied():
        _restack(figure, panels, len(panels) // len(columns))
    return True


def _restack(figure: Figure, panels: list[Axes], rows: int) -> None:
    wide, high = figure.get_size_inches()
    each = max(_LEAST_HEIGHT_INCHES, 0.85 * high / rows)
    grid = figure.add_gridspec(len(panels), 1)
    _label(panels)
    for words, write in (
        (figure.get_supxlabel(), figure.supxlabel),
        (figure.get_supylabel(), figure.supylabel),
        (figure.get_suptitle(), figure.suptitle),
    ):
        if words:
            write(fill(words, _LINE), fontsize=8.5)
    for place, axes in enumerate(panels):
        axes.set_subplotspec(grid[place])
        axes.tick_params(labelleft=True, labelbottom=True)
    figure.set_size_inches(min(WIDTH_INCHES, wide), len(panels) * each + _legend(figure) + 0.3)


def _legend(figure: Figure) -> float:
    """One legend below all panels in the place of those there are, in one or two columns; its height in inches."""
    named = [
        (handle, text.get_text())
        for legend in figure.legends
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True)
        if handle is not None
    ]
    if not named:
        return 0.0
    for legend in tuple(figure.legends):
        legend.remove()
    handles, labels = zip(*named, strict=True)
    columns = 1 if max(map(len, labels)) > _LONG_LABEL else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return 0.18 * -(-len(labels) // columns)


def _panels(figure: Figure) -> list[Axes]:
    """Axes that stand in the grid and are seen, row after row."""
    found = [axes for axes in figure.axes if axes.get_subplotspec() is not None and axes.get_visible()]
    return sorted(found, key=lambda axes: (axes.get_subplotspec().rowspan.start, axes.get_subplotspec().colspan.start))  # type: ignore[union-attr]


def _label(panels: list[Axes]) -> None:
    """A label that one panel has below its axis for all stands below the last, one beside it beside each."""
    across = [axes for axes in panels if axes.get_xlabel()]
    if len(across) == 1:
        words = across[0].get_xlabel()
        across[0].set_xlabel("")
        panels[-1].set_xlabel(words)
    up = [axes.get_ylabel() for axes in panels if axes.get_ylabel()]
    for axes in panels:
        if len(axes.get_title(loc="left")) > _LINE:
            axes.set_title(fill(axes.get_title(loc="left"), _LINE))
        axes.set_xlabel(fill(axes.get_xlabel(), _LINE))
        axes.set_ylabel(fill(axes.get_ylabel() or (up[0] if len(up) == 1 else ""), _LINE // 2))
