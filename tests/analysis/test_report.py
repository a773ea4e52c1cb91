"""The report: pages that need nothing else, in which every number leads to where it comes from."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

import PIL.Image
import pytest
from matplotlib.figure import Figure
from report_page import Page, image, with_images

from analysis.exhibits.exhibit import Cell, Exhibit, Table
from analysis.records.experiments import Experiments
from analysis.report import build
from analysis.report.content import Content
from analysis.report.images import LARGEST_SVG_BYTES, Shown, draw_all
from analysis.report.opening import PAPER, answer, findings
from analysis.report.page import gather, rendered, save_tables, write
from analysis.report.views import command_of
from rpbench.config.loading import load
from rpbench.records.record import run_id
from rpbench.run.recording import identity


@pytest.fixture(scope="module")
def content(full_content: Content) -> Content:
    """Everything but the figures, which take long to draw."""
    return with_images(full_content)


@pytest.fixture(scope="module")
def scant(experiments: Experiments) -> Content:
    """What there is of figure 17 and the closed forms alone."""
    return gather(experiments)


@pytest.fixture(scope="module")
def pages(texts: dict[str, str]) -> dict[str, Page]:
    return {name: Page(text) for name, text in texts.items() if name.endswith(".html")}


@pytest.fixture(scope="module")
def links(pages: dict[str, Page]) -> set[tuple[str, str]]:
    """Page and anchor that some page leads to."""
    return {_target(name, link) for name, page in pages.items() for link in page.links}


def _target(page: str, link: str) -> tuple[str, str]:
    path, _, anchor = link.partition("#")
    return (Path(path).name or page, anchor)


# --- pages ---------------------------------------------------------------------------------------------------


def test_the_first_page_is_light(texts: dict[str, str]) -> None:
    assert len(texts["report.html"].encode()) < 1_000_000


# Megabytes that the pages of the full content take today, with a little room.
_MOST_MB = {"records": 1.9, "claims": 2.8, "exhibit": 1.3, "others": 0.3}


def test_no_kind_of_page_gets_heavier(texts: dict[str, str]) -> None:
    grown: Counter[str] = Counter()
    for name, text in texts.items():
        kind = re.split(r"[-.]", name)[0]
        grown[kind if kind in _MOST_MB else "others"] += len(text.encode())
    assert {kind: size for kind, size in grown.items() if size > 1e6 * _MOST_MB[kind]} == {}, grown


@pytest.mark.slow
def test_all_of_it_weighs_at_most_twelve_megabytes(full_content: Content, tmp_path: Path) -> None:
    figures = tmp_path / "report_pages" / "figures"
    whole = replace(full_content, figures=figures, images=draw_all(full_content.shown, figures))
    save_tables(whole)
    write(whole, tmp_path / "report.html")
    sizes = Counter[str]()
    for path in tmp_path.rglob("*.*"):
        sizes[path.suffix] += path.stat().st_size
    assert {".html", ".svg", ".png", ".pdf", ".csv"} < set(sizes)
    assert sizes.total() <= 12e6, sizes


def test_what_records_share_stands_once_on_their_page(texts: dict[str, str]) -> None:
    page = texts["records-figure17.html"]
    shared = page[page.index("metrics that all of them have in common") : page.index('id="record-list"')]
    assert "mode: simulate\n" in shared
    assert "mode: simulate\n" not in page[page.index('id="record-list"') :]
    assert "makespan_s: " not in shared


def test_runs_behind_many_cells_stand_once(texts: dict[str, str], content: Content) -> None:
    groups = {v.run_ids for v in content.verdicts if len(v.run_ids) > 1}
    assert groups
    for name, text in texts.items():
        if name.startswith("claims-"):
            listed = re.findall(r'<p class="source" id="runs-\d+">(.*?)</p>', text)
            assert len(listed) == len(set(listed))
            assert {f"#runs-{number}" for number in range(1, 1 + len(listed))} == set(re.findall(r"#runs-\d+", text))


def test_the_pages_load_nothing_from_elsewhere(pages: dict[str, Page], texts: dict[str, str]) -> None:
    for name, page in pages.items():
        local = r"(\.\./)?figures/[\w.]+|page\.(css|js)"
        assert all(re.fullmatch(local, file) for file in [*page.fetched, *page.images] if file), name
        assert "default-src 'none'" in page.policy
        assert re.search(r"@import|url\(|https?://(?!www\.w3\.org)", texts[name].replace(PAPER, "")) is None, name
        assert set(page.outside) <= {PAPER}, name


def test_every_link_has_its_target_and_every_target_one_name(
    pages: dict[str, Page], links: set[tuple[str, str]]
) -> None:
    for name, page in pages.items():
        assert len(page.ids) == len(set(page.ids)), name
    for path, anchor in links:
        if path.endswith((".png", ".svg", ".pdf", ".csv")):  # of a figure
            continue
        assert path in pages, path
        assert not anchor or "=" in anchor or anchor in pages[path].ids, (path, anchor)  # or what a list is narrowed by


def test_links_say_in_which_folder_a_page_lies(pages: dict[str, Page]) -> None:
    paths = {link.partition("#")[0] for link in pages["report.html"].links} - {"", "report.html"}
    assert paths
    assert all(path.startswith(("report_pages/", "figures/")) for path in paths)
    others = {link.partition("#")[0] for name, page in pages.items() if name != "report.html" for link in page.links}
    assert {path for path in others if "/" in path and "/figures/" not in path} == {"../report.html"}


def test_every_record_claim_and_exhibit_has_an_entry(pages: dict[str, Page], content: Content) -> None:
    found = {name for page in pages.values() for name in page.ids}
    wanted = {f"run-{row['run_id']}" for row in content.rows}
    wanted |= {f"claim-{each.claim.id}" for each in content.verdicts} | {each.id for each in content.exhibits}
    assert wanted <= found


def test_every_number_of_an_exhibit_leads_to_a_record_or_a_source(
    links: set[tuple[str, str]], content: Content
) -> None:
    """Every run behind a cell is linked as often as cells rest on it, at least."""
    anchors = {anchor for _, anchor in links}
    for each in content.exhibits:
        cells = [cell for row in each.table.rows for cell in row] if each.table else []
        assert all(f"run-{run}" in anchors for cell in cells for run in cell.run_ids)
        for cell in cells:
            if isinstance(cell.value, float):
                assert cell.run_ids or cell.source, (each.id, cell.text)


def test_the_first_page_does_not_grow_with_claims_and_records(texts: dict[str, str]) -> None:
    assert len(texts["report.html"].encode()) < 120_000
    assert texts["report.html"].count('loading="lazy"') == texts["report.html"].count("<img src")  # figures come later


def test_a_figure_can_be_taken_away_and_made_again(texts: dict[str, str]) -> None:
    for name, folder in (("report.html", "figures"), ("exhibit-figure17.html", "../figures")):
        text = texts[name]
        start = text.index(f'<img src="{folder}/figure17.svg"')
        files = text[start : text.index("</figure>", start)]
        for ending in ("png", "svg", "csv"):
            assert f'<a href="{folder}/figure17.{ending}">{ending.upper()}</a>' in files
        assert "python -m rpbench -m experiment=figure17" in files
        assert f'<source media="(max-width: 640px)" srcset="{folder}/figure17.narrow.svg"' in text


def test_words_are_escaped(content: Content) -> None:
    strange = Table(("x",), ((Cell(None, "<i>"),),))
    odd = Exhibit("<b>bold</b>", "a & b", ("simulated",), "echo '<'", table=strange, id="odd")
    found = dict(takewhile(lambda page: not page[0].startswith("claims"), _rendered(few(content, exhibits=[odd]))))
    assert {"exhibit-odd.html", "records.html"} < set(found)
    for text in found.values():
        assert "<b>bold" not in text
        assert "<i>" not in text
    assert "&lt;b&gt;bold" in found["report.html"]
    assert "\\u003cb>bold" in found["page.js"]


def _rendered(content: Content) -> Iterator[tuple[str, str]]:
    return rendered(content, "report.html", "report_pages")


def _first_page(content: Content) -> str:
    """The first page, without rendering the others."""
    name, text = next(_rendered(content))
    assert name == "report.html"
    return text


def few(content: Content, **others: object) -> Content:
    """The same with three records."""
    return replace(content, rows=content.rows[:3], **others)


# --- what it says --------------------------------------------------------------------------------------------


def test_what_could_not_be_made_is_listed(scant: Content) -> None:
    assert scant.missing
    text = _first_page(scant)
    assert "Not made" in text
    assert all(name in text for name, _ in scant.missing)
    titles = [each.title for each in findings(scant.verdicts)]
    assert "The published simulation is reproduced" in titles
    assert "The baselines were not tuned" not in titles


def test_red_verdicts_stand_at_the_top(content: Content, texts: dict[str, str]) -> None:
    num_red = sum(verdict.red for verdict in content.verdicts)
    assert num_red > 0  # the values are made up
    assert f"{num_red} cells nobody planned for" in texts["report.html"]
    calm = [replace(each, kind="not testable here") if each.red else each for each in content.verdicts]
    assert "nobody planned for" not in _first_page(replace(content, verdicts=calm, exhibits=content.exhibits[:3]))


def test_findings_quote_their_claims(texts: dict[str, str]) -> None:
    assert "The published simulation is reproduced" in texts["findings.html"]
    assert "375 of 375 printed numbers" in texts["findings.html"]
    assert "The baselines were not tuned" in texts["findings.html"]


def test_the_first_screen_says_claim_verdict_and_evidence(texts: dict[str, str], content: Content) -> None:
    text = texts["report.html"]
    screen = text[text.index("<h1>") : text.index('id="answers"')]
    claimed, verdict, known, tiles, found, ways = (
        screen.index(words)
        for words in ("Claimed", "Verdict", "How we know", 'class="tiles"', "What we found", "Ways in")
    )
    assert claimed < verdict < known < tiles < found < ways
    for words in (
        ">1.48</a> to <",
        ">2.16</a>",
        "235B",
        PAPER,
        "blind",
        "Its machines were not at hand",
    ):
        assert words in screen[claimed:tiles], words
    assert screen[found:ways].count("<li>") == 3
    assert "advise" in screen[ways:]
    calm = _first_page(replace(content, verdicts=[replace(v, kind="not in this scope") for v in content.verdicts]))
    assert calm.count("as declared; its runs are not in this scope") == 5
    for words in ("25 of 25 cells of its simulation", " statements taken from it"):  # were 0 of 25 that come out
        assert f"{words} were not checked here." in calm
    assert "come out to the last digit" not in calm
    assert "25 of 25 cells of its simulation come out to the last digit." in screen


def test_discrepancies_are_all_there(texts: dict[str, str]) -> None:
    assert texts["discrepancies.html"].count("<tr>") == 1 + 22


def test_runs_that_failed_are_listed(scant: Content) -> None:
    first, *others = scant.rows
    failed = {key: value for key, value in first.items() if not key.startswith(("makespan", "bubble", "num_"))}
    failed |= {"status": "failed", "reason": "RuntimeError: no ink", "evidence": None}
    pages = _rendered(replace(scant, rows=[failed, *others[:2]]))
    assert any("RuntimeError: no ink" in text for name, text in pages if name.startswith("records"))


def test_every_exhibit_has_a_question_and_an_answer(content: Content) -> None:
    for each in content.exhibits:
        assert each.question.endswith("?"), each.id
        assert answer(each), each.id


def test_an_answer_is_the_last_sentence() -> None:
    caption = "Rows are runs. Layer times of Fig. 3 hold. RoundPipe leads by 1.2 × on 8 devices."
    exhibit = replace(_exhibit("one"), caption=caption)
    assert answer(exhibit) == "RoundPipe leads by 1.2 × on 8 devices."


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished sweep in it; make one first"):
        build(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_build_draws_and_writes(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "analysis.report.page.draw_all", lambda exhibits, _, done: {each.id: image(each.id) for each in exhibits}
    )
    path = build(results, tmp_path / "sub" / "report.html")
    assert path == tmp_path / "sub" / "report.html"
    assert '"report_pages/figures/figure2.svg"' in path.read_text(encoding="utf-8")
    others = list((tmp_path / "sub" / "report_pages").glob("exhibit-*.html"))
    assert any('"figures/figure2.svg"' in other.read_text(encoding="utf-8") for other in others)
    assert (tmp_path / "sub" / "report_pages" / "figures" / "figure2.csv").exists()
    assert {"page.css", "page.js"} < {other.name for other in (tmp_path / "sub" / "report_pages").iterdir()}
    told = capsys.readouterr().err.splitlines()
    assert any("records; drawing" in line for line in told)
    assert told[-1].endswith("writing the pages")


def test_a_failed_build_leaves_the_old_page(content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("analysis.report.views.claim", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(few(content, exhibits=content.exhibits[:3]), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# --- the command that makes a record again -------------------------------------------------------------------


def _again(command: str) -> str:
    """The run_id that a command line would give."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "rpbench"]
    return run_id(identity(load(words[3:])))


