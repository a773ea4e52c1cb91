"""Files of figures: each is drawn once, with one layout, and embeds fonts that hold what a PDF reads and no more."""

import io
import re
import zlib
from pathlib import Path

from fontTools.ttLib import TTFont
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from analysis.exhibits import style
from analysis.exhibits.figures.files import png_bytes, save_dark, save_figure, svg_text

_WORDS = "Wait, for: AVA"


class _Counted(Line2D):
    """A line that counts how often it is drawn."""

    num_draws = 0

    def draw(self, renderer: object) -> None:
        self.num_draws += 1
        super().draw(renderer)  # type: ignore[arg-type]


def _figure() -> tuple[Figure, _Counted]:
    with style.applied():
        figure = Figure(figsize=(3, 2), layout="constrained")
        axes = figure.add_subplot(xlabel="time (s)", ylabel=_WORDS)
        line = _Counted([0, 1], [0, 1000])
        axes.add_line(line)
        axes.autoscale_view()
    return figure, line


def test_each_file_draws_a_figure_once(tmp_path: Path) -> None:
    figure, line = _figure()
    save_figure(figure, "once", tmp_path)
    assert line.num_draws == 2
    svg_text(figure)
    png_bytes(figure)
    assert line.num_draws == 4


def test_all_files_have_the_layout_of_the_first(tmp_path: Path) -> None:
    figure, _ = _figure()
    (axes,) = figure.axes
    unsettled = axes.get_position().bounds
    save_figure(figure, "settled", tmp_path)
    settled = axes.get_position().bounds
    assert settled != unsettled  # the long word beside the axis has its room
    assert figure.dpi == _figure()[0].dpi
    svg_text(figure)
    png_bytes(figure, 50)
    assert axes.get_position().bounds == settled


def test_a_word_on_a_bar_stays_dark_on_a_dark_page(tmp_path: Path) -> None:
    picture = Image.new("RGB", (60, 40), "white")
    picture.paste((230, 159, 0), (10, 10, 50, 30))
    for at in ((29, 16, 31, 24), (4, 0, 6, 40)):  # a stroke on the bar, and one beside it
        picture.paste("black", at)
    picture.quantize(128, dither=Image.Dither.NONE).save(tmp_path / "bar.png")
    with Image.open(save_dark(tmp_path / "bar.png")) as dark:
        found = dark.convert("RGB")
    bar, word, beside, page = (found.getpixel(at) for at in ((20, 20), (30, 20), (5, 20), (56, 36)))
    assert (bar, word, beside, page) == ((230, 159, 0), (0, 0, 0), (227, 231, 236), (20, 24, 29))


def test_a_lean_drawing_keeps_its_words_and_where_lines_go() -> None:
    figure = Figure(figsize=(2, 2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 144), ylim=(0, 144))
    axes.set_axis_off()
    axes.text(50, 50, "0.1230 s and 29.20 %")
    axes.plot([30, 114, 114, 30.004], [30, 30, 114, 30.004])  # along, up, and where both numbers are the same
    drawing = svg_text(figure)
    assert "0.1230 s and 29.20 %" in drawing
    assert re.findall(r'd="(M30 [^"]*)"', drawing) == ["M30 114H114V30L30 114"]
    assert " style=" not in drawing


def test_the_layout_is_the_one_that_matplotlib_finds(tmp_path: Path) -> None:
    ours, theirs = _figure()[0], _figure()[0]
    save_figure(ours, "ours", tmp_path)
    with style.applied():
        theirs.savefig(tmp_path / "theirs.pdf")
    assert ours.axes[0].get_position().bounds == theirs.axes[0].get_position().bounds


def test_embedded_fonts_have_glyphs_and_no_layout_tables(tmp_path: Path) -> None:
    fonts = _fonts(save_figure(_figure()[0], "fonts", tmp_path)[0])
    assert fonts
    for font in fonts:
        assert {"glyf", "head", "hhea", "hmtx", "loca", "maxp"} <= set(font.keys())
        assert not {"GDEF", "GPOS", "GSUB", "MATH"} & set(font.keys())
    assert max(len(font.getGlyphOrder()) for font in fonts) >= len(set(_WORDS))


def test_fonts_are_cut_down_as_usual_elsewhere(tmp_path: Path) -> None:
    save_figure(_figure()[0], "ours", tmp_path)
    with style.applied():
        _figure()[0].savefig(tmp_path / "theirs.pdf")
    assert any("GPOS" in font for font in _fonts(tmp_path / "theirs.pdf"))


def _fonts(path: Path) -> list[TTFont]:
    """The TrueType fonts in a PDF; their streams are those that name a length before compression."""
    content = path.read_bytes()
    headers = re.finditer(rb"<<[^>]*/Length1[^>]*>>\s*stream\r?\n", content)
    streams = (zlib.decompressobj().decompress(content[header.end() :]) for header in headers)
    return [TTFont(io.BytesIO(stream)) for stream in streams]
