"""Bytes on a device by a replay of ours, action by action; what fits; sizes of a model by the papers' counts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.footprint.fitting import Moments, fitting_layers, undominated
from rpbench.cost.footprint.memory import Footprint, classes_of
from rpbench.cost.footprint.replicas import _least_at_peak, host_bytes, ssd_bytes
from rpbench.cost.footprint.sizes import LayerSize, ModelBytes, model_bytes, saved_state
from rpbench.ir.action import Kind
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture

NOTHING = LayerSize(0, 0, 0)
LAYERS = tuple(LayerSize(10, 10, 60, activations=1000 * n) for n in range(1, 9))
SIZES = ModelBytes(
    LAYERS,
    NOTHING,
    NOTHING,
    boundary=7,
    logits=400,
    logits_chunk=100,
    keeps_activations=True,
    until_weights=0.25,
    logits_until_weights=0.5,
)
OWN = Architecture("small", 4, 64, 4, 100, seq_len=32)
# Copies of stages, chunks in turn and in a V, split backwards, and actions that run together.
ORDERS = (
    ("1f1b", 4, 4),
    ("gpipe", 4, 4),
    ("interleaved_1f1b", 4, 8),
    ("zb_h1", 4, 4),
    ("zb_h2", 4, 4),
    ("zb_v", 4, 8),
    ("chimera", 4, 4),
    ("dualpipe", 4, 4),
)


def built(name, ranks, stages, microbatches=8):
    order = entry(name).build(Shape(ranks, stages, microbatches))
    return order.with_partition(symmetric((8 // stages,) * stages))


def replayed(order, device, of_stage, of_logits, sizes=SIZES, of_inputs=None):
    """The most bytes a device holds: all of a microbatch from F on; B lets all go, I a part and W the rest.

    `of_inputs`: of the layers of each stage that run again. B or I lets them go, for then all that W needs is there.
    """
    held = most = 0.0
    last = order.shape.num_stages - 1
    for action in (part for each in order.compute(device) for part in each.sub or (each,)):
        size, logits = of_stage[action.stage], of_logits * (action.stage == last)
        count = sizes.each[action.microbatch % len(sizes.each)] if sizes.each else 1
        if of_inputs:
            held += of_inputs[action.stage] * ((action.kind is Kind.F) - (action.kind in (Kind.B, Kind.I)))
        kept = sizes.until_weights * size + sizes.logits_until_weights * logits
        if action.kind is Kind.F:
            held += (size + logits) * count
        elif action.kind is Kind.B:
            held -= (size + logits) * count
        elif action.kind is Kind.I:
            held -= (size + logits - kept) * count
        elif action.kind is Kind.W:
            held -= kept * count
        most = max(most, held)
    assert held == pytest.approx(0)
    return most


@pytest.mark.parametrize("name, ranks, stages", ORDERS)
@pytest.mark.parametrize("each", [(), (1.0, 0.5, 0.25, 0.5, 1.0, 0.75, 0.5, 0.25)])
def test_activations_that_stay_are_those_of_a_replay(name, ranks, stages, each):
    order, sizes = built(name, ranks, stages), replace(SIZES, each=each)
    of_stage = [sum(part) for part in np.array_split([layer.activations for layer in LAYERS], stages)]
    found = classes_of(order, sizes, [0] * ranks)
    for device in range(ranks):
        assert found[device]["activations"] == pytest.approx(replayed(order, device, of_stage, 400, sizes), abs=1)


@pytest.mark.parametrize("name, ranks, stages", ORDERS)
def test_where_some_layers_stay_their_stages_keep_an_input_for_the_others(name, ranks, stages):
    """Of what runs again there is one stage at a time; logits stay with the last stage's activations."""
    order, each = built(name, ranks, stages), len(LAYERS) // stages
    sizes = replace(SIZES, layers=tuple(layer._replace(inputs=10) for layer in LAYERS))
    keeps = [1, *[0] * (stages - 2), each]  # of the first stage the last layer, of the last stage all
    of_layers = np.array_split([layer.activations for layer in LAYERS], stages)
    of_stage = [int(sum(part[: each - stays])) for part, stays in zip(of_layers, keeps, strict=True)]  # made again
    kept = [int(sum(part[each - stays :])) for part, stays in zip(of_layers, keeps, strict=True)]
    inputs = [10 * (each - stays) for stays in keeps]
    found = classes_of(order, sizes, [0] * ranks, keeps)
    for device in range(ranks):
        here = {part.stage for each in order.compute(device) for part in each.sub or (each,)}
        assert found[device]["activations"] == pytest.approx(
            replayed(order, device, kept, 400, of_inputs=inputs), abs=1
        )
        again = max(min(of_stage[stage], LAYERS[-1].activations) for stage in here)
        assert found[device].get("recomputed activations", 0) == again


