"""Claims about tables on torch's runtime: what refutes them, what does not, and that a falsified record is seen."""

import pytest
from torch_duel_rows import rows

from analysis.claims.claim import CONTRADICTED, FAILED, REPRODUCED, judge
from analysis.claims.own import torch_duel
from analysis.exhibits.tables import torch_duel as exhibit


class Stand:
    """Experiments that hold the records of one torch duel."""

    def __init__(self, found):
        self.found = found

    def find(self, experiment, choices, contender=None):
        return self.found[contender] if experiment == "torch_duel" else None


def verdicts(found):
    return {claim.id.removeprefix("torch_duel/"): judge(claim, Stand(found)) for claim in torch_duel.claims()}


def kinds(found):
    return {name: verdict.kind for name, verdict in verdicts(found).items()}


def test_equal_times_hold_on_a_quiet_and_on_a_busy_machine():
    for others in (0.0, 0.5):
        assert set(kinds(rows(others=others)).values()) == {REPRODUCED}


@pytest.mark.parametrize("others", [0.0, 0.5])
def test_a_table_that_costs_a_tenth_more_is_contradicted(others):
    found = kinds(rows({"zb_v/table": 1.1}, others=others))
    assert found.pop("zb_v/cost") == CONTRADICTED
    assert set(found.values()) == {REPRODUCED}


def test_a_graph_that_explains_too_little_is_contradicted():
    found = rows()
    for runs in found["1f1b/table"]["runs"]:
        runs["replay_s"] = [0.8 * wall for wall in runs["wall_s"]]
    for name, fields in torch_duel.derived_fields(found).items():
        found[name] |= fields
    judged = kinds(found)
    assert judged["1f1b/replay"] == CONTRADICTED
    assert judged["zb_v/replay"] == REPRODUCED


def test_one_wrong_bit_of_a_gradient_is_contradicted():
    found = rows()
    found["zb_v/threads"]["grad_max_abs_diff"] = 1e-17
    assert kinds(found)["zb_v/parity"] == CONTRADICTED


@pytest.mark.parametrize("field", ["over_own", "replay_over_wall_low", "verdict", "overhead_per_action_s"])
def test_a_figure_that_its_runs_do_not_give_is_contradicted(field):
    found = rows()
    value = found["1f1b/table"][field]
    found["1f1b/table"][field] = "faster" if isinstance(value, str) else 0.97 * value
    judged = verdicts(found)["1f1b/figures"]
    assert judged.kind == CONTRADICTED
    assert judged.value == f"1f1b/table {field}"


def test_nothing_measured_is_no_pass():
    found = rows()
    found["1f1b/table"] |= {"over_own": None, "over_own_disturbed": None, "over_own_disturbed_low": None}
    judged = verdicts(found)["1f1b/cost"]
    assert judged.kind == FAILED
    assert "1f1b/table: no interval of over_own_disturbed" in judged.reason


def test_the_table_shows_everybody_and_says_why_there_is_no_verdict():
    found = list(rows(others=0.5).values())
    table = exhibit.tabulate(found)
    assert [row[1].text for row in table.rows] == [exhibit.NAMES[row["role"]] for row in found]
    place = table.columns.index("verdict by the clock")
    assert all("clean comparisons of at least 30" in row[place].text for row in table.rows)
    assert "disturbed runs included" in exhibit.answer(found)
    found[2] |= {"status": "failed", "reason": "it does not train as plain training does: off by 1"}
    assert "failed, it does not train" in exhibit.answer(found)
    assert "failed: it does not train" in exhibit.tabulate(found).rows[2][3].text
