"""What a table of torch's runtime can hold; every other schedule is refused by the name of what is in the way."""

import re

import pytest
from nearby import nearby
from torch_cases import FAITHFUL, LATER, REFUSED, TWO_WAY

from rpbench.ir.action import parse
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights
from rpbench.registry import entries
from rpbench.torch_runtime.formats.tables import make_table
from rpbench.torch_runtime.lowering import lower


def build(name):
    p, v, m = nearby(name, 4, entries()[name].chunks or 2, 8)
    return entries()[name].build(Shape(p, p * v, m))


def rows(*texts, microbatches=2, **fields):
    found = tuple(tuple(map(parse, text.split())) for text in texts)
    return Schedule(Shape(len(texts), len(texts), microbatches), found, name="mine", **fields)


@pytest.mark.parametrize("said, name", [(said, name) for said, names in REFUSED.items() for name in names.split()])
def test_what_torch_would_run_as_something_else_is_refused(said, name):
    for refuse in (make_table, lower):
        with pytest.raises(ScheduleError, match=f"schedule={name}: .*{re.escape(said)}"):
            refuse(build(name))


@pytest.mark.parametrize("name", [*FAITHFUL, *LATER])
def test_the_others_keep_every_action(name):
    schedule = build(name)
    assert make_table(schedule).rows == schedule.rows


@pytest.mark.parametrize("name", TWO_WAY)
def test_two_copies_go_to_our_runner_and_into_no_file(name):
    assert make_table(build(name), two_way=True).num_actions == build(name).num_actions
    with pytest.raises(
        ScheduleError, match=r"stage 0 has copies on ranks 0 and 3, a table has one rank for each stage"
    ):
        make_table(build(name))


def test_steps_leave_the_rows():
    table = make_table(rows("0F0 0F1 0B0 0B1 0STEP@1", "1F0 1B0 1F1 1B1 1STEP@1"))
    assert [len(table.compute(rank)) for rank in (0, 1)] == [4, 4]


@pytest.mark.parametrize(
    "schedule, said",
    [
        (rows("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0"), "the last stage runs 1F0 after a later microbatch"),
        (rows("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", policy=Policy.STASH), "policy stash is asynchronous"),
        (rows("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", weights=Weights.STREAMED), "weights are streamed"),
        (rows("0F0 0R0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"), "0R0 has no token"),
        (rows("0F0 0SEND_F0>1 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"), "0SEND_F0>1 has no token"),
        (rows("(0F0;0F1)OVERLAP 0B0 0B1", "1F0 1B0 1F1 1B1"), "overlaps one forward with one backward"),
        (rows("0F0 0B0", "1F0 1B0 1F1 1B1"), "0F1 is missing"),
    ],
    ids=["last stage", "policy", "streamed", "recompute", "messages", "overlap", "missing"],
)
def test_reasons(schedule, said):
    with pytest.raises(ScheduleError, match=re.escape(said)):
        make_table(schedule)


def test_several_steps_are_one_table_repeated():
    shape = Shape(2, 2, 2, num_steps=2)
    schedule = entries()["1f1b"].build(shape)
    with pytest.raises(ScheduleError, match="it holds 2 optimizer steps, a table holds one"):
        make_table(schedule)


def test_directions_of_unequal_length_are_refused():
    down, up = "0F0 0F1 1F2 1B2 0B0 0B1", "0F2 1F0 1F1 1B0 1B1 0B2"
    with pytest.raises(ScheduleError, match="its two directions have 2 and 1 microbatches"):
        make_table(rows(down, up, microbatches=3), two_way=True)
