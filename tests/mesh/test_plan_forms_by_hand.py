"""Closed forms of a search's plans, by hand: the bubbles of the papers, rings of gradients, the bytes of ZeRO."""

from dataclasses import replace

import numpy as np
import pytest

from rpbench.mesh.layout import SHARDED, Mesh, Sharing
from rpbench.mesh.memory import fullest
from rpbench.mesh.plan_search.closed_forms import Question, Timed, fastest_first, nearest, spare_bytes, time_plans
from rpbench.mesh.plan_search.plans import EVEN, SCHEDULES, Inner, Plans, Space, enumerate_plans
from rpbench.workload.counts import Experts
from tests.mesh.jobs import job
from tests.mesh.without_quirks import BANDWIDTH, CARD, MOVES, NEVER, OWN, PLAIN, RING, plain_machine

ONE = ("microbatch_s", "step_s", "optimizer_bytes", "jitter", "beside")
FREE = replace(PLAIN, split_penalty=1.0).with_constants(dict.fromkeys(ONE, NEVER))
ALONE = replace(FREE, gradients_beside=False, parameters_beside=False)
# Forward, gradient of the input and of the weights of a layer take 1, 1.5 and 1 s.
SECONDS = {"forward": 1.0, "backward": 2.5, "input_grad": 1.5, "weight_grad": 1.0, "recompute": 0.0, "head": 0.0}
BYTES = {"hop": 0.0, "kept": 0.0, "whole": 0.0, "made_again": 0.0, "working": 0.0, "logits": 0.0, "logits_waiting": 0.0}
PARAMETERS = {"dense": 0.0, "experts": 0.0, "matrix": 0.0}
SIZES = {"tensor": 1.0, "context": 1.0, "expert": 1.0}
LAYERS, MICROBATCHES = 16, 8


def timed(schedule="1f1b", shared="none", *, pipeline=1, data=1, chunks=1, software=FREE, devices=None, **columns):
    """One plan of 16 layers and 8 microbatches, with these seconds, bytes and parameters of a layer."""
    rank = columns.pop("lora_rank", None)
    training = {"training_mode": "lora" if rank else "full", "lora_rank": rank}
    own = replace(OWN, num_layers=LAYERS, tied=columns.pop("tied", False), **training)
    inner = Inner(int(columns.get("tensor", 1)), 1, int(columns.get("expert", 1)), 1, "none")
    where = plain_machine(devices or pipeline * data * inner.tensor, MOVES)
    asked = Question(own, where, software, 1024, MICROBATCHES * data, "bf16")
    numbers = (0, pipeline, data, chunks, MICROBATCHES, SCHEDULES.index(schedule), SHARDED.index(shared), EVEN)
    plans = Plans((inner,), SCHEDULES, *(np.array([number]) for number in numbers))
    values = {**SECONDS, **BYTES, **PARAMETERS, **SIZES, **columns}
    ones = {"bits": 1.0, "stepped": 1.0, "moved": 1.0, "fits": 0.0}
    values = {"learned": values["dense"], "learned_experts": values["experts"], **ones, **values}
    table = {name: np.array([value]) for name, value in values.items()}
    found = time_plans(asked, plans, table)
    return float(found.step_s[0]), float(found.peak_bytes[0])


@pytest.mark.parametrize(
    "schedule, chunks, bubble",
    [
        ("1f1b", 1, 3 * 3.5),
        ("gpipe", 1, 3 * 3.5),
        ("interleaved_1f1b", 2, 3 * 3.5 / 2),
        ("interleaved_1f1b", 4, 3 * 3.5 / 4),
        ("zb_h1", 1, 3 * (1 + 1.5 - 1)),
    ],
)
def test_bubbles_are_those_of_the_papers(schedule, chunks, bubble):
    """(p-1) (F + B), divided by chunks (Narayanan et al., SC'21); (p-1) (F + B - W) (Qi et al., ICLR'24, table 1)."""
    step, _ = timed(schedule, pipeline=4, chunks=chunks)
    each = LAYERS / 4
    assert step == pytest.approx(each * (MICROBATCHES * 3.5 + bubble))


