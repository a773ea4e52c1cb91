"""mode=failures on the command line: records of every policy, and what is refused."""

import pytest

COMMON = ("mode=failures", "schedule=1f1b", "num_devices=4", "num_microbatches=8", "mode.horizon_steps=20")
# F = 1 and B = 2 slots: a step of (8 + 3) * 3 = 33, a horizon of 660.
STEP, HORIZON = 33.0, 660.0


def test_checkpoint(rpbench):
    """At 400 twelve steps have ended (396), and two microbatches have begun by 4: four, 0 to 3, at 0, 1, 2, 3."""
    status, (row,), err = rpbench(*COMMON, "mode.failures=[[1,400]]", "mode.restart_s=30", "mode.detect_s=15")
    assert status == 0
    assert (row["status"], row["evidence"], row["policy"]) == ("ok", "simulated", "checkpoint")
    assert (row["failure_free_step_s"], row["horizon_s"]) == (STEP, HORIZON)
    assert (row["lost_steps"], row["lost_microbatches"]) == (2, 2 * 8 + 4)
    (failure,) = row["failures"]
    assert (failure["detect_s"], failure["restart_s"], failure["recompute_s"]) == (15.0, 30.0, 2 * STEP + 4)
    assert row["num_steps_done"] == 10 + int((HORIZON - 445) // STEP)
    assert row["goodput"] == pytest.approx(row["num_steps_done"] * STEP / HORIZON)
    assert "failures 1, steps done again 2, microbatches 20, goodput" in err


def test_sums_of_seconds_lose_no_step_and_begin_no_microbatch(rpbench):
    """A step takes 9 ms. Dead at 0, a hundred end by 0.9 s; dead at 10 ms, the second microbatch is about to begin."""
    words = ("mode=failures", "schedule=1f1b", "num_devices=2", "num_microbatches=2", "cost=constant")
    _, (row,), _ = rpbench(*words, "mode.failures=[[0,0.0]]")
    assert (row["num_steps_done"], row["goodput"], row["lost_microbatches"]) == (100, pytest.approx(1), 0)
    _, (row,), _ = rpbench(*words, "mode.failures=[[0,0.01]]")
    assert (row["lost_steps"], row["lost_microbatches"]) == (1, 2 + 1)


def test_gemini(rpbench):
    """Dead at 400 after twelve steps, which go on at once; at 500 fifteen have ended, and ten are in the store."""
    status, (row,), _ = rpbench(*COMMON, "mode.policy=gemini", "mode.failures=[[1,400],[2,500],[3,500]]")
    assert status == 0
    assert row["recoverable_probability"]["2"] == pytest.approx(1 - 1 / 3)
    assert [(f["source"], f["lost_steps"]) for f in row["failures"]] == [("remote", 0), ("store", 5)]


def test_gemini_moves_bytes_between_hosts(rpbench):
    machine = ("model=qwen3_1p7b", "cluster=dgx_h100", "cost=analytic", "recompute=none")
    status, (row,), _ = rpbench(
        *COMMON, *machine, "mode.policy=gemini", "mode.failures=[[1,1.5]]", "mode.net_bytes_per_s=12.5e9"
    )
    assert (status, row["status"], row["evidence"]) == (0, "ok", "predicted")
    state = row["fetched_bytes"]["remote"] + row["fetched_bytes"]["local"]
    assert row["copied_bytes_per_step"] == state == sum(row["copies_host_bytes"]) / 4
    assert 0 < row["net_idle_s"] <= row["failure_free_step_s"]
    assert row["copies_added_s"] == max(0.0, row["net_needed_s"] - row["net_idle_s"])


@pytest.mark.parametrize("m, absorbs", [(4, True), (8, False)])
def test_recycle(m, absorbs, rpbench):
    """Four stages, three pipelines: m <= 6 is absorbed."""
    more = ("mode.policy=recycle", "mode.pipelines=3", f"num_microbatches={m}", "mode.failures=[[5,40]]")
    status, (row,), _ = rpbench(*COMMON, *more)
    assert (status, row["num_ranks"], row["absorbs_by_formula"]) == (0, 12, absorbs)
    assert (row["slowdown_of_one"] == 1.0) == absorbs
    assert row["failures"][0]["source"] == "replica"
    assert row["goodput"] <= 1


def test_bamboo(rpbench):
    status, (row,), _ = rpbench(*COMMON, "mode.policy=bamboo", "mode.failures=[[1,100],[2,300]]")
    assert status == 0
    assert row["redundancy_added_s"] == 7.0  # (m - 1) F
    assert [failure["source"] for failure in row["failures"]] == ["shadow", "store"]


def test_varuna(rpbench):
    """Eight microbatches on two pipelines of four; with seven devices the best form has another depth or width."""
    more = (
        "schedule=varuna",
        "model.num_layers=12",
        "mode.policy=varuna",
        "mode.pipelines=2",
        "mode.checkpoint_every=3",
    )
    status, (row,), _ = rpbench(*COMMON, *more, "mode.failures=[[1,100]]")
    assert status == 0
    (failure,) = row["failures"]
    assert failure["stages"] * failure["width"] <= 7
    assert failure["step_s_after"] >= row["failure_free_step_s"]


def test_drawn_failures_are_of_the_seed(rpbench):
    drawn = ("mode.mean_between_s=800", "mode.policy=gemini")
    rows = [rpbench(*COMMON, *drawn, f"seed={seed}", "force=true")[1][0] for seed in (1, 1, 2)]
    assert rows[0]["failures"] == rows[1]["failures"] != rows[2]["failures"]
    assert all(row["goodput"] <= 1 for row in rows)


@pytest.mark.parametrize(
    "words, answer",
    [
        (("mode.failures=[[4,1]]",), "failure of rank 4: the run has ranks 0 to 3; name one of them"),
        (("mode.failures=[[1,700]]",), "failure at 700 s: the run goes from 0 to 660 s"),
        (("mode.failures=[]",), "nobody dies; name ranks and seconds"),
        (("mode.failures=[1,2]",), "a list of pairs of numbers"),
        (("mode.failures=4",), "mode.failures=4: a list of ranks and seconds, as in [[1,30.5]]; mode.mean_between_s"),
        (("mode.failures=[[1,1]]", "mode.mean_between_s=5"), "give one of the two"),
        (("mode.failures=[[1,1]]", "mode.policy=gemini", "mode.copies=5"), "there are 4; take 1 to 4"),
        (("mode.failures=[[1,1]]", "mode.policy=oobleck"), "mode.policy=oobleck: one of checkpoint, gemini"),
        (("mode.failures=[[1,1]]", "mode.policy=recycle", "cost=constant"), "set mode.pipelines to 2 or more"),
        (("mode.failures=[[1,1]]", "mode.policy=bamboo", "schedule=zb_v"), "take schedule=1f1b or gpipe"),
        (("mode.failures=[[0,1]]", "mode.policy=bamboo", "num_devices=1"), "1 rank a pipeline: a neighbour keeps"),
        (("mode.failures=[[1,1]]", "mode.policy=recycle", "schedule=gpipe"), "take schedule=1f1b"),
        (("mode.failures=[[1,1]]", "mode.policy=gemini", "schedule=roundpipe"), "or mode.policy=checkpoint"),
        (("mode.failures=[[1,1]]", "schedule=pipedream"), "its steps overlap; take a schedule that is flushed"),
        (("mode.failures=[[1,1]]", "mode.policy=varuna"), "add model.num_layers=12"),
        (("mode.failures=[[1,1]]", "num_steps=2"), "set mode.horizon_steps or mode.horizon_s"),
        (("mode.failures=[[1,1]]", "mode.detect_s=-1"), "mode.detect_s=-1.0: seconds, 0 or more"),
        (("mode.failures=[[1,1]]", "mode.run=processes"), "model=abstract does not have; take model=tiny_gpt"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_what_is_refused(words, answer, rpbench):
    status, rows, err = rpbench(*COMMON, *words)
    assert (status, rows) == (2, [])
    assert answer in err
    assert len(err.splitlines()) <= 3


def test_what_another_policy_or_kind_of_run_has_is_told(rpbench):
    _, (row,), err = rpbench(*COMMON, "mode.failures=[[1,1]]", "mode.copies=3", "mode.dies=process", "mode.stall_s=9")
    assert "mode.copies=3 mode.dies=process without effect: of mode.policy=gemini alone" in err
    assert "mode.stall_s=9 without effect: of mode.run=processes alone" in err
    assert len(row["notes"]) == 2
    assert not rpbench(*COMMON, "mode.failures=[[1,1]]", "mode.policy=gemini", "mode.copies=3")[1][0]["notes"]


@pytest.mark.slow
@pytest.mark.parametrize("policy, source", [("gemini", "memory"), ("checkpoint", "store")])
def test_processes(policy, source, rpbench):
    status, (row,), err = rpbench(
        *("mode=failures", "schedule=1f1b", "model=tiny_gpt", "model.num_layers=4", "num_devices=2"),
        *("num_microbatches=3", "num_steps=4", "workload.microbatch_sequences=1", "mode.run=processes"),
        *(f"mode.policy={policy}", "mode.failures=[[0,2,3]]", "mode.checkpoint_every=3"),
    )
    assert (status, row["status"], row["evidence"]) == (0, "ok", "measured")
    assert row["weight_max_abs_diff"] == 0.0
    (failure,) = row["failures"]
    assert (failure["source"], failure["lost_steps"]) == (source, 0 if source == "memory" else 2)
    assert row["lost_steps_simulated"] == [failure["lost_steps"]]
    assert row["lost_microbatches"] == row["lost_microbatches_simulated"] == [2 + 3 * failure["lost_steps"]]
    assert "weights within 0 of training without failures" in err
