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