def test_zb_h2_has_hardly_a_bubble_and_never_a_negative_one():
    work = LAYERS / 4 * MICROBATCHES * 3.5
    h2, h1 = (timed(name, pipeline=4)[0] - work for name in ("zb_h2", "zb_h1"))
    assert 0 <= h2 < h1 / 5
    two = [timed(name, pipeline=2)[0] - LAYERS / 2 * MICROBATCHES * 3.5 for name in ("zb_h2", "zb_h1")]
    assert two[0] / two[1] == pytest.approx(h2 / h1, rel=1e-3)  # both grow with the devices that fill
    for name in ("zb_h1", "zb_h2"):  # the gradients of weights fill it
        assert timed(name, pipeline=4, weight_grad=9.0)[0] == pytest.approx(work)


def test_halves_of_a_backward_take_longer_and_recomputation_does_not():
    known = replace(FREE, split_penalty=1.1)
    extra = timed("zb_h1", pipeline=4, software=known, recompute=1.0)[0] - timed("zb_h1", pipeline=4, recompute=1.0)[0]
    assert extra == pytest.approx(LAYERS / 4 * MICROBATCHES * 0.1 * 2.5)
    again = timed("1f1b", pipeline=4, software=known, recompute=1.0)[0] - timed("1f1b", pipeline=4)[0]
    assert again == pytest.approx(LAYERS / 4 * (MICROBATCHES + 3))


def test_the_head_makes_the_last_rank_the_busiest_and_fills_with_the_mean():
    step, _ = timed(pipeline=4, head=8.0)
    mean = (LAYERS * 3.5 + 8) / 4
    assert step == pytest.approx(MICROBATCHES * (LAYERS / 4 * 3.5 + 8) + 3 * mean)


def test_every_microbatch_loses_its_time_also_while_a_pipeline_fills():
    known = FREE.with_constants({"microbatch_s": 0.5})
    assert timed(pipeline=4, software=known)[0] - timed(pipeline=4)[0] == pytest.approx(0.5 * (MICROBATCHES + 3))
    known = FREE.with_constants({"step_s": 7.0})
    assert timed(software=known)[0] - timed()[0] == pytest.approx(7.0)


@pytest.mark.parametrize("data, pace", [(1, RING), (4, CARD)])
def test_filling_and_draining_pass_every_link_twice(data, pace):
    """Four stages on one node of eight, or on two."""
    step, none = (timed(pipeline=4, data=data, hop=each)[0] for each in (1e12, 0.0))
    assert step - none == pytest.approx(2 * 3 * 1e12 / pace)
    assert timed(hop=1e12) == timed()


def test_nodes_lose_a_share_for_each_doubling():
    known = FREE.with_constants({"jitter": 0.1})
    assert timed(data=8, software=known)[0] == timed(data=8)[0]
    assert timed(data=32, software=known)[0] == pytest.approx(1.2 * timed(data=32)[0])


# --- what replicas exchange ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared, volumes", [("none", 2 * 4), ("optimizer", 4 + 2)])
def test_replicas_sum_gradients_in_32_bits_and_gather_weights_in_16(shared, volumes):
    """Rings of n devices move (n - 1) / n of a gradient twice, or once and the new weights once."""
    found, none = (timed(shared=shared, data=4, software=ALONE, dense=each)[0] for each in (1e9, 0.0))
    assert found - none == pytest.approx(volumes * LAYERS * 1e9 * 3 / 4 / RING)


def test_gradients_that_are_shared_are_summed_after_every_backward():
    found, none = (timed(shared="gradients", data=4, software=ALONE, dense=each)[0] for each in (1e9, 0.0))
    assert found - none == pytest.approx((MICROBATCHES * 4 + 2) * LAYERS * 1e9 * 3 / 4 / RING)


@pytest.mark.parametrize("tied, matrices", [(False, 2), (True, 1)])
def test_both_end_matrices_are_exchanged_and_a_tied_one_once(tied, matrices):
    found, none = (timed(data=4, software=ALONE, tied=tied, matrix=each)[0] for each in (1e9, 0.0))
    assert found - none == pytest.approx(8 * matrices * 1e9 * 3 / 4 / RING)
    first, none = (timed(data=2, pipeline=4, software=ALONE, tied=tied, matrix=each)[0] for each in (1e9, 0.0))
    assert first - none == pytest.approx(8 * 1e9 / 2 / RING)  # one at either end


