"""Methods that move weights and gradients, in time: closed forms, and contention where links meet."""

from dataclasses import replace

import pytest

from rpbench.cost.constant import constant_times
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import StageBytes, TransferTimes, moved_bytes
from rpbench.ir.action import Action, Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ir.timeline import Timeline
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.shared_links import simulate_links
from rpbench.workload.architecture import Architecture

MODEL = Architecture("tiny", num_layers=16, hidden=32, heads=2, vocab=64, seq_len=16)
SIZES = model_bytes(MODEL, 32)


def built(name: str, shape: Shape, prefetch: int = 1, **options) -> Schedule:
    found = entry(name)
    order = found.build(shape, **options).with_partition(symmetric(split_evenly(16, shape.num_stages)))
    return found.lower(order, prefetch=prefetch, **(found.options | options))


def timed(schedule: Schedule, cluster: Machine, forward_s: float = 1.0) -> Timeline:
    layers = constant_times(16, 1, forward_ms=forward_s, input_grad_ms=forward_s, weight_grad_ms=forward_s)
    times = TransferTimes(StageBytes(schedule.partition, SIZES), cluster, 1000)
    costs = replace(layers.table(schedule.partition), transfer_time=times)
    graph = build_graph(schedule)
    return simulate_links(graph, costs, times) if cluster.shares_links else simulate_graph(graph, costs)


def last_backward(timeline: Timeline) -> float:
    return max(span.end for span in timeline.spans() if span.action.kind is Kind.B)


@pytest.mark.parametrize("pace", [1e5, 1e6, 1e7])
def test_efficiency_of_zero_infinity_without_overlap(pace):
    """ait bw / (ait bw + peak), ait in FLOPs a loaded byte (ZeRO-Infinity, SC'21, section 4.2)."""
    schedule = built("zero_infinity", Shape(1, 8, 4), prefetch=0)
    compute_s, peak_flops_per_s = 4 * 3 * 1e-3, 1e9
    loaded = sum(moved for what, moved in moved_bytes(schedule, SIZES)[0].items() if what == "h2d LOAD:P")
    ait = compute_s * peak_flops_per_s / loaded
    cluster = Machine("x", 1, host_to_device_bytes_per_s=pace, device_to_host_bytes_per_s=1e12)
    found = compute_s / (last_backward(timed(schedule, cluster)) / 1000)
    assert found == pytest.approx(ait * pace / (ait * pace + peak_flops_per_s), rel=1e-9)
    ahead = timed(built("zero_infinity", Shape(1, 8, 4)), cluster)
    assert last_backward(ahead) < last_backward(timed(schedule, cluster))


def test_gathers_hide_behind_computation_where_the_link_is_fast_enough():
    def step_s(pace: float) -> float:
        schedule = built("zero_3", Shape(4, 8, 8, num_steps=1))
        return last_backward(timed(schedule, Machine("x", 4, collective_bytes_per_s=pace)))

    alone = 2 * 3.0
    first = float(StageBytes(symmetric((2,) * 8), SIZES).stage(0, backward=True).weights) * 3 / 4
    assert step_s(1e9) == pytest.approx(alone + 1000 * first / 1e9)  # all but the first
    assert step_s(1e7) > 2 * alone


def test_a_delayed_update_hides_what_an_update_in_time_waits_for():
    cluster = Machine("x", 2, host_to_device_bytes_per_s=1e7, collective_bytes_per_s=1e9)
    times = {
        late: last_backward(timed(built("zero_offload", Shape(2, 4, 2, num_steps=8), delayed_update=late), cluster))
        for late in (False, True)
    }
    assert times[True] < 0.95 * times[False]


def test_stages_of_mobius_go_to_root_complexes_in_turn():
    schedule = entry("mobius").build(Shape(4, 4, 1), num_root_complexes=2)
    first = [schedule.compute(device)[0] for device in (0, 2, 1, 3)]
    assert first == [Action(Kind.F, stage, 0) for stage in range(4)]
    check(built("mobius", Shape(4, 8, 3, num_steps=2), num_root_complexes=2))


