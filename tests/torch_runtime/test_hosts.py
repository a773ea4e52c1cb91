"""The command of each host."""

import pytest

from rpbench.sweep.slurm import torchrun_of_task


def test_tasks_of_a_job_meet_at_its_first_host():
    tasks = [torchrun_of_task(["n7", "n9"], node, "31415", 8, ["schedule=zb_v"]) for node in (0, 1)]
    for node, task in enumerate(tasks):
        assert task[:3] == ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=8"]
        assert f"--node-rank={node}" in task
        assert "--rdzv-endpoint=n7:31415" in task
        assert task[-3:] == ["-m", "rpbench", "schedule=zb_v"]


def test_jobs_on_one_host_meet_on_ports_of_their_own():
    ends = {torchrun_of_task(["n7"], 0, job, 2, ())[5] for job in ("100_0", "100_1", "101")}
    assert len(ends) == 3


@pytest.mark.parametrize("node, ranks, said", [(2, 4, "node_rank=2: the job has 2 hosts"), (0, 0, "ranks_per_host=0")])
def test_what_cannot_be(node, ranks, said):
    with pytest.raises(ValueError, match=said):
        torchrun_of_task(["a", "b"], node, "1", ranks, ())