def test_experts_are_exchanged_among_those_that_have_the_same():
    found, none = (timed(data=8, software=ALONE, expert=4.0, experts=each)[0] for each in (1e9, 0.0))
    assert found - none == pytest.approx(8 * LAYERS * 1e9 / 2 / RING)
    alone, none = (timed(data=8, software=ALONE, expert=8.0, experts=each)[0] for each in (1e9, 0.0))
    assert alone == pytest.approx(none)


def test_what_is_exchanged_hides_behind_one_microbatch_of_its_computation():
    """The last 6 % have nothing to hide behind."""
    backward, none = LAYERS * 2.5, timed(data=4)[0]
    need = 8 * LAYERS * 1e9 * 3 / 4 / RING  # seconds
    assert need < backward
    assert timed(data=4, dense=1e9)[0] - none == pytest.approx(0.06 * need)
    assert timed(data=4, dense=1e11)[0] - none == pytest.approx(100 * need - backward)
    slower = FREE.with_constants({"beside": 0.1})
    assert timed(data=4, dense=1e9, software=slower)[0] - none == pytest.approx(0.16 * need)
    assert timed(data=4, dense=1e11, software=slower)[0] - none == pytest.approx(100 * need - backward + 0.1 * backward)


def test_parameters_that_are_shared_are_gathered_both_ways_and_their_gradients_summed():
    """FSDP of a layer: the longer of computing and moving, for every microbatch."""
    layer, none = 1e12 * 3 / 4 / RING, timed(data=4)[0]
    found = timed(shared="parameters", data=4, dense=1e12)[0]
    assert found == pytest.approx(MICROBATCHES * LAYERS * (2 + 2 + 4) * layer)
    assert timed(shared="parameters", data=4, dense=1e6)[0] == pytest.approx(none)
    ends = timed(shared="parameters", data=4, matrix=1e9)[0] - none
    assert ends == pytest.approx((2 * MICROBATCHES + 4) * 2 * 1e9 * 3 / 4 / RING)


@pytest.mark.parametrize("shared, parts", [("none", 1), ("optimizer", 4), ("parameters", 4)])
def test_the_optimizer_moves_its_bytes_of_every_parameter_a_device_owns(shared, parts):
    known, columns = FREE.with_constants({"optimizer_bytes": 30.0}), {"dense": 1e6, "matrix": 1e6, "experts": 1e6}
    found, free = (timed(shared=shared, data=4, software=each, **columns)[0] for each in (known, FREE))
    assert found - free == pytest.approx(30 * (2 * LAYERS + 2) * 1e6 / parts / BANDWIDTH)


def test_adapters_alone_are_summed_and_stepped_and_matrices_at_the_ends_are_not():
    """A thousandth of the layers' parameters learn, and no matrix at an end does."""
    known = ALONE.with_constants({"optimizer_bytes": 30.0})
    lora = timed(data=4, software=known, dense=1e6, learned=1e3, matrix=1e6, lora_rank=16)[0]
    summed = 2 * 4 * LAYERS * 1e3 * 3 / 4 / RING
    assert lora - timed(data=4, software=known)[0] == pytest.approx(summed + 30 * LAYERS * 1e3 / BANDWIDTH)


def test_adapters_have_states_beside_frozen_weights_of_few_bits():
    """Weights of layers in a quarter of 16 bits and of an end whole, both in 16 bits; adapters in 18 bytes each."""
    one, none = (timed(dense=1e6 * n, learned=1e3 * n, matrix=1e6 * n, bits=0.25, lora_rank=16)[1] for n in (1, 0))
    assert one - none == pytest.approx(2 * (0.25 * LAYERS + 2) * 1e6 + 18 * LAYERS * 1e3)


