"""The convergence study: the same budget for everybody, the least loss wins, seeds and tokens as the curves say."""

import csv

import pytest

from analysis.driver import convergence_study as study
from analysis.driver.convergence_study import Study, check_same, goal_of, interval, tokens_to

LEARNING_RATE = "optimizer.learning_rate="


def row(losses, *, per_update=10, each=1, status="ok"):
    """A record whose validations stand at every `each` updates."""
    return {
        "status": status,
        "validation_curve": losses,
        "validation_updates": [each * (place + 1) for place in range(len(losses))],
        "tokens_per_step": per_update,
        "num_updates": each * len(losses),
        "staleness_steps": 1,
    }


def rate_of(overrides):
    return float(overrides[0].removeprefix(LEARNING_RATE))


def test_everybody_has_the_same_draws_and_every_part_of_a_range_is_drawn_from():
    asked = Study(budget=8)
    gpipe, late, own = (list(asked.settings(name)) for name in ("gpipe", "xpipe", "pipemare_t1_t2_t3"))
    assert gpipe == late
    assert [found[0] for found in own] == [found[0] for found in gpipe]
    rates = sorted(map(rate_of, gpipe))
    low, high = study.LEARNING_RATES
    edges = [low * (high / low) ** (k / 8) for k in range(9)]
    assert all(edges[k] * 0.999 <= rate <= edges[k + 1] * 1.001 for k, rate in enumerate(rates))
    assert {override.partition("=")[0] for override in own[0][2:]} == {
        f"schedule.{name}" for name in study.OWN["pipemare_t1_t2_t3"]
    }


def test_a_method_that_steps_four_times_as_often_warms_up_over_as_many_tokens():
    asked = Study(budget=4, num_steps=100)
    warm_up = {
        name: [int(found[1].partition("=")[2]) for found in asked.settings(name)] for name in ("gpipe", "pipedream")
    }
    for batch, microbatch in zip(*warm_up.values(), strict=True):
        assert abs(microbatch - 4 * batch) <= 2


def test_tokens_to_a_loss_lie_on_straight_lines_between_validations():
    found = row([5.0, 4.0, 3.0])
    assert tokens_to(found, 3.5) == 25
    assert tokens_to(found, 5.5) == 10
    assert tokens_to(found, 2.9) is None
    assert tokens_to(row([1.0], status="failed"), 3.0) is None
    assert goal_of([row([5.0, 4.0, 3.0, 2.0]), row([5.0, 4.0, 3.2, 2.0])]) == pytest.approx(3.1)


def test_an_interval_over_five_seeds_is_student_s():
    centre, low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert centre == 3
    assert high - centre == pytest.approx(2.7764 * (2.5**0.5) / 5**0.5, rel=1e-4)
    assert low + high == pytest.approx(6)


def test_synchronous_methods_must_agree():
    same = {"gpipe": [row([3.0, 2.0])], "roundpipe": [row([3.0, 2.0001])]}
    assert check_same(same) == pytest.approx(1e-4)
    with pytest.raises(RuntimeError, match=r"synchronous methods differ by 0\.1"):
        check_same(same | {"1f1b": [row([3.1, 2.0])]})


def test_the_least_loss_wins_and_the_seeds_are_others(tmp_path, monkeypatch):
    """Losses fall towards a learning rate of 0.003, a late method learns half as fast, and one run breaks."""
    asked_for = []

    def run(self, method, overrides, seed):
        asked_for.append((method, seed))
        off = abs(rate_of(overrides) / 0.003 - 1)
        if rate_of(overrides) > 0.02:
            return row([1.0], status="failed")
        pace = 0.5 if method == "xpipe" else 1.0
        return row([5 - pace * step + off + 0.01 * seed for step in (1, 2, 3, 4)])

    monkeypatch.setattr(Study, "run", run)
    out = tmp_path / "study.csv"
    asked = Study(budget=6, num_seeds=3)
    study.study(asked, out, ("gpipe", "roundpipe", "xpipe"), "the command")
    assert [method for method, seed in asked_for if seed == 0] == ["gpipe"] * 6 + ["xpipe"] * 6
    assert [seed for method, seed in asked_for if method == "roundpipe"] == [1, 2, 3]
    gpipe, roundpipe, xpipe = csv.DictReader(out.open())
    best = min(map(rate_of, asked.settings("gpipe")), key=lambda rate: abs(rate / 0.003 - 1))
    assert rate_of(gpipe["settings"].split()) == best
    assert gpipe["final_loss"] == roundpipe["final_loss"]
    assert float(xpipe["final_loss"]) > float(gpipe["final_loss"])
    assert (gpipe["seeds_at_goal"], xpipe["seeds_at_goal"], xpipe["tokens_to_goal"]) == ("3", "0", "")
    assert xpipe["command"] == "the command"


@pytest.mark.parametrize(
    ("methods", "words"), [("xpipe", "add one"), ("gpipe,unknown", "unknown: there are gpipe"), ("", "there are gpipe")]
)
def test_methods_that_make_no_study_are_refused_before_a_run(methods, words, capsys, monkeypatch):
    monkeypatch.setattr(study, "study", lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit) as end:
        study.main(["--methods", methods])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_the_kept_table_is_whole_and_the_page_shows_it():
    with study.OUT.open(newline="", encoding="utf-8") as source:
        rows = list(csv.DictReader(source))
    assert [row["method"] for row in rows] == [*study.SYNCHRONOUS, *study.LATE]
    assert all(row["seeds"] == "5" and row["command"].startswith("python -m analysis.driver") for row in rows)
    assert study.markdown() in (study.ROOT / "docs" / "convergence.md").read_text(encoding="utf-8")
