"""Schedules that once crashed, trained other weights or were refused late: each is refused beforehand now, or right."""

import random
import re
from dataclasses import replace

import pytest
from judging import Verdict, judged
from schedule_texts import every_other_input

from rpbench.ir.checks.check import check
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights, from_text, to_text
from rpbench.passes.lower import add_steps, split_backward
from rpbench.passes.offload import offload, shard, stream
from rpbench.registry import entry


def order(name: str, ranks: int, layers: tuple[int, ...], microbatches: int, steps: int = 1, **options) -> Schedule:
    shape = Shape(ranks, len(layers), microbatches, num_steps=steps)
    return entry(name).build(shape, **options).with_partition(symmetric(layers))


def complete(name: str, ranks: int, layers: tuple[int, ...], microbatches: int, steps: int = 1, **options) -> Schedule:
    """An order with all that its method moves."""
    found = entry(name)
    made = order(name, ranks, layers, microbatches, steps, **options)
    return found.lower(made, prefetch=1, **(found.options | options))


def verdicts(text: str) -> set[str]:
    """What becomes of it whatever is recomputed, a stage or a layer at a time, and whoever is faster."""
    found: list[Verdict] = [judged(text, random.Random(seed)) for seed in range(8)]
    assert {verdict.what for verdict in found} <= {"same", "refused"}, (found, text)
    return {verdict.what for verdict in found}


def refusal(text: str) -> str:
    """What the check says; it is refused before anything is simulated or trained."""
    with pytest.raises(ScheduleError) as caught:
        check(from_text(text))
    assert verdicts(text) == {"refused"}
    return str(caught.value)


# --- the host's half of a selective optimizer ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "taken_out, said",
    [
        (r" \d+STORE:G", "rank 0 stores the gradient of stage 0 0 times, and the host has a part of [1, 2]"),
        (r" 1STEP_REST@2", "1STEP_REST@2 is missing: what the host has added up is never applied"),
        (r" \d+STEP_REST@\d", "0STEP_REST@2 is missing"),
        (r" \d+LOAD:P@\d", "rank 0 brings stage 0 for versions [], and the host has something at [2]"),
        (r" \d+STEP(_REST)?@\d", "0LOAD:P@2 brings columns that the host has stepped, and there is no STEP"),
        (r" \d+REDUCE_GRAD", "1STORE:G is of what rank 0 has, and columns are chosen by the sum of all"),
    ],
)
def test_a_part_of_what_a_selective_optimizer_moves_is_refused_without_the_rest(taken_out, said):
    text = to_text(complete("zenflow", 2, (1, 1), 2, 2))
    assert verdicts(text) == {"same"}
    assert said in refusal(re.sub(taken_out, "", text))


def test_a_warm_up_before_steps_of_everything_trains():
    """The warm-up's gradients go to the host, and no later ones."""
    assert verdicts(to_text(complete("zenflow", 2, (1, 1), 2, 3, topk=1.0, num_warmup_steps=1))) == {"same"}


# --- OVERLAPs -------------------------------------------------------------------------------------------------------


def test_two_backwards_of_a_stage_around_something_else_in_one_overlap():
    """Both are of one visit: their gradients leave the device once."""
    text = to_text(offload(add_steps(order("gpipe", 1, (2,), 4), lane="host"), gradients="step"))
    overlapped = text.replace("0F2 0F3 0B0 0B1 0B2 0B3", "0F2 0B0 (0B1;0F3;0B2)OVERLAP 0B3")
    assert overlapped != text
    assert verdicts(overlapped) == {"same"}


def test_replicas_that_reduce_what_an_overlap_of_five_has_made():
    text = to_text(shard(add_steps(order("dualpipe", 4, (1, 1, 0, 0), 8)), parameters=None, gradients="step"))
    row = next(line for line in text.splitlines() if line.startswith("0/compute"))
    (one, other), (third, fourth) = re.findall(r"\((\w+);(\w+)\)OVERLAP", row)[:2]
    joint = row.replace(f"({one};{other})OVERLAP ({third};{fourth})OVERLAP", f"({other};{one};{fourth};{third})OVERLAP")
    assert joint != row
    verdicts(text.replace(row, joint))


def test_two_visits_that_begin_with_one_overlap_gather_their_own_shards():
    text = """# rpbench-schedule 1
# name=by_hand ranks=1 stages=2 backward_stages=2 microbatches=2 steps=1 parts=1 fused=0 policy=flush weights=bound \
placement=0,0 partition=0-1
0/compute: 0F0 1F0 (0F1;1B0)OVERLAP (1F1;0B0)OVERLAP 1B1 0B1
0/h2d: 0LOAD:P@0 1LOAD:P@0 1FREE:P 0FREE:P
0/d2h: 1STORE:G 0STORE:G 1STORE:G 0STORE:G
0/net: 0UNSHARD 1UNSHARD 0RESHARD 0UNSHARD 1RESHARD 1UNSHARD 0RESHARD 1UNSHARD 1RESHARD 0UNSHARD 1REDUCE_GRAD \
1RESHARD 1UNSHARD 0RESHARD 0UNSHARD 0REDUCE_GRAD 1REDUCE_GRAD 0RESHARD 1RESHARD 0REDUCE_GRAD
0/host: 1STEP@1 0STEP@1
"""
    assert verdicts(text) == {"same"}