def test_commands_make_the_same_runs_again(experiments: Experiments) -> None:
    rows = experiments.cells("figure17").to_dict("records")[::8]  # composing takes a tenth of a second each
    assert len({row["schedule"] for row in rows}) > 2
    for row in rows:
        assert _again(command_of(row)) == row["run_id"], command_of(row)


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=steady_state", "model=gpt_oss_20b", "num_microbatches=9"],
        ["experiment=recompute_ahead", "schedule=1f1b"],
        ["schedule=roundpipe", "model=qwen3_1p7b", "cost=published", "partition='14-14|7-7-14-0*'"],
        ["cost=constant", "cost.forward_ms=1e-7", "model=transformer", "model.hidden=1024", "cluster=8x_h100"],
        ["schedule_file='a folder/it\\'s 1,2=x.txt'", "chunks_per_device=2"],
    ],
)
def test_odd_values_survive_the_command_line(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "it's 1,2=x.txt").write_text("0F0 0B0")
    request = load([*overrides, "results_dir=elsewhere", "force=true"])
    command = command_of({"overrides": list(request.overrides)})
    assert _again(command) == run_id(identity(request))
    assert "elsewhere" not in command


# --- figures -------------------------------------------------------------------------------------------------


def _plain() -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.add_subplot().plot([1, 2])
    return figure


