"""Chosen rows: what a notebook leaves out of a frame is in no figure, table or sentence made of it."""

from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.exhibits.figures import timelines
from analysis.exhibits.figures.own import tuning
from analysis.exhibits.figures.paper import (
    figure2,
    figure3,
    figure5,
    figure17,
    predicted,
    predicted_curves,
    prediction,
    steady_state,
    systems,
)
from analysis.exhibits.notebook import among, chosen, crossed
from analysis.exhibits.tables import published_cells
from analysis.records.experiments import Experiments

ONE = "qwen3_32b"
OTHERS = ("Qwen3-1.7B", "Llama-3.1-8B", "GPT-OSS-20B", "Qwen3-235B")


def _words(figure: Figure) -> str:
    legends = [legend for legend in (*figure.legends, *(axes.get_legend() for axes in figure.axes)) if legend]
    texts = [text.get_text() for legend in legends for text in legend.get_texts()]
    for axes in figure.axes:
        texts += [axes.get_title("left"), axes.get_title(), *(text.get_text() for text in axes.texts)]
        texts += [label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels(), axes.yaxis.label)]
    return " ".join(texts).replace("\n", " ")


def _drawn(experiments: Experiments) -> dict[str, Any]:
    """Figures and sentences about one model."""
    bars = chosen(figure17.numbers(experiments), model=ONE)
    runs = chosen(tuning.numbers(experiments), model=ONE, schedule=["1f1b", "looped_bfs", "roundpipe"])
    rates = chosen(systems.numbers("throughput", "tokens_per_s"), model="qwen3-32b")
    guesses = chosen(predicted.numbers("throughput", predicted.A800), model="qwen3-32b")
    pace = chosen(prediction.numbers(experiments), model=ONE)
    calls = chosen(steady_state.numbers(experiments), model=ONE, num_microbatches=[8, 16])
    scales = chosen(predicted_curves.scales(), model="qwen3-32b", platform=predicted.A800)
    cheap = predicted_curves.cheapest(chosen(predicted_curves.costs(), model="qwen3-32b"))
    times, batches = (chosen(each.numbers(experiments), model=ONE) for each in (figure2, figure5))
    ideals = chosen(figure3.numbers(experiments), model=ONE)
    spent = chosen(systems.costs(predicted.A800), model="qwen3-32b")
    pages = chosen(timelines.numbers(experiments), model=ONE, schedule="gpipe")
    return {
        "figure17": (figure17.draw(bars), figure17.answer(bars)),
        "tuning": (tuning.draw(runs), tuning.answer(runs)),
        "systems": (systems.draw(rates, "tokens/s"), systems.answer(rates)),
        "cost": (systems.draw_cost(spent, "8 A800"), systems.cost_answer(spent)),
        "predicted": (predicted.draw(guesses, "tokens/s"), predicted.answer(guesses)),
        "prediction": (prediction.draw(pace), prediction.answer(pace)),
        "steady_state": (steady_state.draw(calls), steady_state.answer(calls)),
        "scaling": (predicted_curves.draw_scaling(scales), predicted_curves.scaling_answer(scales)),
        "cheapest": (predicted_curves.draw_cost(cheap), predicted_curves.cost_answer(cheap)),
        "figure2": (figure2.draw(times), figure2.answer(times)),
        "figure3": (figure3.draw(ideals), figure3.answer(ideals)),
        "figure5": (figure5.draw(batches), figure5.answer(batches)),
        "timelines": (timelines.draw(pages, experiments.results), ""),
    }


def test_a_figure_and_its_answer_are_of_the_chosen_model_alone(full_experiments: Experiments) -> None:
    drawn = _drawn(full_experiments)
    for name, (figure, answer) in drawn.items():
        words = _words(figure)
        assert "Qwen3-32B" in words, name
        assert not [model for model in OTHERS if model in words + answer], name
        assert "nan" not in words + answer, name
    assert "GPipe" not in _words(drawn["tuning"][0])
    assert "N = 9" not in _words(drawn["steady_state"][0]) + drawn["steady_state"][1]
    assert "RTX 4090" not in _words(drawn["scaling"][0])
    assert "1F1B" not in _words(drawn["timelines"][0])


def test_bars_and_ticks_that_were_not_chosen_have_no_key(full_experiments: Experiments) -> None:
    bars = chosen(figure17.numbers(full_experiments), bar=["gpipe", "roundpipe-sync"])
    assert "back to back" not in _words(figure17.draw(bars))
    assert "set to 0" not in _words(figure17.draw(bars))
    elsewhere = figure2.numbers(full_experiments, "8x_h100")
    assert "published" not in _words(figure2.draw(elsewhere)), "it is of the RTX 4090"
    assert "published" in _words(figure2.draw(figure2.numbers(full_experiments)))


def test_tables_follow_as_well(full_experiments: Experiments) -> None:
    found = {key: row for key, row in tuning.plans_numbers(full_experiments).items() if key[0] == ONE}
    assert [row[0].text for row in tuning.plans_table(found).rows] == ["Qwen3-32B"] * 4
    numbers = published_cells.compared(full_experiments)
    assert len(numbers) == 25 * 15
    assert numbers["is equal"].all()
    calls = chosen(steady_state.numbers(full_experiments), num_microbatches=8)
    assert not [column for column in steady_state.tabulate(calls).columns if "N = 16" in column]


def test_the_other_machine_has_its_own_measurements_and_price() -> None:
    found = chosen(systems.numbers("throughput", "tokens_per_s", predicted.A800), system="roundpipe")
    assert found.set_index("model")["value"]["qwen3-235b-lora"] == 2132.29, "the figure's bar, not the library's README"
    assert float(systems.price_of(predicted.A800).value) == 8.16
    with pytest.raises(ValueError, match=r"there is no roundpipe on qwen3-1\.7b, .*: leave it in"):
        systems.speedups(chosen(systems.numbers("throughput", "tokens_per_s"), system="fsdp"))


FRAME = pd.DataFrame({"a": ["x", "x", "y"], "b": [1, 2, 1], "c": [10.0, 20.0, 30.0], "d": [1, 3, 5]})


@pytest.mark.parametrize(
    "wanted, said",
    [
        ({"a": "z"}, r"a='z' is unknown here: choose among x, y"),
        ({"a": []}, r"a=\[\] chooses nothing: take some of x, y, or None for all"),
        ({"a": "y", "b": 2}, r"no row has all of .*: leave a choice out, with None"),
    ],
)
def test_an_unknown_choice_is_refused_with_what_there_is(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        chosen(FRAME, **wanted)


def test_rows_and_columns_as_they_were_asked_for() -> None:
    assert chosen(FRAME, a=["x"], b=None)["c"].to_list() == [10, 20]
    assert among("a", ("x",), ["x", "y"]) == ["x"]
    assert crossed(FRAME, "a", "b", "c").loc["x"].to_list() == [10, 20]
    assert crossed(FRAME, "b", "a", "c").loc[1].to_list() == [10, 30]
    for wrong, said in (
        (("a", "b", "e"), "value='e' is unknown here: choose among a, b, c, d"),
        (("b", "d", "a"), "value='a' holds no numbers: choose among b, c, d"),
        (("a", "a", "c"), "choose among the columns three different ones"),
    ):
        with pytest.raises(ValueError, match=said):
            crossed(FRAME, *wrong)
