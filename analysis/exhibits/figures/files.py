"""Figures and tables as files."""

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fontTools import subset
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from PIL import Image, ImageFilter

from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, Cell, Table

OUT = Path(__file__).parents[2] / "figures"

_NO_DATE = {"pdf": {"CreationDate": None}, "png": {"Software": None}, "svg": {"Date": None}}  # for equal files
# Substitution, kerning and classes of glyphs, which a PDF does not need: it places every glyph by its number.
_LAYOUT_TABLES = ["GDEF", "GPOS", "GSUB", "MATH"]
_DEFAULT = "_drop_tables_default"  # the tables that fontTools drops from every font
_COLOURS = 64
_TAG = re.compile(r"<\w[^>]*>")
_DIGITS = re.compile(r'transform="[^"]*"|(?<=[ "])-?\d+\.\d+')  # a transformation's scale keeps its digits
_NO_TURN = re.compile(r' transform="rotate\(-?0 [^"]*"')
_PATH = re.compile(r' d="([^"]*)"')
_STYLE, _CLIP = re.compile(r' style="([^"]*)"'), re.compile(r' clip-path="([^"]*)"')
_GROUP = re.compile(r"<g>((?:(?!</?g[ >]).)*)</g>")  # without attributes and inner groups
# Colours of a dark page and its words; the largest difference between the channels of a grey.
_PAGE, _INK, _GREY = (20, 24, 29), (227, 231, 236), 24
_STROKE = 9  # pixels: the widest stroke of a word on a bar
# matplotlib writes each colour into the style of its element; words have none, and are black by default.
_DARK = Path(__file__).with_name("dark.css").read_text(encoding="utf-8").replace("\n", "")


