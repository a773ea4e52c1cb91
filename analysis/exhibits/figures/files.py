"""Figures as files: PDF, PNG and SVG that come out the same on every run."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fontTools import subset
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from analysis.exhibits import style

OUT = Path(__file__).parents[2] / "figures"

# Without these, a file would hold the moment it was written.
_NO_DATE = {"pdf": {"CreationDate": None}, "png": {"Software": None}, "svg": {"Date": None}}
# Substitution, kerning and classes of glyphs: nothing in a PDF reads them, for it places every glyph by its number.
_LAYOUT_TABLES = ["GDEF", "GPOS", "GSUB", "MATH"]
_DEFAULT = "_drop_tables_default"  # what fontTools leaves out of every font


def save_figure(figure: Figure, stem: str, folder: Path = OUT) -> list[Path]:
    """Write `stem.pdf` and `stem.png` (200 dots per inch) into a folder, and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{ending}" for ending in ("pdf", "png")]
    with style.applied(), _lean_fonts():
        _settle(figure)
        for path in paths:
            figure.savefig(path, metadata=_NO_DATE[path.suffix[1:]])
    return paths


def svg_text(figure: Figure) -> str:
    """The figure as an SVG document."""
    out = io.StringIO()
    with style.applied():
        _settle(figure)
        figure.savefig(out, format="svg", metadata=_NO_DATE["svg"])
    return out.getvalue()


def png_bytes(figure: Figure, dots_per_inch: int = 100) -> bytes:
    """The figure as a PNG image."""
    out = io.BytesIO()
    with style.applied():
        _settle(figure, FigureCanvasAgg, dots_per_inch)
        figure.savefig(out, format="png", dpi=dots_per_inch, metadata=_NO_DATE["png"])
    return out.getvalue()


def _settle(
    figure: Figure, canvas: Callable[[Figure], FigureCanvasBase] = FigureCanvasPdf, dots_per_inch: float = 72
) -> None:
    """Find the layout, if that was not done, and keep it for every file.

    A figure with a layout engine, one that is switched off as well, is drawn twice for each file.

    Args:
        canvas: whose measures of words count; a PDF has 72 dots per inch.
    """
    engine = figure.get_layout_engine()
    if engine is None:
        return
    usual = figure.dpi
    figure.dpi = dots_per_inch
    canvas(figure)
    engine.execute(figure)
    figure.set_layout_engine(None)
    figure.dpi = usual


@contextmanager
def _lean_fonts() -> Iterator[None]:
    """Fonts are embedded without their layout tables, which take longer to cut down than all the rest of a font.

    matplotlib has no option for it, and fontTools none but its default. Without that default fonts are embedded whole.
    """
    usual = getattr(subset.Options, _DEFAULT, [])
    setattr(subset.Options, _DEFAULT, [*usual, *_LAYOUT_TABLES])
    try:
        yield
    finally:
        setattr(subset.Options, _DEFAULT, usual)
