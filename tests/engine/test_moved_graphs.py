"""Whole activations that leave their device and come back: training as without, and errors where one is not back."""

from dataclasses import replace

import pytest
import torch
from spared import slow
from torch.multiprocessing.reductions import StorageWeakRef
from training_cases import MOE, TINY, assert_same, counted_bytes, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.state.saved_activations import SavedActivations
from rpbench.engine.state.updates.compensation import Compensation
from rpbench.engine.training import Settings, Training
from rpbench.engine.training_checks import check_kept
from rpbench.ir.action import Action, Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import add_steps, split_backward
from rpbench.registry import entry

WINDOWED = replace(TINY, windows=(3, None), dropout=0.2)  # a mask that all microbatches read, and one of their own


def complete(name: str, p: int, m: int, v: int = 1, num_steps: int = 2, **options) -> Schedule:
    order = entry(name).build(Shape(p, p * v, m, num_steps=num_steps), **options)
    schedule = add_steps(order.with_partition(symmetric(split_evenly(max(4, p * v), p * v))))
    check(schedule)
    return schedule


def stored(schedule: Schedule) -> list[tuple[int, int]]:
    """Stage and microbatch of everything that moves."""
    rows = (row for _, _, row in schedule.items())
    return [(action.stage, action.microbatch) for row in rows for action in row if action.kind is Kind.STORE]


CASES = [
    ("bpipe", 4, 6, 1, {}),
    slow(("bpipe", 6, 7, 1, {})),
    ("pipe_offload", 2, 8, 1, {"least_gap": 1}),
    slow(("pipe_offload", 3, 6, 1, {"least_gap": 1, "share": 0.5})),
    slow(("pipe_offload", 2, 4, 2, {"share": 1.0})),
    slow(("pipe_offload", 4, 4, 2, {"share": 0.25})),
    slow(("pipe_offload", 3, 6, 2, {"share": 0.5})),
    slow(("pipe_offload", 4, 4, 1, {"group_size": 2, "least_gap": 1})),
    slow(("pipe_offload", 2, 4, 2, {"group_size": 1, "share": 0.5})),
]


@pytest.mark.parametrize("real_time", [False, True])
@pytest.mark.parametrize("name, p, m, v, options", CASES)
def test_every_bit_is_that_of_plain_training(name, p, m, v, options, real_time):
    schedule = complete(name, p, m, v, **options)
    assert stored(schedule)
    workload = workload_of(schedule, WINDOWED, torch.bfloat16 if real_time else torch.float64)
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload, backend=backend, recompute="none", learning_rate=1e-2)
    else:
        run = train(schedule, workload, recompute="none", learning_rate=1e-2)
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0
    assert sum(run.training.traffic.moved_bytes.values()) > 0


@pytest.mark.parametrize(
    "model, dtype", [(MOE, torch.bfloat16), slow((MOE, torch.float64)), slow((TINY, torch.bfloat16))]
)
def test_other_layers_and_types_on_the_virtual_clock(model, dtype):
    schedule = complete("pipe_offload", 2, 4, 2)
    run = train(schedule, workload_of(schedule, model, dtype), recompute="none", learning_rate=1e-2)
    assert_same(run, reference_of(run))


def test_a_backward_in_halves_reads_what_has_come_back():
    order = entry("pipe_offload").build(Shape(2, 2, 6, num_steps=2), least_gap=1)
    schedule = add_steps(split_backward(order.with_partition(symmetric((2, 2)))))
    check(schedule)
    run = train(schedule, workload_of(schedule), recompute="none", learning_rate=1e-2)
    assert stored(schedule)
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0


def test_what_has_left_is_nowhere_on_its_device_any_more():
    """Nobody holds a storage that a graph had saved once its STORE:A has run: no graph, no stage, no boundary."""
    schedule = complete("pipe_offload", 2, 4, 2, num_steps=1)
    training = Training(workload_of(schedule, WINDOWED), schedule, Settings(recompute="none"))
    store, gone = training.handlers[Kind.STORE], []

    def watched(action, number, gate):
        found = training.transfers._saved._found[action.stage, (action.microbatch, action.part)].all()
        watches = [StorageWeakRef(saved.here.tensor.untyped_storage()) for saved in found]
        del found
        assert not any(watch.expired() for watch in watches)
        store(action, number, gate)
        gone.append([watch.expired() for watch in watches])

    run_with(training, {Kind.STORE: watched})
    assert len(gone) == len(stored(schedule)) > 0
    assert all(map(all, gone))
    assert all(map(len, gone))


