"""Bytes charged: boundary tensors over links, sums over copies, optimizers on the host's and the devices' memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.charges import with_charges
from rpbench.cost.constant import constant_times
from rpbench.cost.footprint.sizes import OPTIMIZER_BYTES, model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import OptimizerTraffic, Traffic, moved_bytes
from rpbench.ir.action import RECV, SEND, Kind, parse
from rpbench.ir.checks.check import check
from rpbench.ir.index import Index
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.passes.boundary_lanes import send_over_links
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import shard
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.shared_links import simulate_charged
from rpbench.workload.architecture import Architecture

SIZES = model_bytes(Architecture("tiny", num_layers=8, hidden=32, heads=2, vocab=64, seq_len=16), 32)
LAYERS = constant_times(8, 1, forward_ms=8, input_grad_ms=8, weight_grad_ms=8)
PARAMETERS = sum(layer.optimizer for layer in (*SIZES.layers, SIZES.embedding, SIZES.head)) / OPTIMIZER_BYTES


def built(name: str, ranks: int, microbatches: int, chunks: int = 1, num_steps: int = 1) -> Schedule:
    shape = Shape(ranks, ranks * chunks, microbatches, num_steps=num_steps)
    return entry(name).build(shape).with_partition(symmetric(split_evenly(8, ranks * chunks)))


def cluster_of(pace: float, **figures: float) -> Machine:
    return Machine("x", 8, host_to_device_bytes_per_s=pace, **figures)


def makespan(schedule: Schedule, traffic: Traffic) -> float:
    costs = traffic.charged(schedule, LAYERS.table(schedule.partition))
    return float(simulate_charged(build_graph(schedule), costs).makespan)


@settings(deadline=None, max_examples=20)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "dapple", "looped_bfs", "interleaved_1f1b"]),
    ranks=st.sampled_from([2, 4]),
    rounds=st.integers(1, 3),
    direct=st.booleans(),
)
def test_links_with_time_to_spare_take_what_hops_of_their_length_take(name, ranks, rounds, direct):
    looped = entry(name).looped
    order = built(name, ranks, ranks * rounds, 2 if looped else 1)
    transfer_s = 1e-5  # a hundredth of the shortest forward
    pace = SIZES.boundary / transfer_s
    schedule = send_over_links(order, direct=direct)
    check(schedule)
    traffic = Traffic(SIZES, cluster_of(pace, intra_bytes_per_s=pace), boundaries=True)
    hops = replace(LAYERS.table(order.partition), hop=1000 * transfer_s * (1 if direct else 2))
    expected = float(simulate_charged(build_graph(order), hops).makespan)
    # A device sends or receives one tensor at a time, so that two that meet may wait for each other.
    assert expected <= makespan(schedule, traffic) * (1 + 1e-12)
    assert makespan(schedule, traffic) == pytest.approx(expected, rel=0.01)


def test_every_boundary_tensor_is_sent_and_received_once():
    order = built("1f1b", 4, 6)
    through_host = moved_bytes(send_over_links(order, direct=False), SIZES)
    direct = moved_bytes(send_over_links(order, direct=True), SIZES)
    crossings = 2 * 3 * 6  # forth and back over three boundaries
    assert sum(sum(device.values()) for device in through_host) == 2 * crossings * SIZES.boundary
    assert sum(sum(device.values()) for device in direct) == crossings * SIZES.boundary
    with pytest.raises(ScheduleError, match="add them once"):
        send_over_links(send_over_links(order, direct=False), direct=False)


@pytest.mark.parametrize("name, chunks", [("chimera", 1), ("dualpipe", 1), ("bitpipe", 2)])
@pytest.mark.parametrize("ranks, rounds", [(2, 2), (4, 2), (6, 2), (8, 3)])
def test_sums_and_tensors_share_a_direct_link(name, chunks, ranks, rounds):
    order = add_steps(entry(name).build(Shape(ranks, ranks * chunks, ranks * rounds, num_steps=3)))
    summed = shard(order, parameters=None, gradients="step")
    schedule = send_over_links(summed, direct=True)
    check(schedule)
    for device in range(ranks):
        net = schedule.lanes[device]["net"]
        sums = [action for action in net if action.kind is Kind.REDUCE_GRAD]
        assert sums == list(summed.lanes[device]["net"])
        later = net[net.index(sums[0]) :]
        of_step = [a for a in later if a.kind is Kind.SEND_B and a.microbatch < order.shape.num_microbatches]
        assert all(a.stage != sums[0].stage for a in of_step), "behind all that its gradients make"


def test_a_device_receives_in_the_order_of_use():
    schedule = send_over_links(built("1f1b", 4, 8), direct=False)
    index = Index(schedule)
    for rank in range(4):
        lanes = dict(schedule.rows[rank])
        used = [number for number in range(len(index.actions)) if index.device(number) == rank]
        needed = [index.actions[number] for number in used if index.actions[number].kind in (Kind.F, Kind.B)]
        wanted = [
            (a.kind is Kind.F, a.microbatch)
            for a in needed
            if (a.kind is Kind.F and rank) or (a.kind is Kind.B and rank < 3)
        ]
        assert [(a.kind is Kind.RECV_F, a.microbatch) for a in lanes["h2d"]] == wanted


@pytest.mark.parametrize("name, chunks", [("bpipe", 1), ("pipe_offload", 2)])
@pytest.mark.parametrize("direct", [False, True])
def test_activations_move_in_the_order_they_did(name, chunks, direct):
    order = built(name, 4, 8, chunks)
    schedule = send_over_links(order, direct=direct)
    check(schedule)
    for device in range(4):
        for lane in ("h2d", "d2h", "net"):
            row = schedule.lanes[device].get(lane, ())
            assert [each for each in row if each.kind not in SEND | RECV] == list(order.lanes[device].get(lane, ()))


def test_a_load_that_waits_for_room_of_what_never_leaves_comes_after_the_gradients_it_needs():
    """The LOAD of the second microbatch waits for the W of the first, whose gradient comes over the same link."""
    rows = (
        {"compute": "0F0 0F1 0I0 0W0 0I1 0W1", "d2h": "0STORE:A1 0FREE:A1", "h2d": "0FREE:A0 0LOAD:A1 0FREE:A1"},
        {"compute": "1F0 1I0 1W0 1F1 1I1 1W1"},
    )
    lanes = tuple({name: tuple(map(parse, row.split())) for name, row in own.items()} for own in rows)
    schedule = send_over_links(Schedule(Shape(2, 2, 2), lanes, name="waits", placement=((0,), (1,))), direct=False)
    check(schedule)
    assert " ".join(map(str, schedule.lanes[0]["h2d"])) == "0RECV_B0>1 0RECV_B1>1 0FREE:A0 0LOAD:A1 0FREE:A1"


@pytest.mark.parametrize("direct", [None, 1e6])
def test_copies_of_a_stage_are_summed(direct):
    schedule = with_charges(add_steps(built("chimera", 4, 4, num_steps=2)), cluster_of(1e6, intra_bytes_per_s=direct))
    check(schedule)
    assert sum(action.kind is Kind.REDUCE_GRAD for _, _, row in schedule.items() for action in row) == 2 * 4 * 2
    assert any(action.kind in SEND for _, _, row in schedule.items() for action in row)


def test_a_link_that_gathers_weights_as_well_is_refused():
    order = shard(add_steps(built("chimera", 4, 4, num_steps=2)), parameters="step", gradients="step")
    with pytest.raises(ScheduleError, match="which goes first there is not known"):
        send_over_links(order, direct=True)


def step_s(schedule, **more):
    """Seconds of the steps of a schedule, by stage."""
    optimizer = OptimizerTraffic(on_host=40, on_device=28, device_bytes_per_s=1e6, **more)
    costs = Traffic(SIZES, cluster_of(1e12), optimizer=optimizer).charged(schedule, LAYERS.table(schedule.partition))
    return [float(work.main) / schedule.shape.num_parts / costs.units_per_second for work in costs.work[Kind.STEP]]


def test_copies_of_a_stage_are_each_updated_where_they_are():
    """Chimera: device d has stages d and 3 - d, and updates both, whichever of their STEPs stand there."""
    schedule, alone = add_steps(built("chimera", 4, 4)), step_s(add_steps(built("gpipe", 4, 4)))
    found, devices = step_s(schedule, beside_s=1.0), 0
    for device in range(4):
        stages = [action.stage for action in schedule.compute(device) if action.kind is Kind.STEP]
        devices += bool(stages)
        if stages:
            assert sum(found[stage] for stage in stages) == pytest.approx(1.0 + alone[device] + alone[3 - device])
    assert devices >= 2


def test_a_step_of_tensor_shards_belongs_to_no_part():
    """Two devices with half of every matrix: together their steps take what the whole model's takes on one."""
    found = entry("megatron_tp")
    order = found.build(Shape(2, 2, 2)).with_partition(symmetric(split_evenly(8, 2)))
    works = step_s(found.lower(order, prefetch=1, **found.options))
    assert sum(works) == pytest.approx(28 * PARAMETERS / 1e6)


