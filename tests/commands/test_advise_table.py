"""The table of `advise`: what tells rows apart, what is rounded, what a narrow terminal keeps."""

import pytest

from rpbench.commands.advising.advise_table import gigabytes, label, lacks, recomputed, table

ROW = {
    "schedule": "1f1b",
    "options": {"microbatch_sequences": 2, "recompute": "all"},
    "tokens_per_s": 54_518.0,
    "tokens_per_s_low": 37_992.0,
    "tokens_per_s_high": 78_233.0,
    "peak_memory_bytes": 25_300_000_000,
    "bubble": -1e-17,
    "staleness_steps": 0,
    "why": {"computation": 1.0, "bubble": 0.1},
    "searched_to_the_end": True,
    "command": "python -m rpbench schedule=1f1b",
}
MISFIT = {"schedule": "zb_v", "options": {}, "device_lacks_bytes": 0, "host_lacks_bytes": 24_049_464_832}
ANSWER = {
    "model": "m",
    "cluster": "four",
    "num_devices": 4,
    "seq_len": 512,
    "tokens_per_step": 16_384,
    "ranking": [ROW, ROW | {"schedule": "zb_h1", "tokens_per_s": 50_000.0}],
    "does_not_fit": [MISFIT],
    "levers": [
        {"name": "links twice as fast", "tokens_per_s": 54_518.0, "gain": 0.0},
        {"name": "devices twice as fast", "tokens_per_s": 100_000.0, "gain": 0.834},
        {"name": "one more microbatch a step", "tokens_per_s": None, "gain": None},
    ],
    "order_turns": [{"name": "links", "factor": 0.25}, {"name": "devices", "factor": None}],
    "left_out": {"chimera": "chimera needs an even number of devices"},
    "assumed": {},
    "unused": {"inter_bytes_per_s": "one node has all 4 devices"},
}


@pytest.mark.parametrize(
    "device, host, told",
    [(60, 0, "60.0 GB a device"), (2, 900, "900.0 GB of the host"), (60, 900, "60.0 GB a device")],
)
def test_a_misfit_names_the_memory_that_rules_it_out(device, host, told):
    bounds = {"least_memory_bytes": device * 10**9, "least_host_memory_bytes": host * 10**9}
    answer = ANSWER | {"does_not_fit": [ANSWER["does_not_fit"][0] | bounds], "device_memory_bytes": 24 * 10**9}
    assert f"does not fit: zb_v needs at least {told}" in "\n".join(table(answer, 200))


@pytest.mark.parametrize("width", [36, 40, 66, 120])
def test_no_line_leaves_the_terminal_and_every_row_names_its_schedule(width):
    lines = table(ANSWER, width)
    assert all(len(line) < width or line == ROW["command"] for line in lines)  # a command is whole, to be copied
    rows = [line for line in lines if line.lstrip().startswith(("54,518", "50,000"))]
    assert [line.split()[-1] for line in rows] == ["1f1b", "zb_h1"]


def test_it_says_what_the_json_says():
    text = "\n".join(table(ANSWER, 200, ("chimera",)))
    for words in (
        "512 tokens a sequence, 16,384 a step",
        "does not fit: zb_v lacks 24.1 GB of the host's memory",
        "devices twice as fast: +83.4 %",
        "no gain: links twice as fast",
        "one more microbatch a step: cannot be had",
        "zb_h1 would be first with links 0.25 times as fast",
        "zb_h1 stays behind with up to 16 times faster or slower devices",
        "left out: chimera: chimera needs an even number of devices",
        "not used: inter_bytes_per_s: one node has all 4 devices",
        "python -m rpbench schedule=1f1b",
    ):
        assert words in text
    assert "-0 %" not in text


def test_the_first_row_is_told_as_a_plan_and_gaps_are_told_of_all():
    options = {"microbatch_sequences": 2, "recompute": "fitting", "kept_layers": [0, 0, 1, 4], "partition": "4-4-4-4"}
    whole = ROW | {"options": options, "gap": 0.004, "mfu": 0.41, "runs_in": ["torchtitan"], "host_memory_bytes": 0}
    whole |= {"memory": {"weights": 4e9, "activations": 21e9, "logits": 1e6}, "tokens_per_day": 4.7e9}
    whole |= {"usd_per_1e9_tokens": 41.6, "searched_to_the_end": True}
    text = "\n".join(table(ANSWER | {"ranking": [whole, ROW | {"gap": 1.36}]}, 200))
    for words in (
        "plan: 1f1b, 2 sequences a microbatch, layers by stage 4-4-4-4, recomputed: 11 of 16 layers",
        "memory of the fullest device, GB: activations 21.0, weights 4.0",
        "host memory: none; a day: 4.70 billion tokens",
        "10^9 tokens: 42 US dollars",
        " 0.4 % ",
        " 41 % ",
        " 2 x ",
        "1f1b  (torchtitan)",
    ):
        assert words in text
    assert "logits" not in text
    assert "by a bound" not in text