def test_as_much_comes_back_as_leaves():
    """Over the lanes that the schedule names, on the ranks that hand over; `test_moved_graph_bytes.py` has how much."""
    schedule = complete("bpipe", 6, 7)
    moved = train(schedule, workload_of(schedule), recompute="none").training.traffic.moved_bytes
    assert {device for device, _ in moved} == {0, 1}
    assert {lane for _, lane in moved} == {"d2h", "h2d"}
    for device in (0, 1):
        assert moved[device, "d2h"] == moved[device, "h2d"] > 0


@pytest.mark.parametrize("name, p, m, v, options", [("bpipe", 4, 6, 1, {}), ("pipe_offload", 2, 4, 2, {})])
def test_inputs_that_move_are_those_that_the_actions_count(name, p, m, v, options):
    """That of the first stage is the embedding's output, as its memory counts it; not the tokens."""
    schedule = complete(name, p, m, v, **options)
    run = train(schedule, workload_of(schedule, dtype=torch.bfloat16), learning_rate=1e-2)
    assert run.training.traffic.moved_bytes == counted_bytes(schedule)
    assert_same(run, reference_of(run))


# --- one graph by itself ---------------------------------------------------------------------------------------

STORE, LOAD, BACK = (
    Action(kind, 2, 5, object=what) for kind, what in ((Kind.STORE, "A"), (Kind.LOAD, "A"), (Kind.B, None))
)


def halves_multiplied(saved: SavedActivations) -> tuple[torch.Tensor, torch.Tensor]:
    """x (3, 8) and the product of its two halves, turned round: views with offsets and strides of one storage."""
    x = torch.arange(24.0).reshape(3, 8).requires_grad_()
    with saved.noting(2, (5, 0), ()):
        left, right = (x * 1).t().chunk(2)
        return x, left * right


def test_views_of_one_storage_travel_as_one_and_lie_as_before():
    saved, copied = SavedActivations(None), []

    def copy(tensor):
        copied.append(tensor.nbytes)
        return tensor.clone()

    x, product = halves_multiplied(saved)
    saved.store(STORE, copy)
    saved.load(LOAD, 0, copy)
    saved.take(BACK)
    (gradient,) = torch.autograd.grad(product.sum(), x)
    assert copied == [24 * 4, 24 * 4]
    assert torch.equal(gradient, x.detach().roll(4, dims=1))  # of each half, the other one
    assert not len(saved)


def test_what_has_not_left_cannot_be_brought_back():
    saved = SavedActivations(None)
    _, product = halves_multiplied(saved)
    with pytest.raises(RuntimeError, match="2LOAD:A5 loads activations that are not away: no STORE:A has taken them"):
        saved.load(LOAD, 0, torch.clone)
    with pytest.raises(RuntimeError, match="2LOAD:A6 loads activations that are not away"):
        saved.load(LOAD._replace(microbatch=6), 0, torch.clone)
    saved.store(STORE, torch.clone)
    with pytest.raises(RuntimeError, match="2B5 reads activations that are not on its device: no 2LOAD:A5"):
        saved.take(BACK)
    with pytest.raises(RuntimeError, match="the backward of 2F5 reads activations that are not on its device"):
        product.sum().backward()


# --- broken on purpose -----------------------------------------------------------------------------------------


def run_with(training: Training, handlers: dict) -> None:
    costs = uneven_costs(training.schedule)
    execute(training.program(costs), training.handlers | handlers, VirtualBackend(costs))


def training_of(schedule: Schedule, copy=None) -> Training:
    settings = Settings(recompute="none", keep_gradients=True)
    if copy is None:
        return Training(workload_of(schedule), schedule, settings)
    return Training(workload_of(schedule), schedule, settings, copy=copy)