@pytest.mark.parametrize("name, ranks, stages", ORDERS)
def test_a_device_that_keeps_nothing_holds_as_much_whatever_others_keep(name, ranks, stages):
    order, cut = built(name, ranks, stages), np.full((1, stages), len(LAYERS) // stages)
    sizes = replace(SIZES, layers=tuple(layer._replace(inputs=10) for layer in LAYERS))
    footprint = Footprint(order, sizes, peak_in_flight(build_graph(order)))
    plain = footprint.peaks(cut, cut, 0 * cut)
    here = [{part.stage for each in order.compute(device) for part in each.sub or (each,)} for device in range(ranks)]
    for stage in range(stages - 1):  # beside the last stage's activations there are its logits
        some = footprint.peaks(cut, cut, cut * (np.arange(stages) == stage))
        others = [device for device in range(ranks) if stage not in here[device]]
        assert some[0, others].tolist() == plain[0, others].tolist()


def test_a_plan_needs_as_much_beside_other_plans_as_alone():
    """Also one that recomputes all, with the head alone on the last stage, beside one that keeps activations."""
    order, cuts = built("1f1b", 4, 4), np.array([[2, 2, 2, 2], [3, 3, 2, 0]])
    footprint, keeps = Footprint(order, SIZES, peak_in_flight(build_graph(order))), cuts * [[1], [0]]
    both = footprint.peaks(cuts, cuts, keeps).tolist()
    assert both == [footprint.peaks(*[table[[plan]] for table in (cuts, cuts, keeps)])[0].tolist() for plan in (0, 1)]


@pytest.mark.parametrize("room", [0, 2_000, 10_000])
def test_activations_that_move_to_a_partner_take_its_room(room):
    """BPipe keeps those of the first stages on the last devices, which must have room for them beside their own."""
    order, cut = built("bpipe", 4, 4), np.full((1, 4), 2)
    footprint = Footprint(order, SIZES, peak_in_flight(build_graph(order)))
    limit = int(footprint.peaks(cut, cut, 0 * cut).max()) + room
    keeps = footprint.fitting(cut, cut, limit)
    assert footprint.peaks(cut, cut, keeps).max() <= limit
    assert keeps.any() or not room


@pytest.mark.parametrize("name, ranks, stages", [order for order in ORDERS if order[0].startswith("zb")])
def test_between_the_halves_stays_what_the_gradient_of_the_weights_needs(name, ranks, stages):
    order, sizes = built(name, ranks, stages), replace(SIZES, keeps_activations=False)
    of_stage = [sum(part) for part in np.array_split([layer.activations for layer in LAYERS], stages)]
    for device, found in enumerate(classes_of(order, sizes, [3] * ranks)):
        waiting = most = 0.0
        for action in order.compute(device):
            waiting += of_stage[action.stage] * ((action.kind is Kind.I) - (action.kind is Kind.W))
            most = max(most, waiting)
        assert found.get("activations between halves", 0) == pytest.approx(0.25 * most, abs=1)
        assert found["kept stage inputs"] == 3 * SIZES.boundary


def test_layers_that_are_made_again_one_by_one_keep_their_inputs_and_run_one_at_a_time():
    layers = tuple(layer._replace(inputs=10) for layer in LAYERS)
    order = built("1f1b", 4, 4)
    found = classes_of(order, replace(SIZES, layers=layers, keeps_activations=False), [99] * 4)
    for rank in range(4):
        assert found[rank]["kept stage inputs"] == (4 - rank) * 2 * 10
        assert found[rank]["recomputed activations"] == min(8000, (4 * rank + 3) * 1000)  # no more than a layer's
    whole = replace(SIZES, layers=layers)
    kept, cut = Footprint(order, whole, [0] * 4), np.full((1, 4), 2)
    for stay, held, again in ((2, [3000, 7000, 11000, 15000], 0), (1, [2010, 4010, 6010, 8010], 1)):
        found = kept.classes(cut, cut, np.full((1, 4), stay))
        assert found["activations"][0].tolist() == [round(replayed(order, rank, held, 400)) for rank in range(4)]
        made = found.get("recomputed activations", np.zeros((1, 4)))
        assert made[0].tolist() == [again * layers[2 * rank].activations for rank in range(4)]


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_an_action_on_a_segment_holds_its_tokens_of_everything_that_is_made_again(segments):
    """p - s + k - 1 of them are in flight. Their inputs by layer were counted as those of whole microbatches."""
    layers = tuple(layer._replace(inputs=20) for layer in LAYERS)
    sizes = replace(SIZES, layers=layers, keeps_activations=False, working=80)
    order = entry("seq1f1b").build(Shape(4, 4, 8), num_segments=segments).with_partition(symmetric((2,) * 4))
    for rank, found in enumerate(classes_of(order, sizes, [99] * 4)):
        assert found["kept stage inputs"] == (4 - rank + segments - 1) * 2 * 20 / segments
        assert found["recomputed activations"] == min(8000, (4 * rank + 3) * 1000) / segments
        assert found["logits"] == (rank == 3) * 400 / segments
        assert found["working set"] == 80 / segments


def test_what_a_backward_needs_besides_is_on_every_device():
    found = classes_of(built("1f1b", 4, 4), replace(SIZES, working=55), [0] * 4)
    assert [each["working set"] for each in found] == [55] * 4
    assert "working set" not in classes_of(built("1f1b", 4, 4), SIZES, [0] * 4)[0]


# --- the moments of a device -----------------------------------------------------------------------------------

counts = st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=8)


