"""Frozen layers and 8-bit moments against closed forms: bytes, seconds, traffic of the optimizer, and advice."""

import io
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.commands.advising.advise import advise_on
from rpbench.cost.constant import unit_times
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import OptimizerTraffic, Traffic
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entry
from rpbench.workload.architecture import Architecture

WHOLE = Architecture("small", num_layers=6, hidden=64, heads=4, vocab=500, seq_len=32, family="llama")
STATE_8 = 4 + 2 + 8 / 2048  # a master in 32 bits, two moments of a byte, and a scale in 32 bits of 2,048 of each


@given(st.integers(0, 6), st.sampled_from([8, 32]), st.booleans())
def test_bytes_are_those_of_what_is_trained(frozen, bits, tied):
    model = replace(WHOLE, frozen_layers=frozen, optimizer_bits=bits, tied=tied)
    sizes, state = model_bytes(model, 64), 12 if bits == 32 else STATE_8
    layer, matrix = model.layer_parameters, 500 * 64
    for number, each in enumerate(sizes.layers):
        learns = number >= frozen
        assert each.weights == 2 * layer
        assert (each.gradients, each.optimizer) == (2 * layer * learns, round(state * layer) * learns)
        assert (each.activations > 0) == learns
    assert sizes.embedding.optimizer == (12 * matrix if frozen == 0 or tied else 0)
    assert sizes.head.optimizer == round(state * (matrix + 64))
    assert model.trainable_parameters == WHOLE.total_parameters - frozen * layer - matrix * (
        tied + (frozen > 0 and not tied)
    )


@given(st.integers(0, 6))
def test_nothing_goes_back_through_frozen_layers(frozen):
    """In unit costs a layer takes 1 forth, 1 again, and 2 back; on one device nothing waits."""
    times = unit_times(6).frozen(frozen)
    costs = times.table(symmetric((6,)))
    backward = costs.work[Kind.B][0]
    plain = unit_times(6).table(symmetric((6,))).work[Kind.B][0]
    assert backward.main == plain.main - frozen * unit_times(6).backward[0]
    assert backward.pre == plain.pre - frozen * unit_times(6).recompute[0]
    assert costs.work[Kind.F] == unit_times(6).table(symmetric((6,))).work[Kind.F]


@pytest.mark.parametrize("bits, bytes_a_parameter", [(32, 28.0), (8, 28.0 - 2 * (12 - STATE_8))])
def test_a_step_reads_and_writes_the_state_that_there_is(bits, bytes_a_parameter):
    """Of 28 bytes of traffic 24 are the state's, read and written."""
    model = replace(WHOLE, optimizer_bits=bits, frozen_layers=2)
    sizes = model_bytes(model, 64)
    schedule = entry("1f1b").build(Shape(3, 3, 4)).with_partition(symmetric((2, 2, 2)))
    optimizer = OptimizerTraffic(on_host=40, on_device=28, device_bytes_per_s=1e6)
    costs = unit_times(6).table(symmetric((2, 2, 2)))
    steps = Traffic(sizes, Machine("any"), optimizer=optimizer).charged(schedule, costs).work[Kind.STEP]
    assert steps[0].main == 0
    assert steps[1].main == pytest.approx(2 * model.layer_parameters * bytes_a_parameter / 1e6, rel=1e-4)


@pytest.mark.parametrize("optimizer, moved", [(None, 0), (OptimizerTraffic(40, 28, 1e6), 40 - 2 * (12 - STATE_8))])
def test_a_step_on_the_host_moves_no_fewer_bytes_than_none(optimizer, moved):
    """Without a charge for it, the costs have its time, and others on the host's memory see nothing of it."""
    found = entry("zero_offload")
    order = found.build(Shape(2, 3, 4)).with_partition(symmetric((2, 2, 2)))
    schedule = found.lower(order, prefetch=1, **found.options)
    sizes = model_bytes(replace(WHOLE, optimizer_bits=8), 64)
    times = Traffic(sizes, Machine("any"), optimizer=optimizer).times(schedule, 1)
    steps = [each for each in Analysis(schedule).payload.values() if each.lane == "host" and each.stage == 1]
    assert sum(map(times.bytes_of, steps)) == pytest.approx(2 * WHOLE.layer_parameters * moved, rel=1e-3)


SIZES = ("num_layers=8", "hidden=1024", "heads=8", "vocab=8000", "seq_len=1024", "gpu=rtx4090", "num_devices=2")


def test_advice_knows_both_and_its_commands_say_the_same(rpbench):
    words = [*SIZES, "schedules=1f1b,zero_2"]
    plain = {row["schedule"]: row for row in advise_on(words, io.StringIO())["ranking"]}
    answer = advise_on([*words, "frozen_layers=4", "optimizer_bits=8"], io.StringIO())
    assert answer["parameters"]["trained"] < answer["parameters"]["all"] * 0.6
    for row in answer["ranking"]:
        assert row["tokens_per_s"] > 1.2 * plain[row["schedule"]]["tokens_per_s"]
        assert 0 < row["mfu"] < 1
        status, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
        assert (status, record["status"]) == (0, "ok")
        assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=0.05)
        assert max(record["peak_memory_bytes"]) == pytest.approx(row["peak_memory_bytes"], rel=1e-6)
    bits = {row["schedule"]: row for row in advise_on([*words, "optimizer_bits=8"], io.StringIO())["ranking"]}
    state = bits["zero_2"]["memory"]["optimizer state"] / plain["zero_2"]["memory"]["optimizer state"]
    assert STATE_8 / 12 < state < 0.6  # the embedding keeps 32 bits


@pytest.mark.parametrize(
    "words, expected",
    [
        (("++model.frozen_layers=99", "model=tiny_gpt"), "freeze as many at most"),
        (("++model.optimizer_bits=4", "model=tiny_gpt"), "Adam's moments have 8 or 32 bits"),
        (("++model.frozen_layers=1", "model=tiny_gpt", "backend=virtual"), "simulated only"),
        (("++model.frozen_layers=1", "model=qwen3_235b_lora"), "all is frozen: leave it out"),
        (
            ("++model.frozen_layers=1", "model=llama3_8b", "cluster=dgx_h100", "num_devices=16", "mesh.data=2"),
            "under a mesh are not modelled",
        ),
    ],
)
def test_what_cannot_be_is_refused(words, expected, rpbench):
    status, _, told = rpbench("schedule=1f1b", *words)
    assert status == 2
    assert expected in told