def save_figure(figure: Figure, stem: str, folder: Path = OUT, dots_per_inch: int = 200) -> list[Path]:
    """Write `stem.pdf` and `stem.png` into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pdf, png = (folder / f"{stem}.{ending}" for ending in ("pdf", "png"))
    with style.applied(), _lean_fonts():
        _settle(figure)
        figure.savefig(pdf, metadata=_NO_DATE["pdf"])
    return [pdf, save_png(figure, png, dots_per_inch)]


def save_png(figure: Figure, path: Path, dots_per_inch: int = 200) -> Path:
    """Write a picture of 64 colours; returns `path`."""
    with style.applied():
        _settle(figure)
        figure.savefig(path, dpi=dots_per_inch, metadata=_NO_DATE["png"])
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(_COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    return path


def save_dark(path: Path) -> Path:
    """Write `stem.dark.png` for dark pages beside a picture: greys are inverted, except words on colours."""
    with Image.open(path) as picture:
        entries = np.array(picture.getpalette()).reshape(-1, 3)[:_COLOURS]
        at = np.array(picture)
        is_grey = np.ptp(entries, axis=1) <= _GREY
        coloured = Image.fromarray(np.where(is_grey[at], 0, 255).astype(np.uint8))
        around = np.array(coloured.filter(ImageFilter.MaxFilter(_STROKE)).filter(ImageFilter.MinFilter(_STROKE)))
        words = (entries.mean(axis=1) < 128)[at] & (around > 0)
        share = entries.mean(axis=1, keepdims=True) / 255
        dark = np.rint(_INK + share * np.subtract(_PAGE, _INK)).astype(int)
        found = Image.fromarray(np.where(is_grey[at] & ~words, at + len(entries), at).astype(np.uint8), "P")
        found.putpalette([*entries.ravel().tolist(), *dark.ravel().tolist()])
        target = path.with_suffix(".dark.png")
        found.save(target, optimize=True)
    return target


def svg_text(figure: Figure) -> str:
    """The figure as an SVG document with dark colours for dark pages."""
    out = io.StringIO()
    with style.applied():
        _settle(figure)
        figure.savefig(out, format="svg", metadata=_NO_DATE["svg"])
    return _lean(in_the_dark(out.getvalue()))


def in_the_dark(drawing: str) -> str:
    """An SVG document by matplotlib with dark colours for dark pages."""
    return drawing.replace("</style>", f"{_DARK}</style>", 1)


def _lean(drawing: str) -> str:
    """The same drawing in fewer bytes: hundredths of a point, each style once, no unused names."""
    drawing = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<[?]xml.*?>|<!DOCTYPE.*?>", "", drawing, flags=re.DOTALL)
    drawing = _NO_TURN.sub("", drawing)
    drawing = _TAG.sub(lambda tag: _DIGITS.sub(_hundredths, tag[0]), drawing)  # words keep their digits
    drawing = _PATH.sub(lambda found: f' d="{_short(found[1])}"', drawing)
    named = set(re.findall(r"#([\w.-]+)", drawing))
    drawing = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in named else "", drawing)
    drawing = re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", drawing))
    while (flat := _GROUP.sub(r"\1", drawing)) != drawing:
        drawing = flat
    return _with_classes(drawing)


def _hundredths(found: re.Match[str]) -> str:
    return found[0] if found[0][0] == "t" else f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _short(path: str) -> str:
    """A path with H and V for horizontal and vertical lines."""
    steps: list[str] = []
    x = y = ""
    for step in re.findall(r"[A-Za-z][^A-Za-z]*", path):
        numbers = step[1:].split()
        new_x, new_y = (numbers or ["", ""])[-2:]
        if step[0] == "L" and new_x == x:
            steps.append(f"V{new_y}")
        elif step[0] == "L" and new_y == y:
            steps.append(f"H{new_x}")
        else:
            steps.append(step[0] + " ".join(numbers))
        x, y = new_x, new_y
    return "".join(steps)


def _with_classes(drawing: str) -> str:
    """The same drawing with one class for each style and clipping frame."""
    names: dict[str, str] = {}

    def named(tag: re.Match[str]) -> str:
        told = [*_STYLE.findall(tag[0]), *(f"clip-path: {frame}" for frame in _CLIP.findall(tag[0]))]
        if not told:
            return tag[0]
        name = names.setdefault("; ".join(told), f"s{len(names)}")
        return re.sub(r"(?=/?>$)", f' class="{name}"', _CLIP.sub("", _STYLE.sub("", tag[0])), count=1)

    def dark(rule: re.Match[str]) -> str:
        found = ",".join(f".{name}" for told, name in names.items() if rule[1] in told)
        return found + rule[2] if found else ""

    drawing = _TAG.sub(named, drawing)
    drawing = re.sub(r'\[style\*="([^"]*)"\]({[^}]*})', dark, drawing)
    classes = "".join(f".{name}{{{told}}}" for told, name in names.items())
    return drawing.replace("@media", f"{classes}@media", 1)


def png_bytes(figure: Figure, dots_per_inch: int = 100) -> bytes:
    out = io.BytesIO()
    with style.applied():
        _settle(figure, FigureCanvasAgg, dots_per_inch)
        figure.savefig(out, format="png", dpi=dots_per_inch, metadata=_NO_DATE["png"])
    return out.getvalue()


def _settle(
    figure: Figure, canvas: Callable[[Figure], FigureCanvasBase] = FigureCanvasPdf, dots_per_inch: float = 72
) -> None:
    """Find the layout once and remove its engine, which would draw the figure twice for each file.

    The canvas measures the words; a PDF has 72 dots per inch.
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
    """Embed fonts without their layout tables, which take longer to subset than the rest of a font.

    matplotlib has no option for it, so this changes fontTools' default; without a default fonts are embedded whole.
    """
    usual = getattr(subset.Options, _DEFAULT, [])
    setattr(subset.Options, _DEFAULT, [*usual, *_LAYOUT_TABLES])
    try:
        yield
    finally:
        setattr(subset.Options, _DEFAULT, usual)


def save_table(table: Table, stem: str, folder: Path = OUT) -> list[Path]:
    """Write `stem.csv` and `stem.tex` into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.csv", folder / f"{stem}.tex"]
    with paths[0].open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(table.columns)
        rows.writerows([_csv_value(cell) for cell in row] for row in table.rows)
    paths[1].write_text(frame(table).to_latex(index=False, escape=True), encoding="utf-8")  # for the package booktabs
    return paths


def _csv_value(cell: Cell) -> Any:
    """The value with all digits, or the word in its place; empty for a dash."""
    if cell.value is not None:
        return cell.value
    return "" if cell.text == NOTHING.text else cell.text


def frame(table: Table) -> pd.DataFrame:
    """The texts of a table; repeated headings are numbered."""
    headings: list[str] = []
    for column in table.columns:
        again = headings.count(column)
        headings.append(column if not again else f"{column} ({again + 1})")
    return pd.DataFrame([[cell.text for cell in row] for row in table.rows], columns=headings)