def _crowded() -> Figure:
    figure = Figure(figsize=(2, 1))
    axes = figure.add_subplot()
    axes.scatter(range(9000), range(9000))
    return figure


def _exhibit(name: str, **figures: object) -> Exhibit:
    return Exhibit(name, "", ("derived",), "", id=name, **figures)  # type: ignore[arg-type]


def test_figures_are_drawn_once_each_in_their_order_and_kept_as_files(tmp_path: Path) -> None:
    told: list[str] = []
    exhibits = [
        _exhibit("one", draw=_plain, drawings={"timeline_a": _plain}),
        _exhibit("two"),
        _exhibit("three", draw=_plain),
    ]
    images = draw_all(exhibits, tmp_path, told.append)
    assert list(images) == told == ["one", "timeline_a", "three"]
    assert images["one"].wide == Shown("one.svg", 192, 96)
    assert images["timeline_a"].wide == Shown("timeline_a.png", 192, 96, "timeline_a.dark.png")
    assert images["one"].narrow is None
    kept = {f"{stem}.{end}" for stem in ("one", "three") for end in ("pdf", "png", "svg")}
    kept |= {"timeline_a.png", "timeline_a.dark.png"}  # a command beside it draws the other formats
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert images["one"].files == ("one.png", "one.pdf", "one.svg")
    assert images["timeline_a"].files == ("timeline_a.png",)


