"""Rankings that turn: turns of small tables by hand, the exhibit against its records, and what each level charges."""

from itertools import combinations, pairwise
from math import inf

import pytest
from manifests import replaced
from omegaconf import OmegaConf

from analysis.exhibits.figures.own import turning
from analysis.exhibits.figures.own.turning import LEVELS, Turn, lead, turns
from analysis.records.experiments import Experiments, MissingRuns
from rpbench.places import CONF

THREE = ("order", "hops", "memory")


def test_a_pair_turns_where_the_one_ahead_falls_behind():
    found = list(turns({"a": (1.0, 3.0, 3.0), "b": (2.0, 2.0, 2.0)}, THREE))
    assert found == [Turn("a", "b", "hops", 1.0, 0.5)]  # b took twice a's time; then a takes 3 / 2 of b's


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1.0, 1.0, 1.0), (2.0, 1.5, 1.1)),  # the lead shrinks
        ((1.0, 1.0, 1.0), (2.0, 1.0, 1.1)),  # equal for a while
        ((1.0, 1.0, 1.0), (2.0, 2.0, inf)),  # who is behind goes out
        ((1.0, 1.0, inf), (2.0, 2.0, inf)),  # both go out
        ((2.0, 2.0, 2.0), (2.0, 2.0, 2.0)),  # never apart
    ],
)
def test_what_is_no_turn(first, second):
    assert list(turns({"a": first, "b": second}, THREE)) == []


def test_who_goes_out_loses_its_lead_to_everybody_left():
    (found,) = turns({"a": (1.0, 1.0, inf), "b": (1.25, 1.25, 1.25)}, THREE)
    assert (found.first, found.second, found.level, found.before) == ("a", "b", "memory", 0.25)
    assert found.after == inf


def test_a_lead_over_nobody_is_refused():
    with pytest.raises(ValueError, match="neither is ahead"):
        lead(inf, inf)


# --- the exhibit, recomputed from the records ------------------------------------------------------------------


def test_places_are_the_order_of_the_records(full_experiments: Experiments) -> None:
    data = turning.numbers(full_experiments)
    for level, experiment in LEVELS.items():
        rows = full_experiments.cells(experiment)
        for (model, cluster), found in rows[rows["status"] == "ok"].groupby(["model", "cluster"]):
            own = data[(data["level"] == level) & (data["model"] == model) & (data["cluster"] == cluster)]
            ranked = own.dropna(subset="rank").sort_values("rank")["schedule"]
            assert list(ranked) == list(found.sort_values("step_time_s")["schedule"])


def test_every_change_of_order_in_the_records_is_a_row(full_experiments: Experiments) -> None:
    """Pairs of two levels in a row, straight from the records: a pair with another sign is a turn there."""
    due = set()
    times = {}
    for level, experiment in LEVELS.items():
        for row in full_experiments.cells(experiment).to_dict("records"):
            time = row["step_time_s"] if row["status"] == "ok" else inf
            times[level, row["model"], row["cluster"], row["schedule"]] = time
    places = {key[1:3] for key in times}
    names = {key[3] for key in times}
    for before, level in pairwise(LEVELS):
        for place in places:
            for one, other in combinations(sorted(names), 2):
                was = times[(before, *place, one)] < times[(before, *place, other)]
                now = times[(level, *place, one)] < times[(level, *place, other)]
                if was != now:
                    due.add((level, *place, frozenset((one, other))))
    data = turning.numbers(full_experiments)
    found = {(t.level, model, cluster, frozenset(t[:2])) for model, cluster, t in turning.found_turns(data)}
    assert found == due != set()
    kept = {frozenset(pair) for pair in turning.never(data)}
    assert kept.isdisjoint({key[3] for key in due})


def test_rings_stand_where_lines_cross():
    assert turning.crossing((1, 2), (2, 1)) == (0.5, 1.5)
    assert turning.crossing((1, 4), (2, 3)) == (0.5, 2.5)
    assert turning.crossing((1, float("nan")), (2, 1)) is None
    assert turning.crossing((1, 2), (2, 3)) is None


def test_a_level_that_was_not_run_is_named(full_experiments: Experiments) -> None:
    rows = full_experiments.cells("turning_halves")
    with pytest.raises(MissingRuns, match="experiment=turning_halves: qwen3_1p7b 8x_rtx4090 zb_h1"):
        turning.numbers(replaced(full_experiments, "turning_halves", rows[rows["schedule"] != "zb_h1"]))


# --- what the levels are ---------------------------------------------------------------------------------------


def test_each_level_charges_one_thing_more():
    files = [OmegaConf.load(CONF / "experiment" / f"{name}.yaml") for name in LEVELS.values()]
    steps = [_changed(before, after) for before, after in pairwise(files)]
    assert steps == [
        {"cluster.copy_bytes_per_s"},
        {"charge", "cluster.collective_bytes_per_s"},
        {"cluster.device_memory_bytes"},
        {"cost.split_penalty"},
        {"cluster.collective_bytes_per_s"},
    ]


def _changed(before, after) -> set[str]:
    first, second = _flat(before), _flat(after)
    return {key for key in first.keys() | second.keys() if first.get(key, "-") != second.get(key, "-")}


def _flat(node) -> dict[str, object]:
    found = {key: str(value) for key, value in node.items() if key not in ("cluster", "cost")}
    for group in ("cluster", "cost"):
        found |= {f"{group}.{key}": value for key, value in (node.get(group) or {}).items()}
    return found
