"""Workers of one command: a cell is run, and its record printed, by one of them."""

from functools import partial

import pytest

from rpbench.records.manifest import Ends, read_manifest, write_plan
from rpbench.sweep.worker import Terms, Worker

CELLS = [("schedule=gpipe", f"num_microbatches={number}", "num_devices=2", "cost=unit") for number in (2, 4, 8)]


@pytest.mark.parametrize("again", [frozenset(), frozenset({"planned"})])
def test_what_one_worker_has_run_another_does_not_run_again(again, tmp_path):
    plan, done = write_plan(tmp_path, None, (), CELLS), []

    def carry_out(who, request, journal):
        done.append((who, request.num_microbatches))
        journal.ended([{"run_id": f"run{request.num_microbatches}", "status": "ok", "reason": None}])
        if len(done) == 1:  # another worker of the command runs all the rest meanwhile
            Worker(tmp_path, plan, cells(1, 2, 0), Terms(again=again), partial(carry_out, "second")).work()

    def cells(*numbers):
        return {number: CELLS[number] for number in numbers}

    Worker(tmp_path, plan, cells(0, 1, 2), Terms(again=again), partial(carry_out, "first")).work()
    assert done == [("first", 2), ("second", 4), ("second", 8)]
    assert [cell.state for cell in read_manifest(tmp_path, plan.name).cells] == ["done"] * 3
    assert all(number in Ends(tmp_path, plan) for number in range(3))