@pytest.mark.parametrize("count, words", [(24_049_464_832, "24.1 GB"), (1, "0.1 GB"), (3e9, "3.0 GB")])
def test_what_lacks_is_rounded_up_so_that_it_is_enough(count, words):
    assert gigabytes(count) == words


def test_a_misfit_names_both_memories():
    assert lacks(MISFIT | {"device_lacks_bytes": 10**9}) == "1.0 GB a device and 24.1 GB of the host's memory"


def test_meshes_of_one_schedule_have_labels_of_their_own():
    mesh = {"data": 8, "pipeline": 2, "tensor": 1, "context": 1, "expert": 1, "shares": "optimizer"}
    options = {**mesh, "microbatch_sequences": 1, "num_microbatches": 8, "chunks_per_device": 1, "recompute": "none"}
    assert label(ROW | {"options": options}) == "1f1b data=8 pipeline=2 zero_1"
    for key, value in (("data", 4), ("shares", "none"), ("chunks_per_device", 2)):
        assert label(ROW | {"options": {**options, key: value}}) != label(ROW | {"options": options})


@pytest.mark.parametrize(
    "word, keeps, told",
    [
        ("fitting", [0, 0, 0, 0], "all"),
        ("fitting", [2, 0, 0, 1], "5 of 8"),
        ("fitting", [2, 2, 2, 2], "none"),
        ("except_last", [0, 0, 0, 2], "6 of 8"),
        ("none", [2, 2, 2, 2], "none"),
        ("all", [0, 0, 0, 0], "all"),
    ],
)
def test_recomputation_is_told_in_layers(word, keeps, told):
    """Of eight layers each is kept or runs again."""
    assert recomputed({"options": {"recompute": word, "kept_layers": keeps, "partition": "2-2-2-2"}}) == told
    assert recomputed({"options": {"recompute": "selective", "partition": "8"}}) == "selective"  # of a mesh


@pytest.mark.parametrize(
    "factor, told",
    [(0.25, "0.25 times as fast"), (1.0443, "4.4 % faster"), (0.996, "0.4 % slower"), (1.1, "1.1 times as fast")],
)
def test_a_factor_near_one_is_a_percentage(factor, told):
    turns = [{"name": "devices", "factor": factor}]
    assert f"zb_h1 would be first with devices {told}, both plans kept" in "\n".join(
        table(ANSWER | {"order_turns": turns}, 200)
    )


def test_what_starts_the_first_row_stands_right_under_the_table():
    """Before reasons and misfits; where no framework runs the first row, of the first that one runs."""
    far = ROW | {"schedule": "zb_v", "export": "python -m rpbench show schedule=zb_v format=torchtitan"}
    lines = table(ANSWER | {"ranking": [ROW | {"export": None}, far]}, 120)
    here, there = lines.index(ROW["command"]), lines.index(far["export"])
    assert lines[here - 1 : there] == [
        "to run it here:",
        ROW["command"],
        "to start zb_v, the first row that a framework runs, written for torchtitan:",
    ]
    assert there < next(place for place, line in enumerate(lines) if line.startswith("1f1b: ms of a step"))


def test_the_lead_is_told_with_the_interval_of_the_ratio():
    leads = [{"schedule": "zb_h1", "by": 0.09, "low": -0.006, "high": 0.195}]
    text = "\n".join(table(ANSWER | {"leads": leads}, 200))
    assert "1f1b leads zb_h1 by 9.0 %, nine of ten: -0.6 to +19.5 %" in text
    assert "no row of this list is surely slower" in text
    far = [*leads, {"schedule": "gpipe", "by": 0.3, "low": 0.18, "high": 0.42}]
    rows = [*ANSWER["ranking"], ROW | {"schedule": "gpipe", "tokens_per_s": 42_000.0}]
    text = "\n".join(table(ANSWER | {"ranking": rows, "leads": far}, 200))
    assert "the first that is surely slower, nine of ten: gpipe" in text


def test_all_that_does_not_fit_is_named():
    names = ["gpipe", "zero_2", "chimera", "zero_3", "data_parallel"]
    text = "\n".join(table(ANSWER | {"does_not_fit": [MISFIT | {"schedule": name} for name in names]}, 200))
    assert "does not fit either: zero_3 (FSDP), data_parallel (DDP)" in text


def test_causes_whose_names_explain_nothing_are_explained():
    found = "\n".join(table(ANSWER | {"ranking": [ROW | {"why": {"work": 1.0, "jitter": 0.02, "fixed": 0.0}}]}, 200))
    assert "jitter: waiting for the slowest node" in found
    assert "fixed:" not in found
    assert "jitter" not in "\n".join(table(ANSWER, 200))