def test_the_optimizer_takes_the_time_of_its_traffic():
    optimizer = OptimizerTraffic(on_host=40, on_device=28, device_bytes_per_s=1e6)
    # On the devices: the fullest one's share, behind its last backward.
    schedule = add_steps(built("gpipe", 1, 2))
    plain = makespan(schedule, Traffic(SIZES, cluster_of(1e12)))
    on_device = makespan(schedule, Traffic(SIZES, cluster_of(1e12), optimizer=optimizer))
    assert on_device - plain == pytest.approx(1000 * 28 * PARAMETERS / 1e6)
    # On the host all devices share its memory, with what is loaded: once more traffic takes its time on one or on four.
    for ranks in (1, 4):
        found = entry("zero_infinity")
        order = found.build(Shape(ranks, 4, 4)).with_partition(symmetric(split_evenly(8, 4)))
        lowered = found.lower(order, prefetch=1, **found.options)
        once, twice = (
            makespan(lowered, Traffic(SIZES, cluster_of(1e12, host_bytes_per_s=1e3), optimizer=traffic))
            for traffic in (optimizer, replace(optimizer, on_host=80))
        )
        assert twice - once == pytest.approx(1000 * 40 * PARAMETERS / 1e3, rel=0.01)


# --- activations that wait on the host ----------------------------------------------------------------------