@settings(max_examples=30)
@given(counts)
def test_rows_that_others_have_as_much_of_are_left_out(rows):
    """Whatever the weights, the most is that of all rows; and none of those that stay is below another."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    found = undominated(table)
    everything = {(0, 0, 0), *map(tuple, table.tolist())}
    maximal = {
        row for row in everything
        if not any(other != row and all(x >= y for x, y in zip(other, row, strict=True)) for other in everything)
    }  # fmt: skip
    assert {tuple(row) for row in found.tolist()} == maximal
    assert len(found) == len(maximal)


@settings(max_examples=20)
@given(st.lists(counts, min_size=1, max_size=3), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_peaks_of_all_devices_at_once_are_those_of_each(devices, each):
    tables = [undominated(np.array(rows, np.int64).reshape(-1, 3)) for rows in devices]
    found = Moments(tables).peaks(np.array([each, [1, 0, 0]]))
    assert found.tolist() == [
        [max(int(np.dot(row, sizes)) for row in table) for table in tables] for sizes in (each, [1, 0, 0])
    ]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=4, max_size=4),
    st.integers(0, 30),
)
def test_as_few_layers_run_again_as_fit_those_of_the_last_stages_first(sizes, placement, limit):
    """Each layer of a stage from the last down stays if its devices have room for it beside those that stay already."""
    holds = np.array([[int(device in devices) for device in (0, 1)] for devices in placement])
    base = 3

    def peaks(keeps):
        return base + (keeps * np.array(sizes)) @ holds

    layers, stays, used = np.array([[3, 1, 2, 3]]), [0] * 4, [base, base]
    for stage in reversed(range(4)):
        for _ in range(layers[0, stage]):
            more = [used[device] + sizes[stage] * int(holds[stage, device]) for device in (0, 1)]
            if base <= limit and all(more[device] <= limit for device in placement[stage]):
                stays[stage], used = stays[stage] + 1, more
    assert fitting_layers(peaks, layers, holds, limit).tolist() == [stays]
    assert (fitting_layers(peaks, layers, holds, None) == layers).all()


# --- sizes -----------------------------------------------------------------------------------------------------


def test_gradients_that_add_up_in_32_bits_are_twice_as_many_bytes():
    found = replace(SIZES, summed_bytes=4, embedding=LayerSize(1, 2, 3), head=LayerSize(4, 6, 8)).added_up
    assert [layer.gradients for layer in (*found.layers, found.embedding, found.head)] == [20] * 8 + [4, 12]
    assert (found.layers[0].weights, found.layers[0].optimizer, found.head.weights) == (10, 60, 4)
    assert found.added_up == found
    assert SIZES.added_up == SIZES


def test_a_tied_matrix_counts_once_where_both_its_ends_are():
    tied = replace(SIZES, tied=True, embedding=LayerSize(8, 8, 48), head=LayerSize(8, 8, 48))
    alone, apart = entry("1f1b").build(Shape(1, 1, 2)), entry("1f1b").build(Shape(2, 2, 2))
    assert tied.under(alone).head == NOTHING
    assert tied.under(apart).head == tied.head
    assert replace(tied, tied=False).under(alone).head == tied.head
    assert sum(classes_of(alone.with_partition(symmetric((8,))), tied, [0])[0][name] for name in ("weights",)) == 88


def test_microbatches_of_other_sizes_have_their_part_of_everything_but_states():
    sizes = replace(SIZES, each=(1.0, 0.5), working=30, layers=(LayerSize(10, 10, 60, 1000, 20),) * 8)
    whole, half = sizes.of_each
    assert (whole.boundary, whole.logits, whole.layers[0]) == (7, 400, sizes.layers[0])
    assert half.layers[0] == LayerSize(10, 10, 60, 500, 10)
    assert (half.logits, half.logits_chunk, half.working, half.each) == (200, 50, 15, ())
    assert SIZES.of_each == (SIZES,)


def test_moments_of_eight_bits_are_five_bytes_of_twelve_and_their_scales():
    """A master of 4 bytes, two moments of 1, each with 4 bytes for 2,048 of them (arXiv 2110.02861)."""
    plain, small = (model_bytes(replace(OWN, optimizer_bits=bits), 32) for bits in (32, 8))
    count = OWN.layer_parameters
    assert plain.layers[0].optimizer == 12 * count
    assert small.layers[0].optimizer == round((6 + 8 / 2048) * count)
    assert saved_state(plain.layers[0]) == 0
    assert saved_state(small.layers[0]) == plain.layers[0].optimizer - small.layers[0].optimizer
    assert small.embedding == plain.embedding
    assert small.head.optimizer == round((6 + 8 / 2048) * OWN.head_parameters)


def test_frozen_layers_have_weights_alone():
    found = model_bytes(replace(OWN, frozen_layers=3), 32)
    assert found.layers[2] == LayerSize(2 * OWN.layer_parameters, 0, 0)
    assert found.layers[3].gradients == 2 * OWN.layer_parameters
    assert found.embedding[1:3] == (0, 0)
    assert found.head.gradients == 2 * OWN.head_parameters
    assert model_bytes(OWN, 32, kept=123.9).layers[0].activations == 123


def test_orders_hold_what_memory_counts_of_a_layer_that_learns():
    sizes = model_bytes(replace(OWN, frozen_layers=3), 32)
    kept = OWN.layer_activation_bytes(32)
    assert sizes.of_a_layer == (kept, kept)
    assert replace(sizes, until_weights=0.25).of_a_layer == (kept, kept / 4)
    assert model_bytes(replace(OWN, frozen_layers=OWN.num_layers), 32).of_a_layer == (1, 1)


# --- the host --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where, held, written", [("", 0, 0), ("O", 12, 12), ("P", 2, 2), ("OP", 14, 14)])
def test_ssds_hold_and_get_masters_moments_and_weights(where, held, written):
    sizes, count = model_bytes(OWN, 32), OWN.total_parameters
    assert ssd_bytes(where, sizes) == (held * count, written * count)
    frozen = model_bytes(replace(OWN, frozen_layers=3), 32)
    assert ssd_bytes("P", frozen).written == 2 * replace(OWN, frozen_layers=3).trainable_parameters


def test_a_host_has_every_state_of_streamed_stages_and_inputs_of_all_microbatches():
    """16 bytes a parameter, and of every stage but the first the input of every microbatch, both cut apart."""
    own = replace(OWN, num_layers=8)
    sizes, order = model_bytes(own, 32), entry("mobius").build(Shape(2, 4, 4)).with_partition(symmetric((2,) * 4))
    assert host_bytes(order, sizes) == 16 * own.total_parameters + 3 * 4 * 2 * 32 * 64
    uneven = replace(sizes, each=(1.0, 0.5, 0.5, 1.0))
    assert host_bytes(order, uneven) == 16 * own.total_parameters + 3 * 3 * 2 * 32 * 64
    on_ssd = replace(order, on_ssd="O")
    optimizer = 12 * own.total_parameters
    largest = max(size.optimizer for size in (*sizes.layers, sizes.embedding, sizes.head))
    assert host_bytes(on_ssd, sizes) == host_bytes(order, sizes) - optimizer + 2 * largest


@pytest.mark.parametrize("keeps, each", [((0, 0), 2 * 32 * 64), ((1, 0), None)])
def test_a_host_has_the_activations_that_wait_there(keeps, each):
    """Of two devices the first stores those of microbatches 1 and 2, one after the other: kept inputs or a layer's."""
    order = entry("pipe_offload").build(Shape(2, 2, 4), least_gap=2).with_partition(symmetric((1, 1)))
    sizes = model_bytes(replace(OWN, num_layers=2), 32)
    assert host_bytes(order, sizes, keeps=keeps) == (each or sizes.layers[0].activations)
    assert host_bytes(entry("bpipe").build(Shape(2, 2, 4)).with_partition(symmetric((1, 1))), sizes) == 0


