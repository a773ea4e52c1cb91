"""torch's CSV both ways: our files go through its loader, and its own schedules' files are read as ours."""

import csv
import io
import re
from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage
from torch_cases import FAITHFUL, schedule_near

from rpbench.ir.action import text
from rpbench.ir.schedule import ScheduleError, Shape, to_text
from rpbench.registry import entries
from rpbench.sim.longest_path import simulate
from rpbench.torch_runtime.formats.tables import from_csv, placement_of, read_schedule, to_csv
from rpbench.torch_runtime.lowering import lower
from rpbench.torch_runtime.versions import has_waits, load_runtime

# Torch's schedule -> ours of the same order, token for token; GPipe and 1F1B write no file.
OF_TORCH = {
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
}
GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


def mocked_stages(own, num_ranks, num_stages):
    """Stages without devices, as torch's own visualizer makes them."""
    found = []
    for index in own:
        stage = mock.create_autospec(PipelineStage, instance=True)
        stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, num_ranks, num_stages, None
        stage.stage_index = index
        found.append(stage)
    return found


def load(path, num_ranks, num_stages, num_microbatches, form="compute_only"):
    runtime = load_runtime()._PipelineScheduleRuntime(
        mocked_stages(range(num_stages // num_ranks), num_ranks, num_stages), num_microbatches
    )
    runtime._load_csv(str(path), format=form)
    return runtime


def tokens(row):
    """Rows as text: torch's containers have placeholders for fields."""
    return [str(action).replace("OVERLAP_F_B", "OVERLAP") for action in row]


def test_a_file_by_hand():
    """1F1B on two ranks, two microbatches, written down from its definition."""
    assert to_csv(entries()["1f1b"].build(Shape(2, 2, 2))) == GOOD
    assert from_csv(GOOD).placement == ((0,), (1,))


@pytest.mark.parametrize("name", FAITHFUL)
def test_torch_loads_what_we_write_and_orders_messages_so_that_pairs_agree(name, tmp_path):
    schedule = schedule_near(name, 4, 8)
    shape = schedule.shape
    (tmp_path / "rows.csv").write_text(to_csv(schedule))
    runtime = load(tmp_path / "rows.csv", shape.num_ranks, shape.num_stages, shape.num_microbatches)
    for rank in range(shape.num_ranks):
        assert tokens(runtime.pipeline_order[rank]) == list(map(text, schedule.compute(rank)))
    assert runtime.stage_index_to_group_rank == {
        stage: rank for rank, own in enumerate(placement_of(schedule)) for stage in own
    }
    (tmp_path / "lowered.csv").write_text(lower(schedule).to_csv(sharded=True, waits=has_waits()))
    load(tmp_path / "lowered.csv", shape.num_ranks, shape.num_stages, shape.num_microbatches, "compute_comms")


@pytest.mark.parametrize("theirs, ours", OF_TORCH.items())
def test_torchs_own_schedules_are_read_from_both_forms_of_file(theirs, ours, tmp_path):
    schedules = load_runtime()
    made = schedules.get_schedule_class(theirs)(mocked_stages((0, 7), 4, 8), 8, loss_fn=lambda *_: None)
    expected = entries()[ours].build(Shape(4, 8, 8))
    for form in ("compute_only", "compute_comms"):
        path = tmp_path / f"{form}.csv"
        made._dump_csv(str(path), format=form)
        found = from_csv(path.read_text())
        assert found.rows == expected.rows
        assert [sorted(own) for own in placement_of(found)] == placement_of(expected)


def test_either_form_of_file_is_read():
    schedule = entries()["zb_v"].build(Shape(2, 4, 4))
    assert read_schedule(to_text(schedule)) == schedule
    assert read_schedule(to_csv(schedule), "mine").rows == schedule.rows
    assert read_schedule(to_csv(schedule), "mine").name == "mine"
    with pytest.raises(ScheduleError, match="not a schedule: the first line"):
        read_schedule("# something else\n")


def test_a_read_schedule_is_simulated_and_written_again():
    found = from_csv(to_csv(entries()["zb_v"].build(Shape(4, 8, 8))))
    assert from_csv(to_csv(found)).rows == found.rows
    assert next(csv.reader(io.StringIO(to_csv(found))))[0] == "0F0"
    from rpbench.cost.constant import unit_times
    from rpbench.ir.partition import symmetric

    costs = unit_times(8).table(symmetric((1,) * 8))
    assert simulate(found, costs).makespan > 0


@pytest.mark.parametrize(
    "source, said",
    [
        (GOOD.replace("0F1,", ""), "0F1 is missing"),
        (GOOD.replace("1B1", "1B0"), "1B0 stands twice"),
        ("0F0," * 2**21, "a row of 8,388,608 letters; at most 4,194,304 are read"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0", "no rank can move"),
        ("0F0,0I0,0F1,0B1\n1F0,1B0,1F1,1B1", "0W0 is missing"),
        (GOOD.replace("0B1", "0B9"), "too few to run 10 microbatches"),
        (GOOD + "\n2F0junk", "row 3 (rank 2): '2F0junk' is no action"),
        (GOOD.replace("0F1", "(0F1)OVERLAP_F_B"), "'(0F1)OVERLAP_F_B' is no action"),
        (GOOD.replace("1F", "3F").replace("1B", "3B"), "stage 1 stands in no row"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1,0B1", "0B1 stands on rank 1, but stage 0 is placed on rank 0"),
        ("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1", "the last stage runs 1F0 after a later microbatch"),
        ("", "the file holds no action"),
        ("0SEND_F0\n1RECV_F0", "the file holds no action"),
    ],
)
def test_a_broken_file_gets_our_message(source, said):
    with pytest.raises(ScheduleError, match=re.escape(said)):
        from_csv(source)
