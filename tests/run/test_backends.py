"""Backends behind the command line: the same schedule simulated, on a virtual clock, on threads, emulated."""

import pytest
from spared import slow

SIZES = ("model=tiny_gpt", "num_devices=5", "num_microbatches=10", "seed=3")


@pytest.mark.parametrize("backend, evidence", [slow(("virtual", "simulated")), ("cpu", "measured")])
@pytest.mark.parametrize("dtype", ["float64", slow("float32")])
def test_roundpipe_trains_as_plain_training_does_bit_for_bit(backend, evidence, dtype, rpbench):
    status, (row,), _ = rpbench("schedule=roundpipe", f"backend={backend}", "verify=true", f"dtype={dtype}", *SIZES)
    assert status == 0
    assert (row["evidence"], row["status"]) == (evidence, "ok")
    assert row["grad_max_abs_diff"] == 0.0
    assert 5 < row["loss"] < 6.5  # random weights over 256 tokens: about log(256) = 5.55


def test_the_virtual_clock_tells_the_simulators_time(rpbench):
    asked = ("schedule=1f1b", "cost=constant", *SIZES)
    rows = {"virtual": rpbench("backend=virtual", *asked)[1][0], "sim": rpbench(*asked)[1][0]}
    sequences, tokens = rows["sim"]["config"]["workload"]["microbatch_sequences"], 16
    assert rows["virtual"]["tokens_per_step"] == 10 * sequences * tokens
    assert rows["virtual"]["tokens_per_s"] == pytest.approx(10 * sequences * tokens / rows["sim"]["step_time_s"])
    for key in ("makespan_s", "bubble_makespan", "fill_s", "drain_s", "comm_exposed_s"):
        assert rows["virtual"][key] == pytest.approx(rows["sim"][key], abs=1e-9)


def test_real_time_carries_its_replay_and_what_else_ran(rpbench):
    _, (row,), _ = rpbench("schedule=1f1b", "backend=cpu", *SIZES)
    assert row["replay_makespan_s"] > 0
    assert row["foreign_cpu_share"] >= 0


def test_emulated_devices_take_about_the_modelled_time(rpbench):
    costs = ("cost=constant", "cost.forward_ms=5", "cost.input_grad_ms=5", "cost.weight_grad_ms=5")
    sizes = ("schedule=1f1b", "num_devices=4", "num_microbatches=8", *costs)
    simulated, emulated = (rpbench(*backend, *sizes)[1][0] for backend in ((), ("backend=emulated",)))
    assert emulated["evidence"] == "emulated"
    assert emulated["makespan_s"] >= simulated["makespan_s"]  # a sleep is never shorter


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["backend=cpu"], "take one with a shape"),
        (["backend=virtual", "model=tiny_gpt", "dtype=float12"], "dtype=float12"),
        (["backend=emulated", "backend.time_scale=0"], "backend.time_scale=0"),
        (["backend=gpu"], "unknown backend 'gpu'"),
    ],
    ids=["model", "dtype", "scale", "name"],
)
def test_what_a_backend_cannot_run_is_refused_before_anything_is_written(arguments, expected, rpbench, tmp_path):
    status, rows, err = rpbench(*arguments)
    assert (status, rows) == (2, [])
    assert expected in err
    assert not list(tmp_path.rglob("events.jsonl"))


@pytest.mark.parametrize("backend", ["virtual", slow("cpu")])
def test_float16_tells_its_last_scale_and_the_steps_it_skipped(backend, rpbench):
    status, (row,), _ = rpbench(
        "schedule=roundpipe",
        "schedule.asynchronous=true",
        f"backend={backend}",
        "optimizer.loss_scale=1048576",
        "dtype=float16",
        "verify=true",
        "model=tiny_gpt",
        "model.num_layers=4",
        "num_devices=2",
        "num_microbatches=2",
        "num_steps=4",
    )
    assert status == 0
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0.0
    assert row["num_skipped_steps"] >= 1
    assert row["loss_scale"] < 1048576
    status, rows, err = rpbench("backend=virtual", "optimizer.loss_scale=3", "model=tiny_gpt", "dtype=float16")
    assert (status, rows) == (2, [])
    assert "loss_scale=3.0: a power of two" in err


OFFLOAD = ("schedule=roundpipe", "offload=all", "dtype=float64", "verify=true", *SIZES)


@pytest.mark.parametrize("backend", [slow("virtual"), "cpu"])
def test_with_its_weights_on_the_host_it_trains_alike(backend, rpbench):
    status, (row,), _ = rpbench(*OFFLOAD, f"backend={backend}")
    assert status == 0
    assert row["grad_max_abs_diff"] == 0.0
    assert len(row["h2d_bytes"]) == len(row["d2h_bytes"]) == 5
    assert sum(row["d2h_bytes"]) > 0


def test_transfers_show_in_the_simulated_time_and_not_in_the_default(rpbench):
    request = ("schedule=roundpipe", *SIZES, "cost=constant", "cost.hop_ms=0.1")
    links = ("cluster.host_to_device_bytes_per_s=1e8",)
    plain, weights, everything = (
        rpbench(*request, *links, f"offload={what}")[1][0] for what in ("none", "weights", "all")
    )
    assert "transfer_exposed_s" not in plain
    assert plain["makespan_s"] < weights["makespan_s"]
    assert weights["comm_total_s"] > 0
    assert everything["comm_total_s"] == 0  # boundary tensors are transfers now
    assert sum(everything["h2d_bytes"]) > sum(weights["h2d_bytes"])
    shared = ("cluster.host_memory_bytes_per_s=1e8",)
    slower = rpbench(*request, *links, *shared, "offload=all")[1][0]
    assert slower["transfer_exposed_s"] > everything["transfer_exposed_s"] > 0
    assert slower["busy_s"] == pytest.approx(everything["busy_s"])


@pytest.mark.slow
def test_links_of_the_cpu_backend_keep_the_clusters_pace(rpbench):
    pace = ("cluster.host_to_device_bytes_per_s=2e7", "backend.num_warmup_runs=0", "num_devices=1")
    status, (row,), _ = rpbench(*OFFLOAD, "backend=cpu", "backend.paced_links=true", *pace)
    assert status == 0
    assert row["grad_max_abs_diff"] == 0.0
    assert row["makespan_s"] >= row["h2d_bytes"][0] / 2e7  # which counts 16 bits a value, where 64 travel


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("schedule=1f1b", "offload=all"), "the weights of 1f1b stay on their devices"),
        (("schedule=roundpipe", "offload=some"), "offload=some: one of none, weights, all"),
        (("schedule=roundpipe", "offload=all", "prefetch=-1"), "prefetch=-1: stages whose weights come ahead"),
        (("schedule=roundpipe", "offload=all", "model=abstract"), "the bytes of a transfer follow from the model"),
        (("schedule=roundpipe", "backend=cpu", "backend.paced_links=true"), "the links of cluster local have no pace"),
    ],
)
def test_transfers_that_cannot_be_are_refused(arguments, said, rpbench):
    status, rows, err = rpbench(*SIZES, *arguments)
    assert status == 2
    assert not rows
    assert said in err
