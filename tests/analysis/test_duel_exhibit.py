"""The duel's exhibit: verdicts of both models are given together, and who failed keeps its row."""

from random import Random

import pandas as pd
import pytest

from analysis.exhibits.figures import duel
from analysis.records.experiments import MissingRuns
from rpbench.run.modes.duel.contenders import BASE

SECONDS = {"roundpipe": 0.9, "gpipe": 1.1}


def row(model, place, name, *, cores=2):
    starts = []
    for number in range(2):
        draw = Random(1000 * place + 10 * number + len(model))
        took = [SECONDS.get(name, 1.0) * draw.uniform(0.99, 1.01) for _ in range(40)]
        at = [30.0 * turn + 1.4 * place for turn in range(40)]
        starts.append({"at_s": at, "wall_s": took, "replay_s": took, "cpu_s": took, "elapsed_s": took,
                       "others_s": [0.0] * 40})  # fmt: skip
    return {
        "model": model, "contender": name, "status": "ok", "reason": None, "run_id": f"{model} {name}", "runs": starts,
        "starts": [{"num_cores": cores}] * 2, "num_devices": 2, "foreign_cpu_share": 0.0, "recompute": "all",
        "config": {"mode": {"half_width": 0.02, "num_starts": 2}}, "partition_layers": "4-4", "round_size": None,
        "bubble_makespan": 0.1, "simulated_makespan_s": 1.0, "emulated_makespan_s": 1.0, "replay_makespan_s": 1.0,
        "makespan_s": 1.0, "cpu_s": 1.8,
    }  # fmt: skip


def table_of(*, cores=2):
    """References stand at places 0, 4, 8 and 12 of every turn."""
    names = list(duel.NAMES)
    order = [name for k in range(4) for name in (names[k], *names[4 + k :: 4])]
    return pd.DataFrame([row(model, order.index(name), name, cores=cores) for model in duel.MODELS for name in names])


def cells(exhibit, column):
    place = exhibit.columns.index(column)
    return {(row[0].text, row[1].text): row[place].text for row in exhibit.rows}


def test_verdicts_stand_in_the_table_and_in_the_caption():
    duels = duel.found_duels(table_of())
    made = duel.tabulate(duels)
    verdicts = cells(made, "verdict by the clock")
    assert {verdict for (_, name), verdict in verdicts.items() if name == "RoundPipe"} == {"faster"}
    assert {verdict for (_, name), verdict in verdicts.items() if name == "GPipe"} == {"slower"}
    assert {verdict for (_, name), verdict in verdicts.items() if "twin" in name} == {"no difference shown"}
    assert cells(made, "comparisons in each start")["mid GPT, half as wide", "GPipe"].startswith("40 (and 0 disturbed)")
    words = duel.answer(duels)
    assert "faster: RoundPipe 1.11" in words
    assert "Of 4 that are 1F1B itself, 0 have a verdict of a difference" in words
    assert duel.draw(duels).axes


def test_all_verdicts_of_the_table_are_given_together():
    both = duel.found_duels(table_of())
    one = {"half_mid_gpt": both["half_mid_gpt"]}
    wide, narrow = (duel.judged(each, "wall")["half_mid_gpt"]["roundpipe"] for each in (both, one))
    assert (wide.low, wide.high) == (narrow.low, narrow.high)
    assert wide.sure_high - wide.sure_low > narrow.sure_high - narrow.sure_low


def test_who_failed_keeps_its_row_and_its_reason():
    rows = table_of()
    out = rows["contender"] == "gpipe"
    rows.loc[out, "status"] = "failed"
    rows.loc[out, "reason"] = "it does not train as plain training does: off by 1"
    duels = duel.found_duels(rows)
    verdicts = cells(duel.tabulate(duels), "verdict by the clock")
    found = {verdict for (_, name), verdict in verdicts.items() if name == "GPipe"}
    assert found == {"failed: it does not train as plain training does: off by 1"}
    assert "failed: GPipe" in duel.answer(duels)


def test_one_core_has_no_verdicts():
    duels = duel.found_duels(table_of(cores=1))
    assert "2 devices on 1 core: they take turns" in duel.answer(duels)
    assert "faster" not in {text.split(":")[0] for text in cells(duel.tabulate(duels), "verdict by the clock").values()}


def test_without_the_base_there_is_no_duel():
    rows = table_of()
    with pytest.raises(MissingRuns):
        duel.found_duels(rows[rows["contender"] != BASE])
