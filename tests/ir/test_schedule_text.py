"""Schedules as text files: exact both ways, and clear about what is wrong in a file."""

from dataclasses import replace

import pytest

from rpbench.ir import partition
from rpbench.ir.action import Action, Kind
from rpbench.ir.checks.check import check
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights, from_text, to_text
from rpbench.passes.lower import add_steps, lower_communication, split_backward
from rpbench.registry import entries
from rpbench.torch_runtime.formats.tables import to_csv

ONE_F_ONE_B = """\
# rpbench-schedule 1
# name=mine ranks=2 stages=2 backward_stages=2 microbatches=2 steps=1 parts=1 fused=0 policy=flush \
weights=bound placement=- partition=-
0/compute: 0F0 0F1 0B0 0B1
1/compute: 1F0 1B0 1F1 1B1
"""

HUGE = 10**400
WHOLE = ("ranks=2", " stages=2", "backward_stages=2", "microbatches=2", "steps=1", "parts=1", "placement=-")


def rows(first: str, second: str = "1F0 1B0 1F1 1B1") -> str:
    header = "\n".join(ONE_F_ONE_B.splitlines()[:2])
    return f"{header}\n0/compute: {first}\n1/compute: {second}\n"


def test_the_file_is_read():
    schedule = from_text(ONE_F_ONE_B)
    check(schedule)
    assert schedule.shape == Shape(2, 2, 2)
    assert schedule.name == "mine"
    assert schedule.compute(0) == tuple(
        Action(kind, 0, mb) for kind, mb in [(Kind.F, 0), (Kind.F, 1), (Kind.B, 0), (Kind.B, 1)]
    )
    assert to_text(schedule) == ONE_F_ONE_B


@pytest.mark.parametrize(
    "schedule",
    [
        add_steps(split_backward(entries()["interleaved_1f1b"].build(Shape(2, 4, 2, num_steps=2)))),
        lower_communication(entries()["1f1b"].build(Shape(3, 3, 4)), lane="net"),
        add_steps(
            replace(
                entries()["roundpipe"].build(Shape(3, 2, 3, 3, num_steps=2, fused=True)),
                policy=Policy.DELAYED,
            ).with_partition(partition.parse("2-2|2-2-0*"))
        ),
        replace(entries()["gpipe"].build(Shape(2, 2, 2)), placement=((0, 1), (1,)), weights=Weights.STREAMED),
        Schedule(Shape(2, 2, 1), ({}, {"net": ()})),
    ],
    ids=["steps", "net lane", "roundpipe", "placement", "empty"],
)
def test_round_trip_is_exact(schedule):
    assert from_text(to_text(schedule)) == schedule
    assert to_text(from_text(to_text(schedule))) == to_text(schedule)


@pytest.mark.parametrize(
    "source, said",
    [
        ("", "first line"),
        (ONE_F_ONE_B.replace("schedule 1", "schedule 2"), "first line must be '# rpbench-schedule 1'"),
        (ONE_F_ONE_B.replace("stages=2 ", "stage=2 ", 1), "no stages="),
        (ONE_F_ONE_B.replace("ranks=2", "ranks=02"), "read as"),
        (ONE_F_ONE_B.replace("ranks=2", "ranks=0"), "num_ranks=0"),
        (ONE_F_ONE_B.replace("ranks=2", "ranks=999999999"), "999999999 ranks but 2 rows"),
        (ONE_F_ONE_B.replace("fused=0", "fused=no"), "read as"),
        (ONE_F_ONE_B.replace("partition=-", "partition=- colour=red"), "read as"),
        (ONE_F_ONE_B.replace("flush", "flash"), r"line 2: .*policy=flash: one of flush, "),
        (ONE_F_ONE_B.replace("weights=bound", "weights=1"), r"line 2: .*weights=1: one of bound, "),
        (ONE_F_ONE_B.replace("flush", "selective"), "line 2: .*policy selective with late_rest=None: .* take both"),
        (ONE_F_ONE_B.replace("partition=-", "partition=- late_rest=0.1"), "line 2: .*late_rest=0.1: five numbers"),
        (ONE_F_ONE_B.replace("partition=-", f"partition=1-{2**64}"), "line 2: .*layers: at most 1,000,000"),
        (
            ONE_F_ONE_B.replace("partition=-", f"partition=1-{HUGE}"),
            r"line 2: .*1-1000.{,60} layers: at most 1,000,000",
        ),
        (ONE_F_ONE_B.replace("partition=-", f"partition=1-1|1-{HUGE}"), r"line 2: .* layers: at most 1,000,000"),
        (ONE_F_ONE_B.replace("partition=-", "partition=1-1-1"), "1-1-1 has 3 forward"),
        *(
            (ONE_F_ONE_B.replace(old, f"{old[:-1]}{HUGE}", 1), rf"{old[:-1].strip()}10{{39}}: .* at most 9 digits")
            for old in WHOLE
        ),
        *(
            (ONE_F_ONE_B.replace("partition=-", f"partition=- {key}={HUGE}"), rf"{key}=10{{39}}: .* at most 9 digits")
            for key in ("head_shards", "outer_replicas", "keeps_every")
        ),
        *(
            (
                ONE_F_ONE_B.replace("partition=-", f"partition=- late_rest={rule}"),
                rf"{key}=10{{39}}: .* at most 1,000,000: ",
            )
            for key, rule in (
                ("update_interval", f"0.1/{HUGE}/0/1/0"),
                ("select_interval", f"0.1/1/{HUGE}/1/0"),
                ("num_warmup_steps", f"0.1/1/0/1/{HUGE}"),
            )
        ),
        (ONE_F_ONE_B.replace("1/compute", "2/compute"), "line 4.*device below 2"),
        (ONE_F_ONE_B.replace("1/compute", "²/compute"), "line 4.*device below 2"),
        (ONE_F_ONE_B.replace("1/compute", "1/gpu"), "line 4.*lane one of compute"),
        (ONE_F_ONE_B.replace("1/compute", "0/compute"), "line 4: a second row for 0/compute"),
        (rows("0F0 0F1junk 0B0 0B1"), "line 3: bad token '0F1junk'"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(source, said):
    with pytest.raises(ScheduleError, match=said) as caught:
        from_text(source)
    assert len(str(caught.value).splitlines()) <= 8
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "source, said",
    [
        (rows("0F0 0F1 0F1 0B0 0B1"), "0F1 stands twice"),
        (rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "no rank can move"),
        (rows("0F0 0F1 0B0"), "0B1 is missing"),
        (ONE_F_ONE_B.replace("microbatches=2", "microbatches=9999999"), "rows hold 8 actions, too few"),
    ],
    ids=["duplicate", "cycle", "missing", "size"],
)
def test_a_file_that_can_be_read_but_not_run_is_refused_by_the_check(source, said):
    with pytest.raises(ScheduleError, match=said):
        check(from_text(source))


def test_torch_reads_the_compute_rows():
    assert to_csv(from_text(ONE_F_ONE_B)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"
    with pytest.raises(ScheduleError, match="its weights are streamed"):
        to_csv(entries()["roundpipe"].build(Shape(3, 2, 1, 3, fused=True)))
