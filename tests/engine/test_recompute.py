"""What backward runs again: nothing, the last stage spared, or everything, with the same gradients to the last bit."""

import pytest
from spared import slow

SIZES = (
    "model=tiny_gpt",
    "model.num_layers=8",
    "model.seq_len=16",
    "num_devices=2",
    "num_microbatches=4",
    "num_steps=2",
    "workload.microbatch_sequences=1",
    "verify=true",
    "dtype=float64",
)


@pytest.mark.parametrize(
    "request_",
    [
        slow((("schedule=gpipe", "backend=cpu", "recompute=none"),)),
        ("schedule=1f1b", "backend=cpu", "recompute=except_last"),
        slow((("schedule=1f1b", "backend=virtual", "recompute=none"),)),
        slow((("schedule=interleaved_1f1b", "backend=virtual", "recompute=none"),)),
        ("schedule=zb_h1", "backend=virtual", "recompute=none"),
        slow((("schedule=chimera", "backend=virtual", "recompute=none"),)),
        slow((("schedule=pipedream", "backend=virtual", "recompute=none"),)),
        ("schedule=pipedream_2bw", "backend=virtual", "recompute=none"),
        slow((("schedule=data_parallel", "backend=virtual", "recompute=none"),)),
    ],
    ids=" ".join,
)
def test_kept_graphs_give_the_gradients_of_plain_training(request_, rpbench):
    status, (row,), err = rpbench(*SIZES, *request_)
    assert status == 0, err
    assert row["grad_max_abs_diff"] == 0.0


@pytest.mark.slow
def test_whole_activations_take_less_time_and_more_memory(rpbench):
    found = {}
    for recompute in ("all", "none"):
        timed = ("cost=constant", "cost.recompute_ms=1", "backend.device_memory_bytes=1_000_000_000")
        status, (row,), err = rpbench(*SIZES, "schedule=gpipe", "backend=virtual", f"recompute={recompute}", *timed)
        assert status == 0, err
        found[recompute] = row
    assert found["none"]["makespan_s"] == pytest.approx(3 / 4 * found["all"]["makespan_s"])
    # GPipe holds all microbatches at its peak: both what is counted while it runs and what is said beforehand.
    for memory in ("held_memory_bytes", "peak_memory_bytes"):
        assert found["none"][memory][0] > found["all"][memory][0], memory


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("schedule=gpipe", "recompute=never"), "recompute=never: one of fitting, all, except_last, none"),
        (("schedule=gpipe", "recompute=except_last"), "does other work between a forward and its backward"),
        (("schedule=roundpipe", "recompute=none"), "the stages of roundpipe come and go"),
        (("schedule=pipemare", "recompute=none"), "reads other weights than its forward"),
        (("schedule=pipeoptim", "recompute=except_last"), "use recompute=all"),
        (("schedule=zero_infinity", "recompute=none"), "nothing may leave the devices in between"),
        (("schedule=seq1f1b", "recompute=none"), "segments of seq1f1b read keys and values of earlier ones"),
        (
            ("schedule=megatron_tp", "num_devices=1", "recompute=none"),
            "count those of recomputation",
        ),
        (("schedule=1f1b", "recompute=none", "mode=duel"), "mode=duel has no backend"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_stay_is_refused(arguments, expected, rpbench, tmp_path):
    status, rows, err = rpbench(*SIZES, "backend=virtual", *arguments)
    assert (status, rows) == (2, [])
    assert expected in err
    assert not list(tmp_path.rglob("events.jsonl"))
