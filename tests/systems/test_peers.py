"""Other people's engines train as plain training does. One start of two processes serves all cases."""

import re
from dataclasses import replace

import pytest

from baselines.systems import worker
from baselines.systems.case import Case, why_missing
from rpbench.torch_runtime.processes.diagnosis import RunFailed
from rpbench.torch_runtime.processes.ranks import Ranks

TINY = {"name": "tiny", "num_layers": 6, "hidden": 16, "heads": 2, "vocab": 37, "seq_len": 5}
ONE_STAGE, TWO_STAGES = (4, 2), (1, 2, 2, 1)  # layers of each stage, with as many a rank

BASE = Case("torch_pipelining", TINY, 8, microbatch_sequences=2, num_steps=2, dtype="float64", verify=True)

CASES = {
    "GPipe": replace(BASE, schedule="GPipe", partition=ONE_STAGE),
    "1F1B": replace(BASE, schedule="1F1B", partition=ONE_STAGE),
    "1F1B, float32": replace(BASE, schedule="1F1B", partition=ONE_STAGE, dtype="float32"),
    "1F1B, last stage kept": replace(BASE, schedule="1F1B", partition=ONE_STAGE, recompute="except_last"),
    "Interleaved1F1B": replace(BASE, schedule="Interleaved1F1B", partition=TWO_STAGES),
    "LoopedBFS": replace(BASE, schedule="LoopedBFS", partition=TWO_STAGES),
    "InterleavedZeroBubble": replace(BASE, schedule="InterleavedZeroBubble", partition=TWO_STAGES, recompute="none"),
    "ZBVZeroBubble": replace(BASE, schedule="ZBVZeroBubble", partition=TWO_STAGES, recompute="none"),
    "DualPipeV": replace(BASE, schedule="DualPipeV", partition=TWO_STAGES, recompute="none"),
}
FSDP2 = replace(BASE, system="fsdp2", model=TINY | {"num_layers": 2}, num_microbatches=4, num_steps=5)
DEEPSPEED = replace(BASE, system="deepspeed", dtype="float32", num_steps=6)
TOLERANCE = {"float64": 1e-13, "float32": 1e-6}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, stall_s=300) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_weights_are_those_of_plain_training(ranks, name):
    answers = ranks.run_case(CASES[name])
    assert len(answers) == 2
    for answer in answers:
        assert answer["grad_max_abs_diff"] < TOLERANCE[CASES[name].dtype]
        assert answer["weight_max_abs_diff"] < 10 * TOLERANCE[CASES[name].dtype]


def assert_same_losses(answers, case):
    """Those of plain training and those of our method, step by step.

    They cannot be the same bits: a peer averages over ranks where we add up, deals microbatches to ranks in turn where
    we deal them in runs, and steps with another AdamW. Six steps of six layers come to 4e-16 in float64 and 6e-8 in
    float32.
    """
    ours = answers[0]["our_losses"]
    assert len(ours) == case.num_steps
    for answer in answers:
        assert answer["losses"] == pytest.approx(ours, abs=TOLERANCE[case.dtype], rel=0)
        assert answer["grad_max_abs_diff"] < TOLERANCE[case.dtype]
        assert answer["weight_max_abs_diff"] < 10 * TOLERANCE[case.dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, dtype", [("reshard", "float64"), ("no_reshard", "float64"), ("offload", "float64"), ("reshard", "float32")]
)
def test_fsdp2_has_the_losses_of_our_zero_3_and_zero_2(ranks, way, dtype):
    case = replace(FSDP2, schedule=way, dtype=dtype)
    assert_same_losses(ranks.run_case(case), case)


@pytest.fixture(scope="module")
def deepspeed_ranks():
    with Ranks(2, stall_s=300) as found:  # it compiles its operators at first
        yield found


@pytest.mark.peers
@pytest.mark.skipif(why_missing("deepspeed") is not None, reason=str(why_missing("deepspeed")))
@pytest.mark.parametrize("method", ["zero_1", "zero_2", "zero_3", "zero_offload", "zero_infinity"])
def test_deepspeed_has_the_losses_of_our_methods(deepspeed_ranks, method):
    case = replace(DEEPSPEED, schedule=method)
    assert_same_losses(deepspeed_ranks.run_case(case), case)


@pytest.mark.skipif(why_missing("deepspeed") is None, reason="deepspeed is installed")
@pytest.mark.slow
def test_a_system_that_is_not_installed_says_so(ranks):
    with pytest.raises(ValueError, match="system=deepspeed: deepspeed is not installed: pip install 'deepspeed>="):
        ranks.run_case(DEEPSPEED)


def test_a_package_that_needs_cuda_says_so_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert why_missing("torch", needs_cuda=True) == "torch needs a CUDA device, and torch sees none"
    assert why_missing("torch") is None


@pytest.mark.slow
def test_what_is_run_again_starts_from_the_same_weights(ranks):
    _, first, second = (ranks.run_case(CASES["1F1B"]) for _ in range(3))
    assert [a["weight_max_abs_diff"] for a in first] == [a["weight_max_abs_diff"] for a in second] == [0.0, 0.0]
    assert sorted(kind for kind, *_ in first[0]["actions"]) == ["B"] * 16 + ["F"] * 16 + ["STEP"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed, said",
    [
        ({"schedule": "2F2B"}, "schedule='2F2B': torch has GPipe, 1F1B"),
        ({"schedule": "1F1B", "partition": (2, 2, 2)}, "1F1B on 2 ranks takes 2 stages"),
        ({"schedule": "DualPipeV", "partition": TWO_STAGES}, "splits backward, which torch cannot recompute for"),
        (
            {"schedule": "1F1B", "partition": ONE_STAGE, "recompute": "some"},
            "recompute='some': one of all, except_last",
        ),
        ({"system": "fsdp2", "schedule": "zero"}, "schedule='zero': FSDP2 is run as reshard, no_reshard, offload"),
        (
            {"system": "fsdp2", "schedule": "reshard", "recompute": "except_last"},
            "recompute='except_last': all or none",
        ),
        (
            {"system": "fsdp2", "schedule": "reshard", "num_microbatches": 5},
            "num_microbatches=5: 2 ranks take an equal number each",
        ),
        ({"system": "zero"}, "system='zero': one of torch_pipelining"),
    ],
)
def test_a_case_that_cannot_be_is_refused_and_the_ranks_live_on(ranks, changed, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ranks.run_case(replace(BASE, **changed))
    assert ranks.run_case(CASES["GPipe"])[0]["grad_max_abs_diff"] == 0.0


def test_a_rank_that_is_lost_is_an_error():
    with Ranks(1, stall_s=20) as ranks:
        process = ranks._processes[0]
        process.kill()
        process.wait()  # so that nobody reads what is written
        with pytest.raises(RunFailed, match=r"rank 0 died .signal 9"):
            ranks.run_case(CASES["1F1B"])


def test_a_rank_that_does_not_answer_in_time_is_ended():
    with Ranks(1, stall_s=0.05) as ranks:
        process = ranks._processes[0]
        with pytest.raises(RunFailed, match="rank 0 hangs"):
            ranks.run_case(replace(CASES["1F1B"], partition=(6,), num_steps=10_000))
        assert process.poll() is not None


def test_without_torchrun_it_says_how_to_start(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert worker.main(["case.json"]) == 2
    assert "RANK" in capsys.readouterr().err
    assert worker.main([]) == 2
    assert "torchrun --nproc-per-node 2 -m baselines.systems" in capsys.readouterr().err
