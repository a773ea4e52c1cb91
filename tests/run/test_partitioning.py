"""`profile` and `plan plan=pipedream` on the command line: what they print, write and refuse."""

import csv
import json
from pathlib import Path

import pytest

from rpbench.cli import dispatch

ROOT = Path(__file__).parents[2]

NODES = """\
node,operator,forward_ms,backward_ms,activation_bytes,parameter_bytes
in,Input,0,0,4096,0
conv1,Conv2d,1,2,1000000,0
conv2,Conv2d,1,2,1000000,0
classifier,Linear,1,1,1000,1000000000
"""
EDGES = "from_node,to_node\nin,conv1\nconv1,conv2\nconv2,classifier\n"
PLAN = ("plan", "plan=pipedream", "profile=nodes.csv", "edges=edges.csv")
FOUR = ("num_machines=4", "bandwidth_bytes_per_s=1e9")


@pytest.fixture
def rpbench(capsys, tmp_path, monkeypatch):
    """Run the command line in a folder with a profile; returns (status, lines of stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "edges.csv").write_text(EDGES)

    def run(*arguments):
        status = dispatch(arguments)
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


def test_a_plan_is_one_object_with_stages_replicas_and_ratios(rpbench):
    status, (answer,), err = rpbench(*PLAN, *FOUR)
    assert (status, err) == (0, "")
    assert answer["status"] == "ok"
    assert answer["replicas"] == [3, 1]
    assert [stage["layers"] for stage in answer["stages"]] == [["conv1", "conv2"], ["classifier"]]
    assert answer["over_one_machine"] == 4
    assert answer["over_data_parallel"] == pytest.approx((0.008 + 3) / 4 / 0.002)
    assert answer["communication_saved"] == pytest.approx(1 - 2e6 / 1.5e9)
    assert answer["evidence"] == "predicted"


def test_levels_and_options_are_understood(rpbench):
    levels = ("machines_per_level=[2,2]", "bandwidth_bytes_per_s=[1e10,1e9]")
    _, (answer,), _ = rpbench(*PLAN, *levels, "count_p2p=true", "straight=true", "use_fewer_machines=true")
    assert answer["machines_per_level"] == [2, 2]
    assert answer["bandwidth_bytes_per_s"] == [1e10, 1e9]
    assert answer["count_p2p"] is answer["straight"] is answer["use_fewer_machines"] is True
    assert answer["replicas"] == [1, 1, 1]


def test_what_does_not_fit_is_a_verdict(rpbench):
    status, (answer,), _ = rpbench(*PLAN, *FOUR, "memory_bytes=1e6")
    assert (status, answer["status"]) == (0, "infeasible")
    assert "memory_bytes=1e+06" in answer["reason"]
    status, (answer,), _ = rpbench(*PLAN, *FOUR, "straight=true")
    assert (status, answer["status"]) == (0, "infeasible")
    assert "needs as many layers, the profile has 3" in answer["reason"]


def test_levels_that_fit_alone_and_not_together_are_told_apart(rpbench, tmp_path):
    """Two minibatches of 1 MB are under way at the start of either level's pipeline of two, four at that of both."""
    rows = ["a,Linear,1,1,0,1000000", *(f"{name},Linear,1,1,0,0" for name in "bcd")]
    (tmp_path / "nodes.csv").write_text("\n".join([NODES.splitlines()[0], *rows]))
    (tmp_path / "edges.csv").write_text("from_node,to_node\na,b\nb,c\nc,d\n")
    levels = ("machines_per_level=[2,2]", "bandwidth_bytes_per_s=[1e10,1e9]", "straight=true")
    _, (answer,), _ = rpbench(*PLAN, *levels, "memory_bytes=2e6")
    assert [stage["weight_versions"] for stage in answer["stages"]] == [4, 3, 2, 1]
    assert answer["status"] == "infeasible"
    assert "each level fits alone, but all together stage 0 needs 4e+06 bytes" in answer["reason"]
    _, (answer,), _ = rpbench(*PLAN, *levels, "memory_bytes=4e6")
    assert answer["status"] == "ok"


