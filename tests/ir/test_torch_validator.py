"""What torch's own schedule validator lets pass, and this one does not.

Each case is a schedule that cannot run or does not mean what it says. Torch accepts it today; should a later
torch refuse one, its test fails here and tells so. Seen in torch 2.13.
"""

import re
from pathlib import Path
from unittest import mock

import pytest
from editing import schedule_of

from rpbench.ir.action import parse
from rpbench.ir.checks.check import check
from rpbench.ir.schedule import ScheduleError, Shape

try:
    from torch.distributed.pipelining.schedules import (
        _Action,
        _PipelineScheduleRuntime,
        _validate_schedule,
    )
    from torch.distributed.pipelining.stage import PipelineStage
except ImportError as error:  # a private interface: another torch may have moved it
    pytest.skip(f"torch's schedule validator is not where it was in 2.13: {error}", allow_module_level=True)


def torch_accepts(rows: tuple[str, ...], num_stages: int, num_microbatches: int) -> None:
    orders = {rank: [_Action.from_str(token) for token in row.split()] for rank, row in enumerate(rows)}
    _validate_schedule(orders, len(rows), num_stages, num_microbatches)


def test_both_refuse_a_missing_forward():
    """The calls are made right: torch does see what it looks for."""
    rows = ("0F0 0B0", "1F0 1B0 1F1 1B1")
    with pytest.raises(AssertionError, match=r"Got 1 .* microbatches for stage 0, expected 2"):
        torch_accepts(rows, 2, 2)
    with pytest.raises(ScheduleError, match="0F1 is missing"):
        check(schedule_of(*rows, shape=Shape(2, 2, 2)))


@pytest.mark.parametrize(
    "rows, num_microbatches, said",
    [
        (("0F0 0F0 0B0 0B0", "1F0 1B0"), 1, "0F0 stands twice"),
        (("0F7 0B7", "1F7 1B7"), 1, "0F7: microbatch 7 is out of range for F: 0 to 0"),
        (("0F0 0F1 0B0 0I0 0W0", "1F0 1F1 1B0 1B1"), 2, "0B0 and 0I0 and 0W0: B is I and W in one"),
        (("0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1"), 2, "no rank can move"),
    ],
    ids=["duplicates", "wrong microbatch", "both backward forms while another has none", "cycle"],
)
def test_torch_accepts_what_cannot_run(rows, num_microbatches, said):
    torch_accepts(rows, 2, num_microbatches)
    with pytest.raises(ScheduleError, match=re.escape(said)):
        check(schedule_of(*rows, shape=Shape(2, 2, num_microbatches)))


def runtime(num_ranks: int, num_microbatches: int) -> _PipelineScheduleRuntime:
    """Torch's runtime for one stage a rank, without devices: its own visualizer mocks stages the same way."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, num_ranks, num_ranks, None
    return _PipelineScheduleRuntime([stage], num_microbatches)


def test_torch_loads_a_file_with_communication_that_has_none(tmp_path: Path):
    rows = ("0F0 0B0", "1F0 1B0")
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join(row.replace(" ", ",") for row in rows) + "\n")
    loaded = runtime(2, 1)
    loaded._load_csv(str(path), format="compute_comms")
    assert [str(action) for action in loaded.pipeline_order_with_comms[0]] == ["0F0", "0B0"]
    with pytest.raises(ScheduleError, match="1SEND_B0>0 is missing: 0B0 on rank 0 uses what 1B0 makes on rank 1"):
        check(schedule_of(*rows), rendezvous=True)


def test_torch_reads_the_beginning_of_a_token():
    assert str(_Action.from_str("1F0junk")) == "1F0"
    with pytest.raises(ValueError, match="bad token '1F0junk'"):
        parse("1F0junk")
