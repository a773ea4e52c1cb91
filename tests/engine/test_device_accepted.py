"""What the device backend accepts: no wait is missing in it, and the bits are those of plain training."""

import pytest
from spared import slow

from rpbench import registry
from rpbench.commands.check_order import _request
from rpbench.run.modes import train
from rpbench.run.scheduled import assembled_of

MOE = (
    *("model=gpt_oss_20b", "model.heads=2", "model.key_value_heads=1", "model.head_dim=8", "dtype=bfloat16"),
    *("model.experts.total=4", "model.experts.active=2", "model.experts.inner=16"),
)
ACCEPTED = [
    ("roundpipe",),
    ("roundpipe", "schedule.asynchronous=true"),
    ("roundpipe_call",),
    ("roundpipe_call_async",),
    ("roundpipe", "prefetch=0"),
    ("roundpipe", "prefetch=2"),
    ("roundpipe", "optimizer=sgd"),
    ("roundpipe", "optimizer=adafactor"),
    ("1f1b", "optimizer=rmsprop"),
    ("data_parallel", "optimizer=adafactor"),
    ("zero_2", "optimizer=rmsprop"),
    ("roundpipe", "optimizer.clip_norm=0.1"),
    ("roundpipe", "dtype=float16"),
    ("roundpipe", "dtype=bfloat16"),
    ("roundpipe", "model.dropout=0.1"),
    ("roundpipe", "model.tied=true"),
    ("roundpipe", *MOE),
    ("zero_2", *MOE, "optimizer.clip_norm=0.1"),
    ("roundpipe", "dispatch=earliest_free"),
    ("roundpipe", "dispatch=dynamic"),
    ("roundpipe", "chunks_per_device=4"),
    ("greedysnake",),
    ("greedysnake", "schedule.delayed=0.5"),
    ("megatrain",),
    ("mobius",),
    ("superoffload", "schedule.speculate=false"),
    ("zero_3", "schedule.offload=true"),
    ("zero_3", "schedule.offload=true", "schedule.reduce_each_microbatch=false"),
    ("zero_infinity",),
    ("zero_infinity", "schedule.reduce_each_microbatch=false"),
    ("zero_infinity", "dtype=float16"),
    ("zero_offload",),
    ("1f1b",),
    ("1f1b", "dtype=float16"),
    ("1f1b", "optimizer.clip_norm=0.1"),
    ("1f1b", "model.tied=true"),
    ("1f1b", "model.dropout=0.1", "recompute=none"),
    ("1f1b", "model.training_mode=lora", "model.lora_rank=4"),
    ("acco",),
    ("adaptis",),
    ("adaptive_1f1b",),
    ("bpipe", "recompute=none"),
    ("combined_1f1b",),
    ("dapple",),
    ("data_parallel",),
    ("data_parallel", "optimizer.clip_norm=0.1"),
    ("data_parallel", "model.tied=true"),
    ("dualpipe_v",),
    ("gis",),
    ("gpipe", "dtype=bfloat16"),
    ("hanayo",),
    ("interlaced",),
    ("interleaved_1f1b",),
    ("interleaved_zb",),
    ("kfkb",),
    ("looped_bfs",),
    ("mario",),
    ("pipe_offload", "recompute=none"),
    ("pipedream",),
    ("pipedream_2bw",),
    ("pipelined_backprop", "optimizer=sgd", "optimizer.momentum=0.9"),
    ("pipemare",),
    ("pipeoptim",),
    ("seq1f1b",),
    ("spectrain",),
    ("stp",),
    ("two_bp",),
    ("v_half",),
    ("v_min",),
    ("varuna",),
    ("vocab_parallel",),
    ("xpipe",),
    ("zb_auto",),
    ("zb_h1", "optimizer.clip_norm=0.1"),
    ("zb_h2",),
    ("zb_v", "dtype=float16"),
    ("zero_2",),
    ("zero_2", "optimizer.clip_norm=0.1"),
    ("zero_2", "dtype=float16"),
    ("zero_3",),
    ("zero_3", "schedule.reduce_each_microbatch=false"),
    ("zero_offload", "schedule.delayed_update=true"),
    ("zero_offload", "optimizer.clip_norm=0.1"),
]
SIZES = [
    (1, 1, 3),
    (1, 1, 4),
    (2, 1, 3),
    (2, 2, 4),
    (3, 1, 3),
    (3, 2, 4),
    (3, 3, 6),
    (4, 1, 4),
    (4, 1, 8),
    (4, 2, 5),
    (4, 3, 8),
]
CHOSEN = ((3, 2, 4), (4, 3, 8))  # in slow runs; the others are run by hand, an hour of them
TINY = ("model.num_layers=4", "model.hidden=16", "model.vocab=32", "model.seq_len=8")


@pytest.mark.parametrize(
    "devices, accelerators, microbatches",
    [slow(size) if size in CHOSEN else pytest.param(*size, marks=pytest.mark.exhaustive) for size in SIZES],
)
@pytest.mark.parametrize("words", ACCEPTED, ids=" ".join)
def test_nothing_is_missing_in_what_is_accepted(words, devices, accelerators, microbatches, rpbench):
    _check_order(rpbench, words, devices, accelerators, microbatches)


def _check_order(rpbench, words, devices, accelerators, microbatches, also_refused="num_microbatches"):
    size = f"num_devices={devices}", f"accelerators={accelerators}", f"num_microbatches={microbatches}"
    size += (f"model.num_layers={2 * devices}", *TINY[1:])  # two stages a device in V placement
    status, found, err = rpbench("check-order", f"schedule={words[0]}", *words[1:], *size)
    if status == 2:  # a size that the schedule does not serve
        assert f"{microbatches} microbatches" in err or any(
            word in err for word in (also_refused, "num_microbatches", "num_devices")
        ), err
        return
    assert (status, found[0]["findings"]) == (0, [])
    assert found[0]["grad_max_abs_diff"] == found[0]["weight_max_abs_diff"] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices, accelerators, microbatches", [(2, 1, 6), (3, 2, 6)])
@pytest.mark.parametrize("recompute", ["none", "except_last"])
@pytest.mark.parametrize("name", sorted({words[0] for words in ACCEPTED if len(words) == 1}))
def test_nothing_is_missing_whatever_is_run_again(name, recompute, devices, accelerators, microbatches, rpbench):
    _check_order(rpbench, (name, f"recompute={recompute}"), devices, accelerators, microbatches, "recompute=")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roundpipe", "roundpipe_call_async"])
def test_nothing_is_missing_where_one_device_is_brought_its_weights_alone(name, rpbench):
    _check_order(rpbench, (name, "offload=weights"), 1, 1, 4)


@pytest.mark.slow
def test_every_schedule_that_is_accepted_is_among_those():
    size = ("num_devices=2", "accelerators=2", "num_microbatches=8", "model.num_layers=8", *TINY[1:])
    wrong = []
    for name in sorted(registry.entries()):
        request, _ = _request([f"schedule={name}", *size])
        try:
            train.check_request(request, assembled_of(request))
        except ValueError:
            continue
        if name not in {words[0] for words in ACCEPTED}:
            wrong.append(name)
    assert not wrong
