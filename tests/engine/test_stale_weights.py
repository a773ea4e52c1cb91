"""Pipelines that are not flushed: bit for bit a plain loop on the weights the papers say each stage reads."""

import math
from dataclasses import replace

import pytest
import torch
from cases import build
from hypothesis import given, settings
from hypothesis import strategies as st
from spared import slow
from torch import nn
from torch.func import functional_call
from training_cases import TINY, assert_same, reference_of, train, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.layout import layout_of
from rpbench.engine.reference import reads_of
from rpbench.engine.workload import Workload
from rpbench.ir.action import COMPUTE, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.versions import lane_reads
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.policy import ASYNCHRONOUS, Policy
from rpbench.ir.schedule import ScheduleError, Shape, from_text
from rpbench.passes.lower import add_steps
from rpbench.registry import entry

RATE = 1e-2


def pipedream(devices: int, minibatches: int, **options):
    """PipeDream as the paper has it: a step after every minibatch."""
    return build("pipedream", devices, 1, num_steps=minibatches, steps=True, **options)


def with_stash(devices: int):
    """Section 3.3: a stage s has made i - (p - 1 - s) updates before it lets minibatch i in."""
    return lambda stage, minibatch: max(0, minibatch - (devices - 1 - stage))


def with_vertical_sync(devices: int):
    return lambda stage, minibatch: max(0, minibatch - (devices - 1))


PAPER = {False: with_stash, True: with_vertical_sync}


@pytest.mark.parametrize("vertical", [False, True])
@settings(deadline=None, max_examples=3)
@given(devices=st.integers(1, 5), minibatches=st.integers(1, 12), seed=st.integers(0, 99))
def test_pipedream_trains_on_the_weights_of_the_paper(vertical, devices, minibatches, seed):
    schedule = pipedream(devices, minibatches, num_layers=5, seed=seed, vertical_sync=vertical)
    run = train(schedule, workload_of(schedule), learning_rate=RATE)
    read, stage_of = PAPER[vertical](devices), run.training.layout.stage_of
    assert_same(run, reference_of(run, lambda module, minibatch: read(stage_of(module), minibatch)))
    for number, action in enumerate(action for _, _, row in schedule.items() for action in row):
        if action.kind in COMPUTE:
            assert run.training.passes.read[number, action] == read(action.stage, action.microbatch), action
    assert run.training.passes.num_left == 0


DRIFTING_HEAD = """
# rpbench-schedule 1
# name=mine ranks=2 stages=2 backward_stages=2 microbatches=1 steps=4 parts=1 fused=0 policy=latest weights=bound \
placement=0,1 partition=1-1
0/compute: 0F0 0F1 0F2 0B0 0STEP@1 0B1 0STEP@2 0B2 0STEP@3 0F3 0B3 0STEP@4
1/compute: 1F0 1F1 1F2 1B0 1STEP@1 1B1 1STEP@2 1B2 1STEP@3 1F3 1B3 1STEP@4
"""


def test_a_head_goes_back_through_the_weights_it_went_forth_with():
    """Its graph waits while the last stage steps; the other layers recompute on what is newest."""
    schedule = from_text(DRIFTING_HEAD.lstrip())
    run = train(schedule, workload_of(schedule), learning_rate=1e-2)
    assert_same(run, reference_of(run))


def test_the_last_bits_tell_stale_weights_from_new_ones():
    schedule = pipedream(3, 8)
    run = train(schedule, workload_of(schedule), learning_rate=RATE)
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(run, lambda module, minibatch: minibatch))
    late = with_vertical_sync(3)
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(run, lambda module, minibatch: late(0, minibatch)))


@pytest.mark.parametrize("options", [{}, {"vertical_sync": True}], ids=["stash", "vertical"])
@pytest.mark.parametrize("grain", ["stage", slow("layer")])
def test_threads_read_the_same(options, grain):
    schedule = pipedream(3, 9, **options)
    workload = workload_of(schedule, replace(TINY, dropout=0.2, tied=True))
    with CpuBackend() as backend:
        run = train(schedule, workload, backend=backend, learning_rate=RATE, recompute_grain=grain, clip_norm=0.5)
    assert_same(run, reference_of(run))


def test_a_stage_keeps_as_many_versions_as_it_has_microbatches_under_way():
    schedule = pipedream(4, 12)
    run = train(schedule, workload_of(schedule))
    layers = run.training.layout.backward
    assert [max(run.training.weights.num_live[module] for module in modules) for modules in layers] == [1, 1, 1, 1]
    assert run.training.weights.most_live == 4
    assert Analysis(schedule).versions.live == (4, 3, 2, 1)


# --- what is read, told in two ways ---


@pytest.mark.parametrize("policy", list(Policy))
@settings(deadline=None, max_examples=15)
@given(devices=st.integers(1, 5), window=st.integers(1, 4), steps=st.integers(1, 4))
def test_lanes_say_what_the_replay_finds(policy, devices, window, steps):
    schedule = build("pipedream", devices, max(window, devices), num_steps=steps, steps=True)
    if policy in (Policy.FLUSH, Policy.OPTIMISTIC, Policy.SELECTIVE):
        schedule = add_steps(entry("1f1b").build(schedule.shape))
    schedule = replace(schedule, policy=policy)
    found, versions = lane_reads(schedule), Analysis(schedule).versions
    for action, version in zip((a for _, _, row in schedule.items() for a in row), versions.read, strict=True):
        if version is not None:
            own = found.forward if action.kind is Kind.F else found.backward
            assert own[action.stage, action.microbatch] == version, action


