"""What exports refuse: orders that DeepSpeed does not run, and methods that would be written as data parallelism."""

import pytest
from torch_cases import schedule_near

from rpbench.advice.rows import runs_in
from rpbench.cli import dispatch
from rpbench.ir.schedule import ScheduleError
from rpbench.registry import entries
from rpbench.torch_runtime.formats.export import Given, export

# Not in the list of what runs there by this name: 1F1B's own order, Mario's with recomputation, and Megatron's shards.
AS_WELL = {"adaptive_1f1b", "mario", "megatron_tp"}


def takes(name, form):
    try:
        export(schedule_near(name, 4, 8), form, Given(lambda: None))
    except ScheduleError:
        return False
    return True


def test_deepspeeds_files_are_of_orders_that_it_runs():
    taken = {name for name in entries() if takes(name, "deepspeed")}
    assert taken == {name for name in entries() if "DeepSpeed" in runs_in(name)} | AS_WELL
    assert not takes("zb_v", "deepspeed_parts")


@pytest.mark.parametrize("form", ["torchtitan", "megatron_layout", "deepspeed"])
@pytest.mark.parametrize("name", ["cyclic_dp", "weipipe", "tawpipe", "acco"])
def test_other_methods_of_replicas_are_not_written_as_plain_ones(name, form):
    with pytest.raises(ScheduleError, match=f"schedule={name}: format={form} would make plain data parallelism"):
        export(schedule_near(name, 4, 8), form, Given(lambda: None))


def test_a_refusal_names_a_schedule_and_a_form(capsys):
    words = ["show", "model=tiny_gpt", "num_devices=2", "num_microbatches=4", "format=deepspeed"]
    assert dispatch([*words, "schedule=zb_v"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "run 1F1B alone" in err
    assert "take schedule=1f1b with format=deepspeed" in err
    assert dispatch([*words, "schedule=1f1b", "recompute=none", "num_steps=1"]) == 0
