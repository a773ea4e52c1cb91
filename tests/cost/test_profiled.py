"""Profiles: layer times as a file."""

import pytest

from rpbench.cost.profiled import from_text, read_profile, to_text
from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind
from rpbench.ir.partition import parse

TIMES = LayerTimes((0.1, 0.2), (0.1, 0.3), (0.25, 1 / 3), 0.5, 0.125, step=(0.01, 0.02), head_step=0.04)


def test_a_profile_is_read_back_exactly(tmp_path):
    assert from_text(to_text(TIMES)) == TIMES
    (tmp_path / "profile.json").write_text(to_text(TIMES))
    assert read_profile(tmp_path / "profile.json") == TIMES


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema": "other"}', '{"schema": "rpbench-profile 1", "x": 1}']
)
def test_what_is_no_profile_is_refused(text, tmp_path):
    with pytest.raises(ValueError):  # noqa: PT011  what is wrong with it differs
        from_text(text)
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ValueError, match=r"cost\.profile=.*profile\.json: .*; leave it null to measure anew"):
        read_profile(tmp_path / "profile.json")


def test_steps_are_summed_over_a_stage_and_the_head_belongs_to_the_last():
    table = TIMES.table(parse("1|1-1*"))
    assert [table.of(Kind.STEP, stage).main for stage in range(2)] == [0.01, pytest.approx(0.02 + 0.04)]
    unknown = LayerTimes([1.0], [1.0], [1.0]).table(parse("1"))
    assert unknown.of(Kind.STEP, 0).main == 0