def test_a_drawing_too_large_for_vectors_becomes_pixels(tmp_path: Path) -> None:
    (image,) = draw_all([_exhibit("crowded", draw=_crowded)], tmp_path).values()
    assert image.wide.name == "crowded.png"
    assert image.files == ("crowded.png", "crowded.pdf")
    assert LARGEST_SVG_BYTES < 1_000_000


def test_a_dark_page_gets_a_dark_picture(tmp_path: Path) -> None:
    (image,) = draw_all([_exhibit("crowded", draw=_crowded)], tmp_path).values()
    light, dark = (_colours(tmp_path / name) for name in (image.wide.name, image.wide.dark))
    assert light[0] == (255, 255, 255)
    assert sum(dark[0]) < 100
    assert max(dark, key=sum) != light[0]
    blue = max(light, key=lambda colour: colour[2] - colour[0])
    assert blue in dark  # a colour stays what it is


def _colours(path: Path) -> list[tuple[int, int, int]]:
    """Colours of a picture, the most frequent one first."""
    with PIL.Image.open(path) as picture:
        return [colour for _, colour in sorted(picture.convert("RGB").getcolors(1 << 24), reverse=True)]


def test_a_drawing_knows_the_dark(tmp_path: Path) -> None:
    draw_all([_exhibit("one", draw=_plain)], tmp_path)
    drawing = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert "@media (prefers-color-scheme: dark)" in drawing
    (page,) = re.findall(r"[.](s\d+)\{fill: #ffffff\}", drawing)
    assert re.search(rf"@media.*[.]{page}\b[^}}]*\{{fill:#14181d!important\}}", drawing)
    assert f'class="{page}"' in drawing
    ElementTree.fromstring(drawing)


def test_a_figure_that_cannot_be_drawn_is_an_error(tmp_path: Path) -> None:
    def broken() -> Figure:
        raise RuntimeError("no ink")

    with pytest.raises(RuntimeError, match="no ink"):
        draw_all([_exhibit("good", draw=_plain), _exhibit("bad", draw=broken)], tmp_path)


def test_records_are_shown_as_they_were_written(content: Content, full_experiments: Experiments) -> None:
    assert len(content.rows) == len(full_experiments.rows)
    assert all(isinstance(row["num_microbatches"], int) for row in content.rows)
    assert all(value == value for row in content.rows for value in row.values() if isinstance(value, float))
