"""Figures: the numbers they draw are those of the records, beside the published ones, and they can be read."""

import re
from itertools import combinations
from pathlib import Path

import matplotlib.colors
import pytest
from judged import JUDGED
from manifests import replaced
from page_texts import check_texts
from spared import spared

from analysis.exhibits import catalogue, style
from analysis.exhibits.exhibit import Exhibit
from analysis.exhibits.figures import duel
from analysis.exhibits.figures.files import save_figure, save_table, svg_text
from analysis.exhibits.figures.own import dispatch
from analysis.exhibits.figures.paper import figure17
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, published
from analysis.report.content import Content
from analysis.report.images import WIDTH_INCHES, stacked
from rpbench import registry
from rpbench.config.configuration import CONF
from rpbench.records.manifest import FOLDER, PLAN

ALL = (
    "figure17",
    "published_cells",
    "steady_state",
    "causal",
    "figure3",
    "tuning",
    "lead",
    "gains",
    "plans",
    "dispatch",
    "tradeoff",
    "hop_latency",
    "thousand_devices",
    "uneven_head",
    "turning",
    "goodput",
    "duel",
    "calibrated",
    "torch_duel",
    "equivalence",
    "figure10",
    "figure10_bars",
    "figure10_options",
    "baselines_cpu",
    "prediction",
    "convergence",
    "figure2",
    "figure5",
    "figure10_published",
    "figure11_published",
    "cost",
    "figure10_predicted",
    "figure11_predicted",
    "prediction_targets",
    "prediction_errors",
    "prediction_misses",
    "figure12_predicted",
    "figure13_predicted",
    "figure14_predicted",
    "figure15_predicted",
    "figure16_predicted",
    "blind_round",
    "five_duels",
    "aa_duel",
    "what_if",
    "atlas",
    "timelines",
)

# What follows from tables of the project alone.
COMMITTED = ALL[ALL.index("figure10_published") : ALL.index("what_if")]


@pytest.fixture(scope="module")
def made(full_content: Content) -> dict[str, Exhibit]:
    assert full_content.missing == []
    return {exhibit.id: exhibit for exhibit in full_content.exhibits}


# --- all of them ---------------------------------------------------------------------------------------------


def test_every_exhibit_can_be_made_in_its_order(made: dict[str, Exhibit]) -> None:
    assert tuple(made) == ALL


@pytest.mark.parametrize("name", ALL)
def test_every_number_says_where_it_comes_from(made: dict[str, Exhibit], name: str) -> None:
    assert made[name].table is not None
    for row in made[name].table.rows:
        for cell in row:
            if not isinstance(cell.value, str) and cell.value is not None:
                assert bool(cell.run_ids) != bool(cell.source), cell


TABLES = (
    "published_cells",
    "causal",
    "lead",
    "plans",
    "equivalence",
    "figure10",
    "figure10_bars",
    "figure10_options",
    "torch_duel",
    "baselines_cpu",
    "prediction_targets",
    "prediction_errors",
    "prediction_misses",
    "blind_round",
    "five_duels",
    "aa_duel",
)


DRAWN = [name for name in ALL if name not in (*TABLES, *JUDGED)]
# Of many panels, marks or labels: each takes a second or more.
CROWDED = (
    *("timelines", "gains", "atlas", "hop_latency", "tradeoff", "tuning", "turning", "uneven_head", "convergence"),
    *("figure11_predicted", "figure13_predicted"),
)


@pytest.mark.parametrize("name", spared(DRAWN, lambda name: name not in CROWDED))
def test_texts_stay_on_the_page_and_apart(made: dict[str, Exhibit], name: str) -> None:
    draw = made[name].draw
    assert draw is not None
    check_texts(draw())


@pytest.mark.parametrize("name", spared([*DRAWN, *JUDGED], lambda name: name not in CROWDED))
def test_a_phone_gets_the_panels_below_one_another(made: dict[str, Exhibit], name: str) -> None:
    draw = made[name].draw
    assert draw is not None
    figure = draw()
    columns = {axes.get_subplotspec().colspan.start for axes in figure.axes if axes.get_subplotspec()}
    number, width = len(figure.axes), figure.get_size_inches()[0]
    if not stacked(figure):
        assert len(columns) == 1 or number > 12
        return
    assert len(figure.axes) == number
    assert figure.get_size_inches()[0] == WIDTH_INCHES < width
    check_texts(figure)
    tops = [axes.get_window_extent().y1 for axes in figure.axes]
    assert len(set(tops)) == len(tops)


def test_axes_carry_units(made: dict[str, Exhibit]) -> None:
    for name in ("figure2", "figure3", "figure5", "figure17", "steady_state"):
        draw = made[name].draw
        assert draw is not None
        labels = [axes.get_xlabel() + axes.get_ylabel() for axes in draw().axes]
        assert any("(" in label for label in labels), name


def test_records_that_are_not_there_are_named(full_experiments: Experiments) -> None:
    rows = full_experiments.cells("figure17")
    lost = (rows["schedule"] == "looped_bfs") & (rows["model"] == "qwen3_32b")
    found, missing = catalogue.exhibits(replaced(full_experiments, "figure17", rows[~lost]))
    reasons = dict(missing)
    assert {exhibit.id for exhibit in found} | set(reasons) == set(ALL)
    assert set(reasons) == {"figure3", "tuning", "lead"}
    captions = {exhibit.id: exhibit.caption for exhibit in found}
    for name in ("figure17", "published_cells", "timelines"):
        assert captions[name].startswith("24 of 25 cells; missing: Looped BFS on Qwen3-32B.")


