"""Validation: the weights that the optimizer has after an update are those whose loss on unseen text is recorded."""

import pytest

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.run.modes.train import check_request
from rpbench.run.recording import run
from rpbench.run.scheduled import assembled_of

SMALL = ("experiment=convergence_study", "model.num_layers=2", "num_devices=2", "model.hidden=16", "model.seq_len=16")


def curve(tmp_path, *overrides):
    (row,) = run(load([*SMALL, f"results_dir={tmp_path}", *overrides]))
    assert row["status"] == "ok", row["reason"]
    return row["validation_updates"], row["validation_curve"]


def test_a_run_that_stops_earlier_ends_with_the_same_validation(tmp_path):
    """At a constant rate the first steps do not know how many will follow; steps by microbatch count fourfold."""
    for name, updates in (("1f1b", [2, 4]), ("pipedream", [8, 16])):
        long, short = (
            curve(tmp_path, f"schedule={name}", "workload.validate_every=2", f"num_steps={num}") for num in (4, 2)
        )
        assert long[0] == updates
        assert short == (long[0][:1], long[1][:1])
        assert long[1][1] < long[1][0], "something is learnt"


def test_nothing_is_learnt_at_rate_0(tmp_path):
    _, losses = curve(
        tmp_path, "schedule=gpipe", "workload.validate_every=1", "num_steps=2", "optimizer.learning_rate=0"
    )
    assert losses[0] == losses[1] == pytest.approx(5.55, abs=0.15), "log(256), about"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("num_steps=2000", "if none is to be read twice"),
        ("backend=cpu", "backend=cpu validates nothing"),
        ("workload.held_out=1", "from 0 to below 1"),
        ("workload.validate_every=0", "validate_every=0"),
    ],
)
def test_what_cannot_be_validated_is_refused(override, reason):
    with pytest.raises(ConfigError, match=reason):
        _checked(override)


def _checked(override):
    request = load([*SMALL, override])
    check_request(request, assembled_of(request))
