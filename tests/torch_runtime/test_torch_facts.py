"""Versions of torch: facts are as its files have them, rows have the waits that each needs; and torch's liveness."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.pipelining as pipelining
from test_torch_csv import load
from torch_cases import FAITHFUL, LATER, TWO_WAY, schedule_near

from rpbench.sim.graph import build_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.torch_runtime import versions
from rpbench.torch_runtime.communication.execution import Queues
from rpbench.torch_runtime.communication.settings import with_reduction_waits, with_send_waits
from rpbench.torch_runtime.communication.tokens import read_table, read_token
from rpbench.torch_runtime.communication.verdict import judge
from rpbench.torch_runtime.formats.tables import placement_of
from rpbench.torch_runtime.lowering import lower
from rpbench.torch_runtime.versions import has_waits, newer_note, number_of
from tests import torch_versions


def sources():
    folder = Path(pipelining.__file__).parent
    return [(folder / f"{name}.py").read_text() for name in ("schedules", "stage")]


def test_this_torch_is_as_its_facts_say():
    assert torch_versions.differences(torch.__version__, *sources()) == []


def test_other_facts_are_seen():
    schedules, stage = sources()
    assert "settings is ('defer_pp_recv',), the facts have ()" in torch_versions.differences(
        "2.12.0",
        "class _PipelineScheduleRuntime:\n"
        "    def __init__(self, **kwargs):\n        kwargs.pop('defer_pp_recv', False)\n"
        "class _ComputationType:\n    F = 1\n",
        "",
    )
    gone = re.sub(r"def _load_csv\(", "def _load_rows(", schedules)
    assert "_load_csv is gone" in torch_versions.differences(torch.__version__, gone, stage)
    other = "2.13.0" if has_waits() else "2.15.0"
    assert any(line.startswith("has_waits is") for line in torch_versions.differences(other, schedules, stage))


def test_versions_are_read_and_the_old_ones_refused():
    assert number_of("2.15.0+cu132") == (2, 15)
    assert not has_waits("2.14.1+cpu")
    with pytest.raises(ValueError, match=r"torch 2\.9\.1 is older than 2\.11; take torch 2\.11 to 2\.15"):
        has_waits("2.9.1")


def test_a_newer_torch_is_tried_and_says_so_beside_its_error(monkeypatch):
    assert has_waits("2.16.0")
    assert newer_note("2.16.0") == (
        "torch 2.16.0 is newer than 2.15, the newest its tables were tried with; take torch 2.11 to 2.15, or "
        "backend=cpu"
    )
    assert newer_note("2.15.3") == ""
    monkeypatch.setattr(versions, "NEEDED", (*versions.NEEDED, "_moved_away"))
    versions.load_runtime.cache_clear()
    with pytest.raises(ValueError, match=rf"torch {re.escape(torch.__version__)} has no _moved_away in torch\.distr"):
        versions.load_runtime()
    monkeypatch.undo()
    versions.load_runtime.cache_clear()


def waiting(row):
    tokens = [read_token(cell, 0) for cell in row.split(",")]
    return ",".join(map(str, with_send_waits(with_reduction_waits(tokens))))


def test_waits_by_hand():
    """A forward's send after its backward, a backward's at the end, a reduction's at once; pairs count as both."""
    assert waiting("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD") == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD,0RESHARD"
    )
    assert waiting("1F0,1SEND_F0,(1F1;1I0)OVERLAP_F_B,1SEND_F1,1SEND_B0,1W0,1I1,1SEND_B1,1W1") == (
        "1F0,1SEND_F0,(1F1;1I0)OVERLAP_F_B,1WAIT_SEND_F0,1SEND_F1,1SEND_B0,1W0,1I1,1WAIT_SEND_F1,1SEND_B1,1W1,"
        "1WAIT_SEND_B0,1WAIT_SEND_B1"
    )


@pytest.mark.parametrize("name", [*FAITHFUL, *LATER, *TWO_WAY])
def test_every_send_and_reduction_has_a_wait_and_none_is_for_good(name):
    schedule = schedule_near(name, 4, 8)
    lowered = lower(schedule)
    plain, waiting = lowered.to_csv(sharded=True), lowered.to_csv(sharded=True, waits=True)
    assert len(re.findall("WAIT_SEND", waiting)) == len(re.findall("SEND_", plain))
    assert len(re.findall("WAIT_REDUCE", waiting)) == len(re.findall("REDUCE", plain))
    assert re.sub(r",\d+WAIT_[A-Z_]*\d*", "", waiting) == plain
    table = read_table(waiting, schedule.shape.num_stages)
    assert {judge(table, queues).verdict for queues in Queues} == {"alive"}


@pytest.mark.parametrize("name", [*FAITHFUL, *LATER])
def test_torchs_liveness_counts_as_many_activations_as_we_do(name, tmp_path):
    """A second opinion on activations in flight, where torch has one (2.15)."""
    if number_of(torch.__version__) < (2, 15):
        pytest.skip("this torch has no analysis of liveness")
    for num_ranks, num_microbatches in ((2, 4), (4, 8), (4, 12)):
        schedule = schedule_near(name, num_ranks, num_microbatches)
        shape = schedule.shape
        (tmp_path / "rows.csv").write_text(lower(schedule).to_csv(sharded=True, waits=True))
        runtime = load(
            tmp_path / "rows.csv", shape.num_ranks, shape.num_stages, shape.num_microbatches, "compute_comms"
        )
        found = [
            pipelining.analyze_pipeline_activation_liveness(
                runtime, pp_rank=rank, stage_indices=own, granularity="stage_microbatch"
            ).num_slots
            for rank, own in enumerate(placement_of(schedule))
        ]
        assert found == peak_in_flight(build_graph(schedule))


def test_the_kept_table_has_every_schedule_and_no_difference():
    """What it does not have it says; the version that is installed by default is whole."""
    kept = torch_versions.PAGE.read_text().split(torch_versions.BEGIN)[1].split(torch_versions.END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in kept.splitlines() if line.startswith("| ")]
    asked = [*FAITHFUL, *LATER, *TWO_WAY]
    assert [row[0] for row in rows[2:]] == [name for name in asked if name in {row[0] for row in rows}]
    assert {*FAITHFUL, *TWO_WAY} <= {row[0] for row in rows}
    columns = list(zip(*rows, strict=True))[1:]
    assert {cell for column in columns for cell in column[2:]} <= {"0", "not run"}
    assert [set(column[2:]) for column in columns if number_of(column[0].split(",")[0]) == (2, 13)] == [{"0"}] * 2