def moving(name: str, ranks: int, microbatches: int, chunks: int = 1, **options) -> Schedule:
    """A schedule that moves activations, with its boundary tensors on the same links."""
    shape = Shape(ranks, ranks * chunks, microbatches)
    order = entry(name).build(shape, **options).with_partition(symmetric(split_evenly(8, ranks * chunks)))
    return with_charges(order, cluster_of(1e9))


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["pipe_offload", "bpipe"]),
    ranks=st.sampled_from([2, 3, 4]),
    rounds=st.integers(1, 4),
    chunks=st.sampled_from([1, 2]),
    share=st.sampled_from([0.25, 1.0]),
    least_gap=st.sampled_from([1, 2, 4]),
)
def test_boundary_tensors_and_activations_share_the_links_and_all_of_them_arrive(
    name, ranks, rounds, chunks, share, least_gap
):
    options = {"share": share, "least_gap": least_gap} if name == "pipe_offload" else {}
    chunks = chunks if name == "pipe_offload" else 1
    schedule = moving(name, ranks, ranks * rounds, chunks, **options)
    check(schedule)
    plain = entry(name).build(Shape(ranks, ranks * chunks, ranks * rounds), **options)
    crossing = {action for _, _, row in send_over_links(_still(plain), direct=False).items() for action in row}
    sent = {action for _, lane, row in schedule.items() for action in row if action.kind in SEND and lane == "d2h"}
    assert sent == {action for action in crossing if action.kind in SEND}
    assert makespan(schedule, Traffic(SIZES, cluster_of(1e9))) > 0  # no lane waits for another for ever


def _still(schedule: Schedule) -> Schedule:
    """The computations alone."""
    return replace(
        schedule, rows=tuple({"compute": schedule.compute(rank)} for rank in range(schedule.shape.num_ranks))
    )


def test_a_link_takes_as_long_as_all_that_goes_over_it():
    """Closed form: a link so slow that nothing else counts is busy from the first tensor on it to the last."""
    schedule, pace = moving("pipe_offload", 2, 8), 1e3
    sent = moved_bytes(schedule, SIZES)[0]
    leaving = sum(count for what, count in sent.items() if what.startswith("d2h"))
    assert sent["d2h SEND_F"] == 8 * SIZES.boundary
    assert makespan(schedule, Traffic(SIZES, cluster_of(pace))) >= leaving / pace


@pytest.mark.parametrize("name, chunks", [("pipe_offload", 2), ("bpipe", 1)])
def test_a_layer_that_is_not_recomputed_moves_its_activations_and_others_the_input_of_their_stage(name, chunks):
    schedule, stages, layers = moving(name, 4, 12, chunks), 4 * chunks, 8 // (4 * chunks)
    keeps, each = [1, *[0] * (stages - 2), layers], SIZES.layers[0].activations
    for device, moved in enumerate(moved_bytes(schedule, SIZES, keeps)):
        stored = [action.stage for action in schedule.lanes[device].get("d2h", ()) if action.kind is Kind.STORE]
        kept = sum(keeps[stage] * each + SIZES.logits * (stage == stages - 1) for stage in stored)
        inputs = sum(SIZES.boundary for stage in stored if keeps[stage] < layers)
        assert moved.get("d2h STORE:A", 0) == kept + inputs


def test_keeping_everything_is_charged_as_keeping_everything():
    """What stays is chosen layer by layer; where the memory has room for all, that is `recompute=none` to the bit."""
    schedule = moving("pipe_offload", 4, 12, 2)
    kept = replace(SIZES, keeps_activations=True)
    pace, costs = cluster_of(1e6), LAYERS.table(schedule.partition)
    stages = schedule.partition.backward
    each = Traffic(SIZES, pace).charged(schedule, costs, stages)
    every = Traffic(kept, pace).charged(schedule, costs)
    graph = build_graph(schedule)
    assert simulate_charged(graph, each).makespan == simulate_charged(graph, every).makespan
    assert moved_bytes(schedule, SIZES, stages) == moved_bytes(schedule, kept)
    nothing = Traffic(SIZES, pace).charged(schedule, costs, ())
    assert simulate_charged(graph, nothing).makespan < simulate_charged(graph, each).makespan
