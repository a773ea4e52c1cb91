"""Orders in files: what they are charged beside the run that is named."""

import pytest

from rpbench.cli import dispatch

SUBJECT = (
    "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=analytic", "num_devices=4", "num_microbatches=8",
    "cluster.device_memory_bytes=40000000000",
)  # fmt: skip


@pytest.fixture
def show(capsys, tmp_path):
    """Writes what `show` prints to a file of this name."""

    def write(name, *words):
        assert dispatch(("show", *words)) == 0
        (tmp_path / name).write_text(capsys.readouterr().out)

    return write


@pytest.mark.parametrize(
    "method",
    [
        ("seq1f1b", "schedule.num_segments=4"),
        ("megatron_tp", "schedule.sequence_parallel=true"),
        ("superoffload", "schedule.gather_each_visit=false"),
        ("superoffload", "schedule.gather_each_visit=true"),
    ],
)
def test_kernels_take_as_long_in_a_file_as_under_the_option_that_it_was_written_with(method, rpbench, show):
    name, option = method
    show("order.txt", f"schedule={name}", option, *SUBJECT, "charge=bytes")
    _, (named,), _ = rpbench(f"schedule={name}", option, *SUBJECT)
    _, (found,), _ = rpbench("schedule_file=order.txt", *SUBJECT)
    for key in ("makespan_s", "busy_s", "peak_memory_bytes", "evidence"):
        assert found[key] == named[key], key


def test_segments_of_an_order_without_a_known_name_are_counted_too(rpbench, show, tmp_path):
    show("order.txt", "schedule=seq1f1b", *SUBJECT)
    text = (tmp_path / "order.txt").read_text()
    (tmp_path / "own.txt").write_text(text.replace("name=seq1f1b", "name=own"))
    _, (named,), _ = rpbench("schedule=seq1f1b", *SUBJECT)
    _, (found,), _ = rpbench("schedule_file=own.txt", *SUBJECT)
    assert found["makespan_s"] == named["makespan_s"]


def test_a_file_has_no_more_ranks_than_the_machine_has_devices(rpbench, show):
    show("order.txt", "schedule=gpipe", "num_devices=16", "num_microbatches=8", "model=qwen3_1p7b")
    status, rows, err = rpbench("schedule_file=order.txt", *SUBJECT[:3], "num_microbatches=8")
    assert (status, rows) == (2, [])
    assert "schedule_file=order.txt: ranks=16: cluster 8x_rtx4090 has 8" in err


def test_boundary_tensors_between_moved_stages_take_time(rpbench, show):
    """`offload=weights` leaves them to hops; in bytes they would take none."""
    show("order.txt", "schedule=roundpipe", "offload=weights", "charge=hops", *SUBJECT)
    _, (named,), _ = rpbench("schedule=roundpipe", "offload=weights", "charge=hops", *SUBJECT)
    _, (found,), _ = rpbench("schedule_file=order.txt", "charge=hops", *SUBJECT)
    assert found["makespan_s"] == named["makespan_s"]
    status, rows, err = rpbench("schedule_file=order.txt", *SUBJECT)
    assert (status, rows) == (2, [])
    assert "charge=bytes: schedule_file=order.txt: it moves weights, and not the boundary tensors" in err


@pytest.mark.parametrize("name", ["bpipe", "pipe_offload"])
def test_activations_that_a_schedule_moves_by_itself_take_time_under_hops(name, rpbench, show):
    """What `offload=` says of other schedules changes neither them nor the hops between their stages."""
    subject = (*SUBJECT[:2], *SUBJECT[3:], "cost=constant", "cost.hop_ms=0.1")
    show("order.txt", f"schedule={name}", *subject)
    found = [rpbench(f"schedule={name}", offload, *subject)[1][0] for offload in ("offload=none", "offload=auto")]
    found += rpbench("schedule_file=order.txt", *subject)[1]
    for key in ("makespan_s", "comm_data_s", "transfer_exposed_s"):
        assert len({row[key] for row in found}) == 1, key
    assert found[0]["transfer_exposed_s"] > 0