def test_a_load_that_is_left_out_is_refused_before_the_run():
    schedule = complete("bpipe", 4, 6)
    lanes = [dict(row) for row in schedule.lanes]
    lanes[0]["h2d"] = lanes[0]["h2d"][:-2]
    with pytest.raises(ValueError, match="stored, but never loaded again"):
        training_of(replace(schedule, rows=tuple(lanes)))


def test_a_load_that_does_nothing_stops_the_backward_that_reads_it():
    training = training_of(complete("bpipe", 4, 6))
    load = training.handlers[Kind.LOAD]

    def skipping(action, number, gate):
        if action.microbatch != 3:
            load(action, number, gate)

    with pytest.raises(ActionFailed, match=r"0B3 reads activations that are not on its device: no 0LOAD:A3 has"):
        run_with(training, {Kind.LOAD: skipping})


def test_a_graph_that_is_read_while_away_says_so_itself(monkeypatch):
    """Were the look before a backward missing, no home copy would be read in silence."""
    monkeypatch.setattr(SavedActivations, "take", lambda self, action: None)
    training = training_of(complete("bpipe", 4, 6))
    with pytest.raises(ActionFailed, match=r"0B\d failed .*the backward of 0F\d reads activations that are not on its"):
        run_with(training, {Kind.LOAD: lambda action, number, gate: None})


def test_a_load_of_another_microbatch_is_refused():
    training = training_of(complete("pipe_offload", 2, 6, least_gap=1))
    load, first = training.handlers[Kind.LOAD], min(stored(training.schedule))[1]

    def other(action, number, gate):
        wrong = action._replace(microbatch=action.microbatch + 1) if action.microbatch == first else action
        load(wrong, number, gate)

    with pytest.raises(ActionFailed, match=r"LOAD:A\d.* loads activations that are not away|has brought them"):
        run_with(training, {Kind.LOAD: other})


def test_a_store_that_comes_twice_is_refused():
    training = training_of(complete("bpipe", 4, 6))
    store = training.handlers[Kind.STORE]

    def twice(action, number, gate):
        store(action, number, gate)
        store(action, number, gate)

    with pytest.raises(ActionFailed, match=r"0STORE:A\d>3 stores activations that are not on its device"):
        run_with(training, {Kind.STORE: twice})


def test_what_comes_back_is_what_is_read():
    """The bytes of another microbatch, or of nothing, give other gradients: no copy of the device's own is left."""
    schedule = complete("bpipe", 4, 6, num_steps=1)
    plain = train(schedule, workload_of(schedule), recompute="none")
    reference = reference_of(plain)
    before: dict[int, torch.Tensor] = {}

    def stale(tensor, device, lane, peer=None):
        """The first bytes of that length which came back, ever again."""
        return before.setdefault(tensor.nbytes, tensor.clone()).clone() if lane == "h2d" else tensor.clone()

    training = training_of(schedule, copy=stale)
    run_with(training, {})
    with pytest.raises(AssertionError):
        assert_same(plain._replace(training=training), reference)


def test_stages_that_are_cut_apart_are_refused():
    schedule = complete("bpipe", 4, 6, num_steps=1)
    shape = replace(schedule.shape, num_backward_stages=3)
    cut = replace(schedule, shape=shape, partition=Partition((1,) * 4, (1, 1, 2)))
    with pytest.raises(ValueError, match="its backward stages have other layers than its forward stages"):
        check_kept(cut, "none", Compensation())


@pytest.mark.parametrize(
    "request_",
    [
        ("schedule=bpipe", "num_devices=4", "backend=virtual"),
        slow((("schedule=pipe_offload", "num_devices=2", "chunks_per_device=2", "schedule.share=0.5", "backend=cpu"),)),
    ],
    ids=" ".join,
)
def test_the_command_line_runs_it(request_, rpbench):
    small = ("model=tiny_gpt", "model.num_layers=4", "num_microbatches=8", "recompute=none")
    status, (row,), err = rpbench(*request_, *small, "verify=true", "dtype=float64")
    assert status == 0, err
    assert row["status"] == "ok"
    assert row["grad_max_abs_diff"] == 0.0