@pytest.mark.parametrize("policy", sorted(ASYNCHRONOUS, key=str))
def test_what_only_time_could_tell_is_refused(policy):
    schedule = replace(add_steps(entry("1f1b").build(pipedream(2, 3).shape), lane="host"), policy=policy)
    with pytest.raises(ScheduleError, match=f"policy {policy.value} reads the newest version of a stage"):
        lane_reads(schedule)


# --- operators that must see the stashed tensors ---


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16, dtype=torch.float64) + 0.01)

    def forward(self, x):
        return torch.matmul(x, self.weight)


class Convolution(nn.Module):
    """Four channels of 2 x 2 in each token's sixteen numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)

    def forward(self, x):
        return self.inner(x.reshape(-1, 4, 2, 2)).reshape(x.shape)


OPERATORS = {
    "mul": Scale,
    "matmul": Product,
    "conv2d": Convolution,
    "layer_norm": lambda: nn.LayerNorm(16, dtype=torch.float64),
    "rms_norm": lambda: nn.RMSNorm(16, dtype=torch.float64),
    "linear": lambda: nn.Linear(16, 16, dtype=torch.float64),
}


def sees_data_swapped_after_forward(module: nn.Module) -> bool:
    """Whether a backward whose parameters' `.data` was replaced after the forward gives another input gradient."""
    torch.manual_seed(0)
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 16, dtype=torch.float64)
    (expected,) = torch.autograd.grad(module(x), x, grad)
    end = module(x)
    for parameter in module.parameters():
        parameter.data = parameter.data + 1.0
    (found,) = torch.autograd.grad(end, x, grad)
    return not torch.equal(found, expected)


@pytest.mark.parametrize("name", list(OPERATORS))
def test_swapping_data_is_not_stashing(name):
    """What makes explicit versions necessary: except for F.linear, backward silently reads the new weights."""
    assert sees_data_swapped_after_forward(OPERATORS[name]()) == (name != "linear")


@pytest.mark.parametrize("name", list(OPERATORS))
def test_version_tensors_are_what_backward_reads(name):
    module = OPERATORS[name]()
    torch.manual_seed(0)
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 16, dtype=torch.float64)
    old = {key: value.detach().clone().requires_grad_() for key, value in module.named_parameters()}
    end = functional_call(module, old, (x,))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.data = parameter + 1.0
    found = torch.autograd.grad(end, [x, *old.values()], grad)
    expected = torch.autograd.grad(functional_call(module, old, (x,)), [x, *old.values()], grad)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("name", list(OPERATORS))
def test_the_engine_stashes_for_every_operator(name, grain):
    """Every layer is the operator; weights move so fast that a wrong version would show."""
    schedule = pipedream(3, 6, num_layers=3)
    plain = workload_of(schedule)
    torch.manual_seed(0)
    layers = [OPERATORS[name]() for _ in range(3)]
    workload = Workload([plain.modules[0], *layers, plain.modules[-1]], plain.data, 1)
    run = train(schedule, workload, learning_rate=0.1, recompute_grain=grain)
    read, stage_of = with_stash(3), layout_of(schedule.partition).stage_of
    assert_same(run, reference_of(run, lambda module, minibatch: read(stage_of(module), minibatch)))
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(run, lambda module, minibatch: minibatch))


def test_a_reference_that_drifts_goes_back_piece_by_piece():
    """With equal versions both ways, pieces and one graph give the same bits."""
    schedule = replace(pipedream(3, 7), policy=Policy.LATEST)
    run = train(schedule, workload_of(schedule), learning_rate=RATE)
    reads = reads_of(schedule, run.training.layout)
    assert_same(run, reference_of(run))
    assert reads.forward(0, 4) == 2
    assert reads.backward(0, 4) == 4
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(run, reads.forward))
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(run, reads.backward))


# --- replicated stages ---


@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize("replicas", [[2, 1], slow([1, 2]), slow([2, 3, 1])])
def test_replicas_train_as_one_loop_on_the_same_stale_weights(replicas, vertical):
    window, ranks = math.lcm(*replicas), sum(replicas)
    shape = Shape(ranks, len(replicas), window, num_steps=4)
    schedule = entry("pipedream").build(shape, replicas=replicas, vertical_sync=vertical)
    schedule = add_steps(schedule.with_partition(symmetric(split_evenly(4, len(replicas)))))
    run = train(schedule, workload_of(schedule), learning_rate=RATE)
    stage_of = run.training.layout.stage_of

    def read(module, microbatch):
        stage = 0 if vertical else stage_of(module)
        count, before = replicas[stage], sum(replicas[:stage])
        num_done = max(0, microbatch // count - (ranks - 1 - before) // count)
        return num_done // (window // count)

    assert_same(run, reference_of(run, read))
    with CpuBackend() as backend:
        assert_same(train(schedule, workload_of(schedule), backend=backend, learning_rate=RATE), reference_of(run))
