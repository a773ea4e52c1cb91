"""The report: one page that needs nothing else, in which every number leads to where it comes from."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from report_page import Page

from analysis.exhibits.exhibit import Cell, Exhibit, Table
from analysis.report import build
from analysis.report.command import commands, override
from analysis.report.images import LARGEST_SVG_BYTES, draw_all
from analysis.report.page import Content, gather, render, write
from rpbench.harness.config import as_plain
from rpbench.harness.provenance import code_version
from rpbench.harness.record import read_all, run_id
from rpbench.harness.request import load

PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def content(full_results: Path) -> Content:
    """Everything but the figures, which take long to draw."""
    found = gather(full_results)
    found.images = {each.id: PIXEL for each in found.exhibits if each.draw}
    return found


@pytest.fixture(scope="module")
def scant(results: Path) -> Content:
    """What there is of figure 17 and the closed forms alone."""
    return gather(results)


@pytest.fixture(scope="module")
def text(content: Content) -> str:
    return render(content)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


# --- one page ------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_elsewhere(page: Page, text: str) -> None:
    assert page.fetched == []
    assert all(link.startswith("#") for link in page.links)
    assert page.images
    assert all(image.startswith("data:image/") for image in page.images)
    assert "default-src 'none'" in page.policy
    assert re.search(r"@import|url\(", text) is None


def test_every_link_has_its_target_and_every_target_one_name(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} - set(page.ids) == set()


def test_every_record_and_claim_and_exhibit_has_an_entry(page: Page, content: Content) -> None:
    wanted = {f"run-{row['run_id']}" for row in content.rows}
    wanted |= {f"claim-{each.claim.id}" for each in content.verdicts} | {each.id for each in content.exhibits}
    assert wanted <= set(page.ids)


def test_every_number_of_an_exhibit_leads_to_a_record_or_a_source(page: Page, content: Content) -> None:
    """Every run behind a cell is linked as often as cells rest on it, at least."""
    for each in content.exhibits:
        cells = [cell for row in each.table.rows for cell in row] if each.table else []
        assert all(f"#run-{run}" in page.links for cell in cells for run in cell.run_ids)
        for cell in cells:
            if isinstance(cell.value, float):
                assert cell.run_ids or cell.source, (each.id, cell.text)


def test_the_page_is_small_enough_to_send(text: str, content: Content) -> None:
    assert len(text.encode()) < 8_000 * len(content.rows)  # a few kilobytes a run; figures come on top


def test_words_are_escaped(content: Content) -> None:
    odd = Exhibit(
        "odd", "<b>bold</b>", "a & b", ("simulated",), "echo '<'", table=Table(("x",), ((Cell(None, "<i>"),),))
    )
    text = render(replace(content, exhibits=[odd]))
    assert "<b>bold" not in text
    assert "<i>" not in text
    assert "&lt;b&gt;bold" in text


# --- what it says --------------------------------------------------------------------------------------------


def test_what_could_not_be_made_is_listed(scant: Content) -> None:
    assert scant.missing
    text = render(scant)
    assert "Not made" in text
    assert all(name in text for name, _ in scant.missing)
    assert "The published simulation is reproduced" in text
    assert "The baselines were not tuned" not in text


def test_red_verdicts_stand_at_the_top(content: Content, text: str) -> None:
    num_red = sum(verdict.red for verdict in content.verdicts)
    assert num_red > 0  # the values are made up
    assert f"{num_red} verdicts nobody planned for" in text
    calm = [replace(each, kind="not testable here") if each.red else each for each in content.verdicts]
    assert "nobody planned for" not in render(replace(content, verdicts=calm))


def test_findings_quote_their_claims(text: str) -> None:
    assert "375 of 375 printed numbers" in text
    assert "The baselines were not tuned" in text


def test_discrepancies_are_all_there(text: str) -> None:
    section = text[text.index('<section id="discrepancies">') : text.index('<section id="method">')]
    assert section.count("<tr>") == 1 + 22


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished run in it; make some first"):
        build(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_build_draws_and_writes(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.report.page.draw_all", lambda exhibits: {each.id: PIXEL for each in exhibits})
    path = build(results, tmp_path / "sub" / "report.html")
    assert path == tmp_path / "sub" / "report.html"
    assert PIXEL in path.read_text(encoding="utf-8")


def test_a_failed_build_leaves_the_old_page(content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("analysis.report.views.claim", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(content, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# --- the command that makes a record again -------------------------------------------------------------------


def _identity(config: dict) -> str:
    return run_id(config, code_version())


def _again(command: str) -> str:
    """The run_id that a command line would give."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "rpbench"]
    return _identity(as_plain(resolved(load(words[3:]))))