@pytest.mark.parametrize("pace", [2e7, 2e8, 4e8])
def test_cross_mapping_lessens_contention(pace):
    """Loads of consecutive stages follow each other closely; on one root complex they get in each other's way."""
    pairs = Machine("x", 4, host_to_device_bytes_per_s=pace, devices_per_root_complex=2, root_complex_bytes_per_s=pace)
    apart = replace(pairs, devices_per_root_complex=None, root_complex_bytes_per_s=None)
    shape = Shape(4, 16, 4, num_steps=1)
    in_order, crossed = (timed(built("mobius", shape, num_root_complexes=n), pairs) for n in (1, 2))
    alone = timed(built("mobius", shape), apart)

    def moving(timeline: Timeline) -> float:
        loads = (span for span in timeline.spans() if span.action.kind is Kind.LOAD and span.action.object == "P")
        return sum(span.end - span.start for span in loads)

    assert last_backward(alone) < last_backward(crossed) < last_backward(in_order)
    if pace > 1e8:  # with slower links loads never end, and there is nothing to take turns with
        assert moving(alone) < moving(crossed) < moving(in_order)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("zero_offload", {"share": 1.5}, r"schedule.share=1.5: .* from 0 to 1"),
        ("zero_offload", {"share": "half"}, r"schedule.share=half"),
        ("zero_offload", {"share": 0.5, "delayed_update": True}, "never late; take schedule.share=1"),
        ("mobius", {"num_root_complexes": 3}, "4 devices must be a multiple of it"),
        ("mobius", {"num_root_complexes": 0}, "num_root_complexes=0"),
        ("zero_2", {"delayed_update": True}, "schedule zero_2 has no option 'delayed_update'"),
        ("data_parallel", {"delayed_update": True}, "its options: none"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(name, options, message):
    with pytest.raises(ValueError, match=message):
        entry(name).build(Shape(4, 8, 4), **options)


@pytest.mark.parametrize("name", ["data_parallel", "zero_2", "zero_3", "zero_offload", "zero_infinity"])
def test_replicas_that_do_not_divide_are_refused(name):
    with pytest.raises(ValueError, match=r"deals 6 microbatches to 4 replicas: .* take num_microbatches=8"):
        entry(name).build(Shape(4, 4, 6))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_tensor_parallelism_divides_work_and_hides_no_sum(devices):
    schedule = built("megatron_tp", Shape(devices, 4, 3))
    pace = 1e6
    sums = moved_bytes(schedule, SIZES)[0]
    found = last_backward(timed(schedule, Machine("x", devices, collective_bytes_per_s=pace)))
    # Nothing waits for the sums behind the last backward: four of each of its layers and the embedding's. A microbatch
    # has those of all layers, the embedding's and the head's.
    layers = schedule.partition.num_layers
    last = sums["net SUM_B"] / 3 * (4 * layers / 4 + 1) / (4 * layers + 2)
    talking = (sum(sums.values()) - last) / pace * 1000
    beside = 2 * 0.25 / devices * (devices > 1)  # the next microbatch's first forward runs beside one's last sum
    assert found == pytest.approx(3 * 3.0 / devices + talking - beside)


@pytest.mark.parametrize("along, forward, backward", [(False, 1, 2), (True, 1, 1.5)])
def test_sums_of_a_microbatch_are_counted_by_hand(along, forward, backward):
    """2 a layer forward, 4 backward, as each is recomputed; and those of embedding and head, of which slices have half.

    Along the sequence a forward scatters the embedding's rows and gathers the head's input. A backward scatters the
    rows again, gathers their gradient and scatters that of the head's input.
    """
    sums = moved_bytes(built("megatron_tp", Shape(4, 4, 3), sequence_parallel=along), SIZES)[0]
    sent = 3 * 2 * 3 / 4 * SIZES.boundary  # of 3 microbatches, by each of 4 devices in a ring
    assert sums == {"net SUM_F": (2 * 16 + forward) * sent, "net SUM_B": (4 * 16 + backward) * sent}


def test_the_engine_says_why_it_cannot_cut_matrices(capsys, tmp_path):
    from rpbench.cli import dispatch

    sizes = (
        "model=tiny_gpt",
        "model.key_value_heads=2",
        "num_devices=4",
        "num_microbatches=2",
        f"results_dir={tmp_path}",
    )
    assert dispatch(("schedule=megatron_tp", "backend=cpu", *sizes)) == 2
    assert "a layer has 4 heads, 2 KV heads" in capsys.readouterr().err