@pytest.mark.parametrize("moments, share", [([[1, 0], [0, 1]], 0.5), ([[0.5, 0.5], [0, 0]], 0.5), ([[1, 0.25]], 0.25)])
def test_of_stages_at_some_moments_the_least_is_there_at_one_or_in_the_mean(moments, share):
    """However a byte is distributed over the stages, a moment has this share of it."""
    assert _least_at_peak(np.array(moments)) == share


@pytest.mark.parametrize("name, in_flight", [("1f1b", 1), ("gpipe", 4)])
def test_a_head_alone_on_its_stage_keeps_logits_or_waits_for_the_backward(name, in_flight):
    """It has its input of every microbatch in flight; if everything stays, logits of all, else of one where fewer."""
    order, cut = entry(name).build(Shape(2, 2, 4)), np.array([[8, 0]])
    order = order.with_partition(symmetric((8, 0)))
    footprint = Footprint(order, SIZES, [0, 0])
    stays, waits = (in_flight * SIZES.boundary + number * SIZES.logits for number in (in_flight, 1))
    for keeps, head in ((None, stays), ((8, 0), waits), ((3, 0), waits)):
        found = {each: int(table[0, 1]) for each, table in footprint.keeping(keeps).classes(cut, cut).items()}
        assert found["activations"] + found.get("logits", 0) == head
