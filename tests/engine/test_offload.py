"""Training on copies that LOAD brings and FREE takes away: the same bits, and errors where a copy is missing."""

import pytest
import torch
from cases import build
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import assert_same, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.training import Settings, Training
from rpbench.ir.action import Action, Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape, Weights
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import offload, stream
from rpbench.sim.longest_path import simulate


@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_streamed_training_equals_the_reference_bit_for_bit(data):
    draw = data.draw
    asynchronous, steps = draw(st.booleans()), draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 6))
    order = build(
        "roundpipe",
        draw(st.integers(1, 8)),
        microbatches,
        seed=draw(st.integers(0, 99)),
        stages=(draw(st.integers(1, 4)), draw(st.integers(1, 5))),
        num_layers=draw(st.integers(1, 5)),
        num_steps=steps,
        asynchronous=asynchronous,
        round_size=draw(st.integers(1, 6)),
    )
    stored = draw(st.booleans())
    schedule = stream(order, prefetch=draw(st.integers(0, 2)), activations=stored)
    check(schedule)
    grain = draw(st.sampled_from(["stage", "layer"]))
    workload = workload_of(schedule, dtype=draw(st.sampled_from([torch.float64, torch.bfloat16])))
    refusal = ""
    try:
        run = train(schedule, workload, recompute_grain=grain)
    except ValueError as error:
        refusal = str(error)
    if refusal:  # where every layer's input is kept, one STORE cannot be of what several forwards keep
        assert (stored, grain) == (True, "layer")
        assert "several forward stages keep" in refusal
        run = train(schedule, workload, recompute_grain="stage")
    read = (lambda module, microbatch: max(0, microbatch // microbatches - 1)) if asynchronous else None
    options = {"read_version": read} if asynchronous else {}
    assert_same(run, reference_of(run, updates=steps > 1, **options))
    assert run.training.passes.num_left == 0
    assert run.training.weights._copies == {}


@pytest.mark.parametrize("devices", [1, 2, 5])
def test_on_threads_too(devices):
    schedule = stream(build("roundpipe", devices, 4, num_steps=2))
    with CpuBackend() as backend:
        run = train(schedule, workload_of(schedule), backend=backend)
    assert_same(run, reference_of(run))


def test_the_virtual_clock_says_what_the_simulator_says():
    schedule = stream(build("roundpipe", 4, 6, num_steps=2))
    run = train(schedule, workload_of(schedule))
    expected = simulate(schedule, uneven_costs(schedule))
    assert [float(end) for end in run.timeline.end] == pytest.approx([float(end) for end in expected.end], abs=1e-9)


@pytest.mark.parametrize("options", [{}, {"gradients": "step"}, {"parameters": "visit"}])
def test_an_offloaded_optimizer_with_replicas(options):
    """ZeRO-Offload's order: each device runs its microbatches through all stages, the host steps."""
    order = [(Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0)]
    rows = [
        tuple(Action(kind, stage, mb) for mb in range(device, 8, 2) for kind, stage in order) for device in range(2)
    ]
    plain = Schedule(Shape(2, 2, 4, num_steps=2), tuple(rows)).with_partition(symmetric(split_evenly(3, 2)))
    schedule = offload(add_steps(plain, lane="host"), **options)
    check(schedule)
    run = train(schedule, workload_of(schedule))
    assert_same(run, reference_of(run))


def loaded() -> tuple[Training, int, int]:
    """A training with its first stage's weights on device 0, the numbers of that LOAD:P and of the first forward."""
    schedule = stream(build("roundpipe", 2, 3), activations=False)
    training = Training(workload_of(schedule), schedule, Settings())
    actions = [action for _, _, row in schedule.items() for action in row]
    load = next(number for number, action in enumerate(actions) if action.kind is Kind.LOAD)
    training.handlers[Kind.LOAD](actions[load], load, lambda: None)
    return training, load, actions.index(Action(Kind.F, 0, 0))


def test_weights_on_a_device_are_copies_and_hold_nan_once_freed():
    training, load, _ = loaded()
    seen: list[torch.Tensor] = []

    def look(action, number, gate):
        seen.extend(training.weights.leaves(0, 0).values())

    read = training.weights.on_device(look)
    read(Action(Kind.F, 0, 0), 0, lambda: None)
    home = training.workload.parameter((0, next(iter(training.weights.leaves(0, 0)))))
    assert torch.equal(seen[0], home)
    assert seen[0].data_ptr() != home.data_ptr()
    free = training.weights._loads[load].end
    training.weights.free(free)
    assert torch.isnan(seen[0]).all()
    assert not torch.isnan(home).any()


def test_reading_what_has_not_been_loaded_is_an_error():
    schedule = stream(build("roundpipe", 2, 3), activations=False)
    training = Training(workload_of(schedule), schedule, Settings())
    handlers = dict(training.handlers)
    handlers[Kind.LOAD] = lambda action, number, gate: None
    with pytest.raises(ActionFailed, match=r"0F0 reads module 0, which is not on its device: no LOAD:P"):
        execute(training.program(uneven_costs(schedule)), handlers, VirtualBackend(uneven_costs(schedule)))


def test_a_step_before_the_gradient_is_home_is_an_error():
    schedule = stream(build("roundpipe", 2, 3, steps=True))
    training = Training(workload_of(schedule), schedule, Settings())
    handlers = dict(training.handlers)
    handlers[Kind.STORE] = lambda action, number, gate: None
    with pytest.raises(ActionFailed, match=r"taken before it is complete|KeyError"):
        execute(training.program(uneven_costs(schedule)), handlers, VirtualBackend(uneven_costs(schedule)))


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_stages_the_same_both_ways_stream_as_well(grain):
    """Mobius' order on one device each way: the head's weights leave between its forward and its backward."""
    jobs = [(Kind.F, 0), (Kind.F, 1), (Kind.F, 2), (Kind.B, 2), (Kind.B, 1), (Kind.B, 0)]
    rows = [tuple(Action(kind, stage, mb) for kind, stage in jobs[device::2] for mb in range(3)) for device in range(2)]
    plain = Schedule(Shape(2, 3, 3), tuple(rows), weights=Weights.STREAMED)
    schedule = stream(plain.with_partition(symmetric(split_evenly(4, 3))))
    check(schedule)
    run = train(schedule, workload_of(schedule), recompute_grain=grain)
    assert_same(run, reference_of(run, updates=False))
    assert run.training.passes.num_left == 0