IDLE = [f"{name},Linear,0,0,1,1" for name in ("in", "conv1", "conv2", "classifier")]
WRONG = [
    ((*FOUR, "plan=pipedrem"), "unknown plan 'pipedrem'; did you mean pipedream?"),
    ((*FOUR, "profile=nowhere.csv"), "profile=nowhere.csv cannot be read: No such file"),
    ((*FOUR, "profile="), "profile= is missing"),
    ((*FOUR, "edges="), "edges= is missing"),
    ((*FOUR, "edges=nodes.csv"), "unknown column 'node' in the table of edges"),
    ((*FOUR, "edges=circle.csv"), "the edges go round in a circle"),
    ((*FOUR, "profile=negative.csv"), "forward_ms=-1.0 of conv1"),
    ((*FOUR, "profile=idle.csv"), "no layer takes any time"),
    ((*FOUR, "machines=4"), "unknown key 'machines'; did you mean"),
    ((*FOUR, "straight"), "cannot read 'straight': write key=value"),
    ((*FOUR, "straight=perhaps"), "straight=perhaps: true or false"),
    ((*FOUR, "memory_bytes=-1"), "memory_bytes=-1"),
    ((*FOUR, "memory_bytes=nan"), "memory_bytes=nan"),
    (("num_machines=4",), "bandwidth_bytes_per_s= is missing"),
    (("bandwidth_bytes_per_s=1e9",), "num_machines= or machines_per_level= is missing"),
    (("num_machines=0", "bandwidth_bytes_per_s=1e9"), "num_machines=0: a whole number of at least 1"),
    (("num_machines=2.5", "bandwidth_bytes_per_s=1e9"), "num_machines=2.5: a whole number"),
    (("num_machines=4", "bandwidth_bytes_per_s=0"), "every bandwidth is finite and above 0"),
    (("num_machines=4", "bandwidth_bytes_per_s=fast"), "=fast: a number"),
    (("num_machines=4", "bandwidth_bytes_per_s=[1e9,1e9]"), "give machines_per_level"),
    (("machines_per_level=[4,4]", "bandwidth_bytes_per_s=1e9"), "has 2 levels, bandwidth_bytes_per_s has 1"),
    (("machines_per_level=[4,0]", "bandwidth_bytes_per_s=[1e9,1e9]"), "every level has at least 1 machine"),
    (("num_machines=15", "machines_per_level=[4,4]", "bandwidth_bytes_per_s=[1e9,1e9]"), "which are 16"),
]


@pytest.mark.parametrize(
    "arguments, expected", WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_wrong_request_is_answered_in_a_line_or_two(arguments, expected, rpbench, tmp_path):
    (tmp_path / "circle.csv").write_text(EDGES + "classifier,conv2\n")
    (tmp_path / "negative.csv").write_text(NODES.replace("conv1,Conv2d,1,2", "conv1,Conv2d,-1,2"))
    (tmp_path / "idle.csv").write_text("\n".join([NODES.splitlines()[0], *IDLE]))
    status, answers, err = rpbench(*PLAN, *arguments)
    assert (status, answers) == (2, [])
    assert expected in err
    assert len(err.splitlines()) <= 4
    assert "Traceback" not in err


# --- profile ------------------------------------------------------------------------------------------------


def test_a_profile_is_measured_and_can_be_planned(rpbench, tmp_path):
    status, (answer,), err = rpbench("profile", "model=tiny_gpt", "model.num_layers=3", "out=mine/tiny", "num_runs=1")
    assert status == 0
    assert "measuring" in err
    assert answer["times"] == "measured"
    with (tmp_path / answer["profile"]).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["operator"] for row in rows] == ["Embedding", *["DecoderLayer"] * 3, "Head"]
    assert answer["forward_ms"] == pytest.approx(sum(float(row["forward_ms"]) for row in rows))
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"tiny_nodes.csv", "tiny_edges.csv"}
    paths = (f"profile={answer['profile']}", f"edges={answer['edges']}")
    status, (plan,), _ = rpbench("plan", "plan=pipedream", *paths, *FOUR)
    assert (status, plan["status"], plan["num_machines_used"]) == (0, "ok", 4)


def test_a_profile_from_a_cost_table_has_its_times(rpbench, tmp_path):
    status, (answer,), err = rpbench("profile", "model=llama31_8b", "cost=published")
    assert (status, err, answer["times"]) == (0, "", "published")
    assert answer["profile"] == "results/profiles/llama31_8b_nodes.csv"
    with (tmp_path / answer["profile"]).open() as file:
        first, layer, *_, head = csv.DictReader(file)
    assert (first["operator"], first["forward_ms"]) == ("Embedding", "0.0")
    with (ROOT / "analysis/published/layer_timings.csv").open() as file:
        published = next(row for row in csv.DictReader(file) if row["model"] == "llama-3.1-8b")
    ours = [float(row[key]) for row in (layer, head) for key in ("forward_ms", "backward_ms")]
    names = ("fwd_ms_per_layer", "bwd_ms_per_layer", "lmhead_fwd_ms", "lmhead_bwd_ms")
    assert ours == pytest.approx([float(published[name]) for name in names])
    # 16-bit gradients of 8.03e9 parameters; 4 sequences of 2048 tokens, 4096 wide.
    assert answer["parameter_bytes"] == 2 * 8_030_261_248
    assert int(layer["activation_bytes"]) == 2 * 4 * 2048 * 4096


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("model=abstract",), "model=abstract has no layers to profile"),
        (("model=tiny_gp",), "did you mean tiny_gpt?"),
        (("model=tiny_gpt", "num_runs=0"), "num_runs=0: a whole number from 1 to 1,000"),
        (("model=tiny_gpt", "num_runs=few"), "num_runs=few: a whole number"),
        (("model=tiny_gpt", "dtype=int3"), "dtype=int3: one of"),
        (("model=tiny_gpt", "workload.microbatch_sequences=0"), "workload.microbatch_sequences=0"),
        (("model=tiny_gpt", "out=/dev/null/x"), "out=/dev/null: /dev/null is no folder"),
        (("model=tiny_gpt", "cost=published"), "no published timings for a model without published_name; there are"),
    ],
    ids=str,
)
def test_a_profile_that_cannot_be_made_is_refused(arguments, expected, rpbench, tmp_path):
    status, answers, err = rpbench("profile", *arguments)
    assert (status, answers) == (2, [])
    assert expected in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("results/**/*.csv"))