def test_without_records_only_published_and_predicted_exhibits_are_left(tmp_path: Path) -> None:
    found, missing = catalogue.exhibits(Experiments(tmp_path))
    assert tuple(exhibit.id for exhibit in found) == COMMITTED
    assert len(found) + len(missing) == len(ALL)
    assert all("has not been run here: python -m rpbench -m experiment=" in why for _, why in missing)


def test_sweeps_that_were_planned_and_did_not_run_make_no_exhibit(full_results: Path, tmp_path: Path) -> None:
    for plan in full_results.glob(f"{FOLDER}/*/{PLAN}"):
        (tmp_path / FOLDER / plan.parent.name).mkdir(parents=True)
        (tmp_path / FOLDER / plan.parent.name / PLAN).write_bytes(plan.read_bytes())
    found, missing = catalogue.exhibits(Experiments(tmp_path))
    assert tuple(exhibit.id for exhibit in found) == COMMITTED
    assert len(found) + len(missing) == len(ALL)


def test_dispatch_sets_every_round_size_beside_the_rotation(full_experiments: Experiments) -> None:
    data = dispatch.numbers(full_experiments)
    assert sorted(data["round_size"].unique()) == [0, 1, 4, 8]
    one = data[data["model"] == "qwen3_32b"].set_index("round_size")
    assert one.loc[8, "bubble"] == pytest.approx(0.08 * one.loc[0, "bubble"])
    (row,) = [row for row in dispatch.exhibit(full_experiments).table.rows if row[0].text == "Qwen3-32B"]
    rotation_over_dynamic = 1.01 / 0.98  # makespans as the records were made up
    assert row[5].value == pytest.approx(rotation_over_dynamic)


# --- files ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_are_the_same_every_time(made: dict[str, Exhibit], tmp_path: Path) -> None:
    draw = made["figure3"].draw
    assert draw is not None
    first, second = (save_figure(draw(), "figure3", tmp_path / name) for name in ("first", "second"))
    assert [path.name for path in first] == ["figure3.pdf", "figure3.png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert b"CreationDate" not in first[0].read_bytes()
    assert svg_text(draw()) == svg_text(draw())


def test_every_exhibit_leaves_its_numbers(made: dict[str, Exhibit], tmp_path: Path) -> None:
    for name, exhibit in made.items():
        assert exhibit.table is not None
        csv, tex = save_table(exhibit.table, name, tmp_path)
        assert csv.read_text(encoding="utf-8").count("\n") == 1 + len(exhibit.table.rows)
        assert tex.read_text(encoding="utf-8").count(r"\\") == 1 + len(exhibit.table.rows)


# --- style ---------------------------------------------------------------------------------------------------


def test_every_schedule_and_system_has_a_look_of_its_own() -> None:
    named = set(registry.entries()) & set(runs.SCHEDULES) | set(published("throughput")["system"])
    assert named <= set(style.METHODS)
    for looks in (style.METHODS, style.MODELS, style.PARTITIONS):
        pairs = [(look.colour, look.marker) for look in looks.values()]
        assert len(set(pairs)) == len(pairs)


def test_parts_of_a_bar_stay_apart_in_black_and_white() -> None:
    grey = {name: _lightness(look.colour) for name, look in style.PARTS.items()}
    for first, second in combinations(figure17.PARTS, 2):
        assert abs(grey[first] - grey[second]) > 0.12, (first, second)


def _lightness(colour: str) -> float:
    red, green, blue = matplotlib.colors.to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_models_are_named_as_their_configs_say() -> None:
    for model, name in PUBLISHED_MODELS.items():
        config = (CONF / "model" / f"{model}.yaml").read_text()
        assert re.search(rf"^published_name: {re.escape(name)}$", config, re.MULTILINE)


# --- drawn ---------------------------------------------------------------------------------------------------


def test_what_did_not_run_is_written_and_has_no_bar(made: dict[str, Exhibit]) -> None:
    draw = made["figure10_published"].draw
    assert draw is not None
    last = draw().axes[-1]
    words = [text.get_text() for text in last.texts]
    assert (words.count("OOM"), words.count("N/A")) == (6, 1)
    assert len(last.patches) == 2  # RoundPipe and RoundPipe-sync


def test_one_page_and_25_files(made: dict[str, Exhibit]) -> None:
    exhibit = made["timelines"]
    assert len(exhibit.drawings) == 25
    assert "timeline_1f1b_qwen3_32b" in exhibit.drawings
    figure = exhibit.drawings["timeline_1f1b_qwen3_32b"]()
    assert "1F1B, Qwen3-32B" in figure.axes[0].get_title(loc="left")


# --- the duel ------------------------------------------------------------------------------------------------


def test_the_duel_shows_every_contender_of_both_models(made: dict[str, Exhibit]) -> None:
    table = made["duel"].table
    assert table is not None
    names = [(row[0].text, row[1].text) for row in table.rows]
    assert names == [(model, name) for model in duel.MODELS.values() for name in duel.NAMES.values()]
    assert {row[4].text.partition(":")[0] for row in table.rows} == {"no verdict"}, "eight runs are too few"


def test_one_gradient_that_differs_is_shown(made: dict[str, Exhibit]) -> None:
    table = made["equivalence"].table
    assert table is not None
    assert [cell.text for cell in table.rows[0]] == ["GPipe", "0", "0", "1.0e-03", "0", "0", "1.0e-03"]
    assert "4 of 6 runs agree in every bit" in made["equivalence"].caption