# --- bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shared, each",
    [("none", 2 + 4 + 12), ("optimizer", 2 + 4 + 12 / 4), ("gradients", 2 + (4 + 12) / 4), ("parameters", 18 / 4)],
)
def test_states_are_those_of_zero(shared, each):
    """Rajbhandari et al., SC'20, figure 1, gradients summed in 32 bits; of shared layers some are whole for a while."""
    assert timed(shared=shared, data=4, matrix=1e6)[1] == pytest.approx(2 * each * 1e6)
    experts = timed(shared=shared, data=4, expert=4.0, experts=1e6)[1] - 18 * LAYERS * 1e6  # nobody else has them
    dense = timed(shared=shared, data=4, dense=1e6)[1] - each * LAYERS * 1e6
    assert dense == pytest.approx(experts)
    if shared in ("none", "optimizer"):
        assert dense == pytest.approx(0)
    elif shared == "parameters":
        assert dense >= (2 + 4) * 1e6


@pytest.mark.parametrize(
    "schedule, chunks, layers_in_flight",
    [
        ("1f1b", 1, 4 * 4),
        ("gpipe", 1, 4 * MICROBATCHES),
        ("interleaved_1f1b", 2, 4 * (4 + 3 / 2)),
        ("zb_h1", 1, 4 * 4),
        ("zb_h2", 1, 4 * (2 * 4 - 1)),
    ],
)
def test_activations_in_flight_are_those_of_the_papers(schedule, chunks, layers_in_flight):
    """p, m, p + (p - 1) / v and 2 p - 1 microbatches of the first rank's layers."""
    assert timed(schedule, pipeline=4, chunks=chunks, kept=1.0)[1] == pytest.approx(layers_in_flight)
    assert timed(schedule, pipeline=4, chunks=chunks, kept=1.0, working=100.0)[1] == pytest.approx(
        layers_in_flight + 100
    )


def test_logits_are_on_the_last_rank_one_at_a_time_and_of_all_microbatches_in_gpipe():
    assert timed(pipeline=4, logits=10.0, logits_waiting=10.0)[1] == pytest.approx(10)
    assert timed("gpipe", pipeline=4, logits=10.0, logits_waiting=10.0)[1] == pytest.approx(10 * MICROBATCHES)
    assert timed("gpipe", pipeline=4, logits=10.0)[1] == pytest.approx(10)
    assert timed("gpipe", pipeline=4, kept=1.0, logits=10.0)[1] == pytest.approx(4 * MICROBATCHES + 10)
    assert timed(pipeline=4, kept=1.0, logits=10.0)[1] == pytest.approx(16)  # the first rank has 16, the last 14


def test_as_few_layers_run_again_as_the_fullest_rank_has_no_room_for():
    """The first of four ranks has four layers, and four microbatches in flight."""
    room = plain_machine(4, MOVES).device.memory_bytes
    for whole, kept in (
        (room / 4.5, 1),
        (room / 8.5, 2),
        (room / 11, 2),
        (room / 13, 3),
        (room / 17, 4),
        (2 * room, 0),
    ):
        columns = {"recompute": 1.0, "whole": whole}
        found, peak = timed(pipeline=4, fits=1.0, **columns)
        assert found == pytest.approx(timed(pipeline=4, recompute=1.0 - kept / 4)[0])
        assert peak == 0  # with all recomputed
        assert timed(pipeline=4, **columns)[0] == timed(pipeline=4, recompute=1.0)[0]


def test_no_more_is_in_flight_than_there_is():
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h2", 1)):
        found = timed(schedule, pipeline=8, chunks=chunks, kept=1.0)[1]
        assert found <= LAYERS / 8 * MICROBATCHES


# --- which plans there are and which fit -----------------------------------------------------------------------


def plans_of(devices=8, layers=8, batch=16, own=OWN, **choices):
    space = Space(**{"max_tensor": 1, "sequences": (1,), "recomputes": ("none",), **choices})
    return enumerate_plans(replace(own, num_layers=layers), plain_machine(devices), 1024, batch, space)


def test_meshes_are_the_divisors_of_devices_and_layers():
    plans = plans_of(schedules=("1f1b",), shared=("none",))
    found = sorted(zip(plans.pipeline.tolist(), plans.data.tolist(), plans.microbatches.tolist(), strict=True))
    assert found == [(1, 8, 2), (2, 4, 4), (4, 2, 8), (8, 1, 16)]
    assert set(plans_of(layers=4, schedules=("1f1b",)).pipeline.tolist()) == {1, 2, 4}


