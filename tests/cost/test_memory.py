"""Bytes on a device, counted by hand on small cases and against what is known of the published models."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rpbench.cost.footprint.memory import Footprint, classes_of, why_infeasible
from rpbench.cost.footprint.sizes import UNKNOWN, LayerSize, ModelBytes, model_bytes
from rpbench.ir.action import parse as parse_action
from rpbench.ir.partition import Partition, parse, symmetric
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture, architecture

CONF = Path(__file__).parents[2] / "conf" / "model"

# Four layers that weigh 10, 20, 30, 40; gradients a tenth of that, activations 1 to 4 thousand.
LAYERS = tuple(LayerSize(10 * n, n, 6 * n, 1000 * n) for n in range(1, 5))
SIZES = ModelBytes(
    LAYERS,
    embedding=LayerSize(700, 70, 420),
    head=LayerSize(900, 90, 540),
    boundary=100_000,
    logits=8_000_000,
    logits_chunk=2_000_000,
)


def load(name: str) -> Architecture:
    return architecture(name)


def built(name: str, cut: str, num_ranks: int, num_microbatches: int) -> Schedule:
    partition: Partition = parse(cut)
    shape = Shape(num_ranks, len(partition.forward), num_microbatches, len(partition.backward), fused=partition.fused)
    return entry(name).build(shape).with_partition(partition)


def test_bound_stages_keep_everything_they_train():
    # 1F1B on 2 devices holds 2 and 1 stage inputs.
    schedule = built("1f1b", "3-1", 2, 4)
    assert peak_in_flight(build_graph(schedule)) == [2, 1]
    first = {
        "weights": 700 + 10 + 20 + 30,
        "gradients": 70 + 1 + 2 + 3,
        "optimizer state": 420 + 6 + 12 + 18,
        "kept stage inputs": 200_000,
        "recomputed activations": 6000,
        "logits": 0,
    }
    second = {
        "weights": 900 + 40,
        "gradients": 90 + 4,
        "optimizer state": 540 + 24,
        "kept stage inputs": 100_000,
        "recomputed activations": 4000,
        "logits": 8_000_000,
    }
    assert classes_of(schedule, SIZES, [2, 1]) == [first, second]


def test_a_device_with_several_stages_recomputes_one_at_a_time():
    # Layers 0 and 2 on device 0, layers 1 and 3 on device 1.
    first, second = classes_of(built("looped_bfs", "1-1-1-1", 2, 2), SIZES, [4, 4])
    assert (first["weights"], second["weights"]) == (700 + 10 + 30, 900 + 20 + 40)
    assert (first["recomputed activations"], second["recomputed activations"]) == (3000, 4000)
    assert (first["logits"], second["logits"]) == (0, 8_000_000)


def test_devices_that_share_the_head_keep_logits_of_what_waits_for_the_other_shares():
    schedule = built("vocab_parallel", "3-1", 2, 4)
    rows = (
        "0F0 0F1 0HF0 0HB0 0F2 0HF1 0B0 0HB1 0F3 0HF2 0B1 0HB2 0HF3 0B2 0HB3 0B3",
        "1F0 1HF0 1F1 1HB0 1HF1 1F2 1HF2 1HB1 1B0 1F3 1HB2 1B1 1HF3 1HB3 1B2 1B3",
    )
    placed = replace(schedule, rows=tuple(tuple(map(parse_action, row.split())) for row in rows))
    first, second = classes_of(placed, SIZES, [3, 3])
    assert (first["logits"], second["logits"]) == (4_000_000, 8_000_000)
    assert first["weights"] == (700 + 900) // 2 + 10 + 20 + 30


def test_streamed_stages_are_held_while_they_run_and_one_before():
    # Jobs 0F, 1F, 2FB, 1B, 0B go to devices 0, 1, 0, 1, 0. Device 0 needs most in 2FB, the next stage beside it.
    schedule = built("roundpipe", "2-1|1-2-1*", 2, 2)
    first, second = classes_of(schedule, SIZES, [1, 1])
    assert first == {
        "weights": 900 + 40,
        "prefetched weights": 700 + 10,
        "gradients": 90 + 4,
        "recomputed activations": 4000,
        "boundary tensors": 400_000,
        "logits": 2_000_000,
    }
    assert second == {  # 1B, after which nothing is prefetched
        "weights": 20 + 30,
        "prefetched weights": 0,
        "gradients": 2 + 3,
        "recomputed activations": 5000,
        "boundary tensors": 400_000,
        "logits": 0,
    }


def test_a_device_that_is_never_visited_holds_nothing():
    schedule = built("roundpipe", "4|4-0*", 4, 2)  # jobs 0F, 1FB and 0B leave the last device idle
    assert sum(classes_of(schedule, SIZES, [1] * 4)[3].values()) == 0


def test_many_cuts_at_once_give_the_bytes_of_each():
    cuts = ["2-1|1-2-1*", "1-3|2-2-0*", "2-2|0-4-0*"]
    partitions = [parse(cut) for cut in cuts]
    footprint = Footprint(built("roundpipe", cuts[0], 2, 2), SIZES, [1, 1])
    peaks = footprint.peaks(np.array([p.forward for p in partitions]), np.array([p.backward for p in partitions]))
    each = [classes_of(built("roundpipe", cut, 2, 2), SIZES, [1, 1]) for cut in cuts]
    assert peaks.tolist() == [[sum(device.values()) for device in devices] for devices in each]


def test_no_cut_takes_less_than_the_least():
    cuts = np.array([[i, 4 - i] for i in range(5)])
    footprint = Footprint(built("1f1b", "2-2", 2, 4), SIZES, [2, 1])
    everything = sum(sum(layer[:3]) for layer in (*LAYERS, SIZES.embedding, SIZES.head))
    assert footprint.least_bytes == everything // 2
    assert (footprint.peaks(cuts, cuts).max(axis=1) >= footprint.least_bytes).all()
    assert Footprint(built("roundpipe", "2-2|2-2-0*", 2, 4), SIZES, [1, 1]).least_bytes == 0


@pytest.mark.parametrize(
    "name, ranks, chunks, held",
    [
        ("1f1b", 4, 1, lambda each: 8 * each / 4),
        ("interleaved_1f1b", 4, 2, lambda each: 8 * each / 4),
        ("dualpipe", 4, 1, lambda each: 2 * 8 * each / 4),  # two copies of every layer
        ("megatron_tp", 4, 1, lambda each: 8 * each / 4),
        # Rank r of p keeps p - r versions; evened out, a rank has layers as 1 over what one takes there.
        ("pipedream", 4, 1, lambda each: 8 / sum(1 / (each + (3 - rank)) for rank in range(4))),
    ],
)
def test_the_least_is_met_by_the_best_split_and_by_no_cut_undercut(name, ranks, chunks, held):
    """The bound in closed form where layers may be split; equal layers of 1 + 1 + 6 units, ends of nothing."""
    nothing = LayerSize(0, 0, 0)
    sizes = ModelBytes((LayerSize(1000, 1000, 6000),) * 8, nothing, nothing, 0, 0, 0)
    stages = ranks * chunks
    num_microbatches, num_steps = entry(name).steps(8, 1, None)
    order = entry(name).build(Shape(ranks, stages, num_microbatches, num_steps=num_steps))
    footprint = Footprint(order, sizes, [0] * ranks)
    assert footprint.least_bytes == pytest.approx(1000 * held(8), abs=1)
    cuts = np.array([cut for cut in np.ndindex(*(4,) * stages) if sum(cut) == 8][:2000])
    assert (footprint.peaks(cuts, cuts).max(axis=1) >= footprint.least_bytes).all()


@pytest.mark.parametrize("name, versions", [("1f1b", 1), ("pipelined_backprop", 1), ("xpipe", 1), ("pipedream", 2)])
def test_weights_are_held_once_unless_versions_of_them_are_stashed(name, versions):
    """PipeDream's first of two devices keeps two versions; who predicts weights reads the newest ones alone.

    Of frozen weights, nine tenths here by the size of the gradients, there is one version.
    """
    order = entry(name).build(Shape(2, 2, 4, num_steps=3)).with_partition(parse("2-2"))
    weights, trained = 700 + 10 + 20, 70 + 1 + 2  # of float16
    for summed_bytes in (2, 4):  # of a gradient value; it is no other number of weights
        held = classes_of(order, replace(SIZES, summed_bytes=summed_bytes), [2, 1])[0]
        assert sum(size for kind, size in held.items() if "weights" in kind) == weights + (versions - 1) * trained


def test_of_layers_that_nobody_knows_nothing_goes_before_their_weight_gradients():
    assert UNKNOWN.whole == UNKNOWN.for_weights == 1


@pytest.mark.parametrize("logits", [0, 3000])
def test_every_replica_makes_logits_and_the_least_counts_them(logits):
    sizes = ModelBytes((LayerSize(10, 10, 60),) * 4, LayerSize(0, 0, 0), LayerSize(0, 0, 0), 0, logits, 0)
    order = entry("data_parallel").build(Shape(2, 1, 2)).with_partition(symmetric((4,)))
    footprint = Footprint(entry("data_parallel").lower(order, prefetch=1), sizes, [1, 1])
    assert footprint.least_bytes == 4 * 80 + logits
    assert footprint.peaks(np.array([[4]]), np.array([[4]])).max() >= footprint.least_bytes


# --- sizes of a model ---------------------------------------------------------------------------------------


def test_full_training_takes_16_bytes_for_each_parameter():
    model = load("llama31_8b")
    sizes = model_bytes(model, 8192)
    resident = [sum(size[:3]) for size in (sizes.embedding, *sizes.layers, sizes.head)]
    assert sum(resident) == 16 * model.total_parameters
    assert sizes.layers[0].activations == model.layer_activation_bytes(8192)
    assert sizes.boundary == 2 * 8192 * 4096
    assert (sizes.logits, sizes.logits_chunk) == (6 * 8192 * 128256, 6 * 4096 * 128256)


def test_adapters_alone_are_trained():
    model = load("qwen3_235b_lora")
    sizes = model_bytes(model, 2048)
    layer = sizes.layers[0]
    assert layer.weights == 2 * (model.layer_parameters + model.trainable_layer_parameters)
    assert (layer.gradients, layer.optimizer) == (
        2 * model.trainable_layer_parameters,
        12 * model.trainable_layer_parameters,
    )
    assert sizes.head[1:3] == sizes.embedding[1:3] == (0, 0)
    assert sizes.logits == sizes.logits_chunk  # fewer tokens than a chunk


def test_a_shared_matrix_stands_at_either_end():
    sizes = model_bytes(load("qwen3_1p7b"), 8192)
    assert sizes.head.weights - sizes.embedding.weights == 2 * 2048  # the final norm


# --- the verdict --------------------------------------------------------------------------------------------


def test_what_fits_has_no_reason():
    schedule = built("1f1b", "3-1", 2, 4)
    classes = classes_of(schedule, SIZES, [2, 1])
    needed = max(sum(each.values()) for each in classes)
    assert why_infeasible(schedule, classes, needed) == ""
    assert why_infeasible(schedule, classes, needed - 1) != ""


@pytest.mark.parametrize(
    ("schedule", "cut", "model", "tokens", "reason"),
    [
        (
            "1f1b",
            "8-8-8-8-8-8-8-8",
            "qwen3_32b",
            2048,
            # 8 layers of 487.6 million and a head of 777.9 million parameters: 12 bytes of 16 are Adam's.
            "device 7 needs 80.5 GB and has 25.8 GB; 56.1 GB of it are optimizer state: "
            "take more devices, or schedule=roundpipe, which keeps it on the host",
        ),
        (
            "1f1b",
            "4-4-4-4-4-4-4-4",
            "llama31_8b",
            32768,
            # 1.398 billion parameters, 25.2 GB of logits, 18.3 GB of activations, one input of 0.3 GB.
            "device 7 needs 66.1 GB and has 25.8 GB; 25.2 GB of it are logits: take smaller microbatches",
        ),
        (
            "roundpipe",
            "16-16|16-16-0*",
            "llama31_8b",
            8192,
            # Backward of layers 0 to 15 and the embedding, 8.0 GB twice; boundary tensors take 0.3 GB.
            "device 1 needs 34.6 GB and has 25.8 GB; 18.3 GB of it are recomputed activations: "
            "take smaller microbatches, or more stages",
        ),
    ],
)
def test_reasons_name_device_bytes_class_and_way_out(schedule, cut, model, tokens, reason):
    subject = built(schedule, cut, 8, 16)
    classes = classes_of(subject, model_bytes(load(model), tokens), peak_in_flight(build_graph(subject)))
    found = why_infeasible(subject, classes, 24 * 2**30)
    assert found == reason
    assert len(found.splitlines()) == 1


def test_a_way_out_of_too_much_weight_depends_on_where_weights_live():
    heavy = ModelBytes((LayerSize(10**9, 0, 0),) * 4, LayerSize(0, 0, 0), LayerSize(0, 0, 0), 0, 0, 0)
    bound, streamed = (
        why_infeasible(each, classes_of(each, heavy, [2, 2]), 10**9)
        for each in (built("gpipe", "2-2", 2, 2), built("roundpipe", "4|4-0*", 2, 2))
    )
    assert re.search(r"are weights: take more devices, or schedule=roundpipe", bound)
    assert re.search(r"are weights: take more stages", streamed)


@pytest.mark.parametrize(
    ("name", "largest", "way_out"),
    [
        ("1f1b", "activations", "take smaller microbatches, or recompute=all"),
        ("1f1b", "kept stage inputs", "take smaller microbatches"),
        ("gpipe", "kept stage inputs", "take smaller microbatches, or a schedule with fewer in flight such as 1f1b"),
        ("gpipe", "activations", "recompute=all, or a schedule with fewer in flight such as 1f1b"),
        ("zero_3", "gathered weights", "take more and smaller stages"),
    ],
)
def test_no_way_out_is_the_schedule_that_runs(name, largest, way_out):
    found = why_infeasible(built(name, "2-2", 2, 2), [{largest: 2 * 10**9}, {}], 10**9)
    assert found.endswith(way_out)


def test_a_schedule_without_layers_has_no_bytes():
    with pytest.raises(ValueError, match="give it a partition first"):
        classes_of(entry("gpipe").build(Shape(2, 2, 2)), SIZES, [2, 2])


def test_a_step_that_may_be_taken_back_has_its_state_twice():
    """Masters and two moments, 4 bytes each, and a copy of them to go back to."""
    model = Architecture("small", num_layers=1, hidden=8, heads=2, vocab=11, seq_len=4)
    compute, host = (tuple(map(parse_action, row.split())) for row in ("0F0 0B0 0STEP@1", "0VALIDATE@1 0ROLLBACK@1"))
    for lanes, states in (({"compute": compute}, 1), ({"compute": compute, "host": host}, 2)):
        schedule = Schedule(Shape(1, 1, 1), (lanes,), policy=Policy.OPTIMISTIC).with_partition(symmetric((1,)))
        (found,) = classes_of(schedule, model_bytes(model, 4), [1])
        assert found["optimizer state"] == states * 3 * 4 * model.total_parameters