# --- weights, where they are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [True, False])
def test_stages_that_are_cut_apart_are_not_bound(moved):
    shape = Shape(2, 2, 2, 3, fused=True)
    made = entry("roundpipe").build(shape).with_partition(Partition((2, 1), (1, 2, 0), fused=True))
    text = to_text(stream(add_steps(made, lane="host")) if moved else made)
    assert "same" in verdicts(text)
    assert "whose layers are others in backward" in refusal(text.replace("weights=streamed", "weights=bound"))


def test_what_goes_from_rank_to_rank_is_not_in_shards():
    stepped = add_steps(order("chimera", 2, (1, 1), 2), lane="host")
    text = to_text(offload(shard(stepped, gradients=None), parameters="visit"))
    assert "goes from rank to rank" in refusal(text.replace("0LOAD:P@0 ", "0LOAD:P@0>1 ", 1))


def test_replicas_reduce_equally_often():
    text = to_text(shard(add_steps(order("chimera", 2, (1, 1), 4)), parameters=None, gradients="visit"))
    assert verdicts(text) == {"same"}
    assert "has no counterpart on rank" in refusal(
        text.replace("0/net: 1REDUCE_GRAD 0REDUCE_GRAD", "0/net: 1REDUCE_GRAD")
    )


def test_a_stepped_head_in_shards_reduces_nothing():
    assert verdicts(to_text(shard(add_steps(order("interlaced", 1, (2,), 2)), parameters=None))) == {"refused"}


# --- recomputation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, layers", [("1f1b", (3,)), ("zb_h1", (3,)), ("looped_bfs", (3, 2)), ("gis", (2,))])
def test_inputs_are_made_again_a_layer_at_a_time(name, layers):
    """Of stages that no R stands for, as for the top of those whose one input is kept."""
    assert verdicts(to_text(every_other_input(add_steps(order(name, 1, layers, 2, 2)), 2))) == {"same"}


def test_no_input_is_made_again_for_a_stage_that_keeps_its_own():
    """The last stage turns at once, so `recompute=except_last` lets it keep what the stage below makes twice."""
    text = to_text(every_other_input(add_steps(order("looped_bfs", 1, (1, 1), 1)), 2))
    early = re.sub("1F0 (.*)0R0 ", r"0R0 1F0 \1", text)
    assert early != text
    assert verdicts(early) == {"same"}


def test_a_recomputation_of_a_segment_behind_its_backward_is_refused():
    text = to_text(order("seq1f1b", 1, (1,), 1))
    assert "no rank can move" in refusal(text.replace("0B0\n", "0B0 0R0\n"))
    assert verdicts(text.replace("0B0\n", "0R0 0B0\n")) == {"same"}


def test_activations_of_a_stage_without_layers_move():
    assert verdicts(to_text(order("bpipe", 4, (1, 0, 0, 0), 5))) == {"same"}


# --- shares of matrices ---------------------------------------------------------------------------------------------


def test_one_share_of_every_matrix_is_recomputed_or_refused():
    text = to_text(complete("megatron_tp", 1, (1, 1), 3, 2))
    assert "same" in verdicts(text)
    assert "same" in verdicts(text.replace(" 0B1 ", " 0B1@0 "))  # which it reads, said


def test_all_shares_of_a_backward_come_in_as_many_pieces():
    made = order("megatron_tp", 2, (1, 1), 1)
    rows = made.compute(0), split_backward(made).compute(1)
    assert "meets the shares of 2 devices, and 1 come to it" in refusal(to_text(replace(made, rows=rows)))


# --- sums and clocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options", [("tawpipe", {"groups": 2}), ("weipipe", {"buffers": 4})])
def test_sums_that_go_from_rank_to_rank_keep_their_order_where_weights_are_streamed(name, options):
    made = complete(name, 4, (2, 0, 1, 0), 8, 2, **options)
    assert verdicts(to_text(replace(made, weights=Weights.STREAMED))) == {"same"}


def test_steps_that_end_together_have_no_steady_bubble():
    text = to_text(order("gpipe", 2, (1, 0), 2, 3))
    rows = {
        "0": "0F0 0F1 0F2 0B2 0B1 0B0 0F4 0F3 0F5 0B5 0B4 0B3",
        "1": "1F0 1F1 1F2 1B2 1B1 1B0 1F3 1F4 1F5 1B5 1B4 1B3",
    }
    for device, row in rows.items():
        text = re.sub(rf"(?m)^{device}/compute:.*$", f"{device}/compute: {row}", text)
    assert verdicts(text) == {"same"}


def test_a_bare_carriage_return_ends_a_row_of_torchs_table():
    assert verdicts("0F0,0F1,0B0,0B1\r1F0,1B0,1F1,1B1") == {"same"}
    assert verdicts('0F0,"0F1,0B0\r1F0,\x00') == {"refused"}