def test_tensor_shards_divide_heads_and_stay_in_a_node():
    """Of eight heads, four of keys, and 16 devices in nodes of eight."""
    plans = plans_of(16, max_tensor=64, schedules=("1f1b",))
    assert {inner.tensor for inner in plans.inners} == {1, 2, 4, 8}
    plans = plans_of(16, own=replace(OWN, heads=12, key_value_heads=4, head_dim=128), max_tensor=64)
    assert {inner.tensor for inner in plans.inners} == {1, 2, 4}
    assert {inner.context for inner in plans_of(8, max_context=4).inners} == {1, 2, 4}


def test_experts_are_dealt_to_powers_of_two_of_devices_that_divide_them():
    own = replace(OWN, experts=Experts(total=12, active=2, inner=64))
    plans = plans_of(own=own, schedules=("1f1b",))
    assert {inner.expert for inner in plans.inners} == {1, 2, 4}
    for number in range(plans.count):
        mesh = plans.mesh(number)  # refuses experts on more devices than a rank has
        assert mesh.data * mesh.tensor * mesh.context % mesh.expert == 0


def test_states_are_shared_with_somebody_and_held_for_long_by_no_pipeline():
    plans = plans_of(schedules=("1f1b",))
    found = {(p > 1, d > 1, SHARDED[s]) for p, d, s in zip(plans.pipeline, plans.data, plans.shared, strict=True)}
    assert found == {
        *((False, True, what) for what in SHARDED),
        *((True, True, what) for what in ("none", "optimizer")),
        (True, False, "none"),
    }


@pytest.mark.parametrize("schedules", [(), ("1f1b",), ("gpipe", "zb_h1")])
@pytest.mark.parametrize("alone", [(), ("none",), ("gradients", "parameters")])
def test_plans_without_a_pipeline_share_what_is_asked_for(schedules, alone):
    if not schedules and not alone:
        with pytest.raises(ValueError, match="no mesh of 8 devices"):
            plans_of(schedules=schedules, without_pipeline=alone)
        return
    plans = plans_of(schedules=schedules, without_pipeline=alone, max_tensor=8)
    piped = plans.pipeline > 1
    assert {SHARDED[number] for number in plans.shared[~piped]} == set(alone)
    assert {plans.schedules[number] for number in plans.schedule[piped]} == set(schedules)


def test_chunks_are_those_for_which_there_are_layers():
    plans = plans_of(schedules=("interleaved_1f1b",), shared=("none",), without_pipeline=())
    found = {(p, v) for p, v in zip(plans.pipeline.tolist(), plans.chunks.tolist(), strict=True)}
    assert found == {(2, 2), (2, 3), (2, 4), (4, 2)}
    plans = plans_of(schedules=("interleaved_1f1b",), shared=("none",), max_chunks=2)
    assert set(zip((plans.pipeline > 1).tolist(), plans.chunks.tolist(), strict=True)) == {(True, 2), (False, 1)}


def test_what_fits_leaves_bytes_after_the_reserve_and_the_fragments():
    known = replace(FREE, scale=2.0)
    where = replace(plain_machine(8), device_memory_bytes=1000, reserved_memory_bytes=100)
    asked = Question(OWN, where, known, 1024, 8, "bf16")
    found = Timed(np.array([3.0, 1.0, 2.0, 4.0]), np.array([450.0, 451.0, 400.0, 600.0]))
    spare = spare_bytes(asked, found)
    assert spare.tolist() == [0.0, -2.0, 100.0, -300.0]
    assert fastest_first(found, spare).tolist() == [2, 0]
    assert nearest(asked, spare).tolist() == [2, 0, 1]  # the last one lacks more than 15 %
    assert nearest(asked, spare - 1000).tolist() == [2]  # what needs least is always there


@pytest.mark.parametrize("need, answer", [(0.87, "ok"), (0.89, "close"), (1.11, "close"), (1.13, "oom")])
def test_a_verdict_has_a_margin_of_two_standard_deviations(need, answer):
    found = job(Mesh(sharing=Sharing("none")))
    room = found.machine.device.memory_bytes
    size = (need * room - (found.machine.reserved_memory_bytes or 0)) / found.software.scale
    assert fullest(found, [{"weights": size}]).verdict().answer == answer