def test_commands_make_the_same_runs_again(results: Path) -> None:
    rows = list(read_all(results))[::9]  # composing takes a tenth of a second each
    assert {row["backend"] for row in rows} == {"sim", "roofline"}
    for row, command in zip(rows, commands(row["config"] for row in rows), strict=True):
        assert _again(command) == row["run_id"], command


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=steady_state", "model=gpt_oss_20b", "num_microbatches=9"],
        ["experiment=recompute_ahead", "schedule=1f1b"],
        ["experiment=hand_cuts"],
        ["schedule=roundpipe", "model=qwen3_1p7b", "cost=published", "partition='14-14|7-7-14-0*'"],
        ["cost=constant", "cost.forward_ms=18.522", "cost.hop_ms=0.601", "num_microbatches=24", "seed=3"],
        ["cost=constant", "cost.forward_ms=1e-7", "model=transformer", "model.hidden=1024", "cluster=8x_h100"],
        ["schedule_file='a folder/it\\'s 1,2=x.txt'", "chunks_per_device=2"],
        ["partition='007'", "model.name='null'", "schedule=gpipe"],
    ],
)
def test_odd_values_survive_the_command_line(overrides: list[str]) -> None:
    config = as_plain(resolved(load(overrides)))
    if config["model"]["name"] == "null":  # a choice that no file stands for
        assert commands([config]) == [""]
    else:
        assert _again(commands([config])[0]) == _identity(config)


@pytest.mark.parametrize(
    "value, written",
    [
        (None, "null"),
        (True, "true"),
        (8, "8"),
        (0.5, "0.5"),
        ("1f1b", "'1f1b'"),
        ("3-3-4", "3-3-4"),
        ("true", "'true'"),
        ("12", "'12'"),
        ("it's", "'it\\'s'"),
        ([1, "a b"], "[1,'a b']"),
    ],
)
def test_an_override_is_quoted_where_it_would_be_misread(value: object, written: str) -> None:
    assert override("key", value) == f"key={written}"


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
    return Exhibit(name, name, "", ("derived",), "", **figures)  # type: ignore[arg-type]


def test_figures_are_drawn_once_each_in_their_order_and_kept_as_files(tmp_path: Path) -> None:
    told: list[str] = []
    exhibits = [
        _exhibit("one", draw=_plain, drawings={"timeline_a": _plain}),
        _exhibit("two"),
        _exhibit("three", draw=_plain),
    ]
    images = draw_all(exhibits, tmp_path, told.append)
    assert list(images) == told == ["one", "timeline_a", "three"]
    assert images["one"].startswith("data:image/svg+xml;base64,")
    assert images["timeline_a"].startswith("data:image/png;base64,")
    stems = {"one", "timeline_a", "three"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.{end}" for stem in stems for end in ("pdf", "png")}


def test_a_drawing_too_large_for_vectors_becomes_pixels() -> None:
    (image,) = draw_all([_exhibit("crowded", draw=_crowded)]).values()
    assert image.startswith("data:image/png;base64,")
    assert LARGEST_SVG_BYTES < 1_000_000


def test_a_figure_that_cannot_be_drawn_is_an_error() -> None:
    def broken() -> Figure:
        raise RuntimeError("no ink")

    with pytest.raises(RuntimeError, match="no ink"):
        draw_all([_exhibit("good", draw=_plain), _exhibit("bad", draw=broken)])


def test_records_are_shown_as_they_were_written(content: Content, full_records: pd.DataFrame) -> None:
    assert len(content.rows) == len(full_records)
    assert all(isinstance(row["num_microbatches"], int) for row in content.rows)
    assert all(value == value for row in content.rows for value in row.values() if isinstance(value, float))
