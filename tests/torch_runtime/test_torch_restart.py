"""Restart on torch's runtime: other schedules, cuts, numbers of ranks and shards; every bit as without a stop."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from spared import slow
from torch_cases import TINY, schedule_near

from rpbench.engine.state import checkpoint
from rpbench.torch_runtime.processes.ranks import Ranks
from rpbench.torch_runtime.request import make_request

MODEL = replace(TINY, dropout=0.2)
OPTIMIZER = {"learning_rate": 1e-2, "num_warmup_steps": 3}
NUM_MICROBATCHES = 8


@pytest.fixture(scope="module")
def ranks():
    """Processes by number, started when they are first asked for."""
    started: dict[int, Ranks] = {}

    def of(number: int) -> Ranks:
        if number not in started:
            started[number] = Ranks(number)
        return started[number]

    yield of
    for each in started.values():
        each.close()


def asked(name, num_ranks, num_steps, *, model=MODEL, **fields):
    schedule = schedule_near(name, num_ranks, NUM_MICROBATCHES // fields.get("data_parallel", 1))
    request = make_request(
        schedule, model, **({"dtype": "float64", "num_steps": num_steps, "optimizer": OPTIMIZER} | fields)
    )
    assert request.num_microbatches == NUM_MICROBATCHES
    return request


def saved(ranks, folder, name, num_ranks, num_steps, **fields):
    request = asked(name, num_ranks, num_steps, save_to=str(folder), subject={"seed": 0}, **fields)
    outcome = ranks(request.num_ranks).run(request)
    return outcome.losses, checkpoint.load(folder, {"seed": 0})


def going_on(folder: Path):
    found = checkpoint.opened(folder, {"seed": 0})
    return {"start": str(found.data), "first_step": found.num_steps}


PAIRS = [
    (("zb_v", 2), ("1f1b", 1)),
    slow((("zb_v", 2), ("1f1b", 4))),
    slow((("1f1b", 2), ("zb_v", 4))),
    slow((("gpipe", 4), ("v_half", 2))),
    slow((("interleaved_1f1b", 2), ("hanayo", 4))),
]


@pytest.mark.parametrize("before, after", PAIRS)
def test_ranks_go_on_as_other_ranks(before, after, ranks, tmp_path):
    losses, straight = saved(ranks, tmp_path / "straight", *before, 4)
    begun, _ = saved(ranks, tmp_path / "begun", *before, 2)
    resumed, end = saved(ranks, tmp_path / "end", *after, 2, verify=True, **going_on(tmp_path / "begun"))
    assert begun + resumed == losses
    assert end.num_steps == 4
    assert end.masters.keys() == straight.masters.keys()
    for place, master in straight.masters.items():
        assert torch.equal(end.masters[place], master), place
        for name, moment in straight.moments[place].items():
            assert torch.equal(end.moments[place][name], moment), (place, name)


SHARDED = [
    {"data_parallel": 2, "data_mode": "plain"},
    {"data_parallel": 2, "data_mode": "fsdp2"},
    {"tensor_parallel": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", SHARDED, ids=["plain", "fsdp2", "tensor"])
def test_shards_are_put_together_and_cut(fields, ranks, tmp_path):
    """What shards have saved goes on whole, and what was whole goes on in shards."""
    model = replace(MODEL, dropout=0.0)
    _, begun = saved(ranks, tmp_path / "begun", "1f1b", 2, 2, model=model, **fields)
    shapes = {place: master.shape for place, master in begun.masters.items()}
    again = saved(ranks, tmp_path / "again", "gpipe", 4, 1, model=model, verify=True, **going_on(tmp_path / "begun"))[1]
    assert {place: master.shape for place, master in again.masters.items()} == shapes
    request = asked("zb_h1", 2, 1, model=model, verify=True, **going_on(tmp_path / "again"), **fields)
    answer = ranks(4).run(request).answer
    assert answer["grad_max_abs_diff"] <= 1e-15
    assert answer["weight_max_abs_diff"] <= 1e-13


@pytest.mark.slow
def test_the_command_line_goes_on_from_the_engine_to_ranks_and_back(rpbench, tmp_path):
    sizes = ("model=tiny_gpt", "model.num_layers=4", "num_microbatches=4", "workload.microbatch_sequences=1")
    common = (*sizes, "dtype=float64", "recompute=none")
    engine, torch_ranks = ("backend=virtual", "schedule=gpipe"), ("backend=torch", "schedule=zb_v", "num_devices=2")
    _, (straight,), _ = rpbench(*common, *engine, "num_devices=2", "num_steps=6")
    for words in (
        (*engine, "num_devices=4", "checkpoint.save_to=a"),
        (*torch_ranks, "checkpoint.resume_from=a", "checkpoint.save_to=b", "verify=true"),
        ("backend=virtual", "schedule=1f1b", "num_devices=3", "checkpoint.resume_from=b"),
    ):
        status, (row,), _ = rpbench(*common, *words, "num_steps=2")
        assert status == 0
    assert row["loss"] == straight["loss"]
    status, rows, err = rpbench(*common, *torch_ranks, "checkpoint.resume_from=a", "model.hidden=64")
    assert (status, rows) == (2, [])
    assert "a was saved with model=" in err
