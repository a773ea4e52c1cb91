"""Figures as files: PDF, PNG and SVG that come out the same on every run."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from analysis.exhibits import style

OUT = Path(__file__).parents[2] / "figures"

# Without these, a file would hold the moment it was written.
_NO_DATE = {"pdf": {"CreationDate": None}, "png": {"Software": None}, "svg": {"Date": None}}


def save_figure(figure: Figure, stem: str, folder: Path = OUT) -> list[Path]:
    """Write `stem.pdf` and `stem.png` (200 dots per inch) into a folder, and say where.

    The figure keeps the layout of the first file: to find it anew for each takes as long as drawing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{ending}" for ending in ("pdf", "png")]
    with style.applied():
        for path in paths:
            figure.savefig(path, metadata=_NO_DATE[path.suffix[1:]])
            figure.set_layout_engine("none")
    return paths


def svg_text(figure: Figure) -> str:
    """The figure as an SVG document."""
    out = io.StringIO()
    with style.applied():
        figure.savefig(out, format="svg", metadata=_NO_DATE["svg"])
    return out.getvalue()


def png_bytes(figure: Figure, dots_per_inch: int = 100) -> bytes:
    """The figure as a PNG image."""
    out = io.BytesIO()
    with style.applied():
        figure.savefig(out, format="png", dpi=dots_per_inch, metadata=_NO_DATE["png"])
    return out.getvalue()
