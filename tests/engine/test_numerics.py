"""Training through any schedule against one plain loop: gradients, weights and losses bit for bit."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import NAMES, SPARED, build
from hypothesis import given, settings
from hypothesis import strategies as st
from spared import slow, spared
from training_cases import MOE, TINY, Run, assert_same, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.compute.forward_backward import NonFiniteLoss
from rpbench.engine.compute.stage import Stages
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.state.accumulation import gradient_groups
from rpbench.engine.state.updates.optimizer import direction
from rpbench.engine.training import Settings, Training
from rpbench.engine.workload import Workload
from rpbench.ir.action import Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule
from rpbench.models.build import build_model
from rpbench.models.data import SyntheticTokens
from rpbench.passes.lower import lower_communication, split_backward
from rpbench.registry import entry
from rpbench.sim.events import deal

GRAINS = [("roundpipe", "stage"), ("roundpipe", "layer"), ("looped_bfs", "layer"), ("1f1b", "stage")]
# Two of the five kinds, where it is not the order that the test is about.
FEWER = spared(NAMES, lambda name: name in ("pipedream", "roundpipe"))
SPARED_GRAINS = spared(GRAINS, lambda case: case[1] == "layer")
TYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=1)  # of every schedule
@given(data=st.data())
def test_gradients_equal_the_reference_in_any_shape(name, data):
    check_any_shape(name, data.draw)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_gradients_equal_the_reference_in_many_shapes(name, data):
    check_any_shape(name, data.draw)


def check_any_shape(name, draw):
    devices = draw(st.integers(1, 6))
    microbatches = draw(st.integers(1, 7))
    stages = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    schedule = build(
        name,
        devices,
        microbatches,
        seed=draw(st.integers(0, 99)),
        stages=stages,
        num_layers=draw(st.integers(1, 5)),
        num_steps=draw(st.integers(1, 2)),
    )
    if schedule.shape.num_steps == 1 and name == "roundpipe":
        schedule = deal(schedule, uneven_costs(schedule), draw(st.sampled_from(["round_robin", "dynamic"])))
    workload = workload_of(schedule, dtype=draw(st.sampled_from(TYPES)))
    run = train(schedule, workload, recompute_grain=draw(st.sampled_from(["stage", "layer"])))
    assert_same(run, reference_of(run, updates=schedule.shape.num_steps > 1))


@pytest.mark.parametrize("devices", [8, slow(16)])
@pytest.mark.parametrize("name", spared(NAMES, lambda name: name in ("roundpipe", "zb_v")))
def test_gradients_equal_the_reference_on_many_devices(name, devices):
    stages = devices - 1, devices + 3
    microbatches = devices if name == "pipedream_2bw" else 5
    schedule = build(name, devices, microbatches, num_layers=4, stages=stages, chunks=1)
    run = train(schedule, workload_of(schedule, dtype=torch.float32))
    assert_same(run, reference_of(run, updates=False))


@pytest.mark.parametrize("shape", [TINY, MOE], ids=["gpt", "experts"])
def test_the_reference_is_plain_training(shape):
    """Against torch's own loop over the whole model; here the order of sums differs, so the last bits may.

    Gradients of experts come with other strides than their weights have.
    """
    schedule = build("roundpipe", 3, 6, num_steps=4, round_size=2)
    workload = workload_of(schedule, shape)
    run = train(schedule, workload, learning_rate=1e-2)
    model = build_model(shape, dtype=torch.float64)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(4):
        losses = []
        for microbatch in range(6):
            tokens, labels = workload.data.microbatch(step, microbatch)
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 6
            loss.backward()
            losses.append(loss.item())
        adamw.step()
        adamw.zero_grad()
        assert run.training.mean_loss(step) == pytest.approx(sum(losses), rel=1e-12)
    for (module, name), master in run.training.optimizer.masters.items():
        torch.testing.assert_close(master, model[module].get_parameter(name).detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", FEWER)
def test_twenty_steps_equal_plain_training(name):
    schedule = build(name, 2, 2, num_steps=20, num_layers=1)
    run = train(schedule, workload_of(schedule), num_warmup_steps=5, learning_rate=1e-2)
    assert_same(run, reference_of(run))
    assert run.training.mean_loss(19) != run.training.mean_loss(0)
    assert run.training.weights.most_live <= Analysis(schedule).versions.max_live
    if schedule.policy is Policy.FLUSH:
        assert run.training.weights.most_live == 1


def test_twenty_asynchronous_steps_equal_training_on_weights_one_step_old():
    microbatches = 4
    schedule = build("roundpipe", 3, microbatches, num_steps=20, num_layers=2, asynchronous=True)
    run = train(schedule, workload_of(schedule), learning_rate=1e-2)
    # Iteration k runs on the weights after max(k - 1, 0) steps.
    late = reference_of(run, read_version=lambda module, microbatch: max(0, microbatch // microbatches - 1))
    assert_same(run, late)
    for number, action in enumerate(run.training.schedule.compute(0)):
        assert run.training.passes.read[number, action] == max(0, action.microbatch // microbatches - 1), action
    assert run.training.weights.most_live == 2
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(run, read_version=lambda module, microbatch: microbatch // microbatches))


# --- what a workload may ask for ---


def check_same(schedule: Schedule, workload: Workload, **options) -> None:
    run = train(schedule, workload, **options)
    assert_same(run, reference_of(run))


@pytest.mark.parametrize("name, grain", SPARED_GRAINS)
def test_dropout_draws_again_what_it_drew(name, grain):
    schedule = build(name, 2, 4, num_steps=2, num_layers=4)
    workload = workload_of(schedule, replace(TINY, dropout=0.3))
    check_same(schedule, workload, recompute_grain=grain)


def test_dropout_differs_between_layers_and_microbatches():
    schedule = build("gpipe", 2, 2, num_layers=2)
    workload = workload_of(schedule, replace(TINY, dropout=0.5))
    masks = Counter()

    class Ones(torch.nn.Module):
        def forward(self, x):
            mask = torch.nn.functional.dropout(torch.ones(64))
            masks[tuple(mask.tolist())] += 1
            return x

    run = train(schedule, replace(workload, modules=[workload.modules[0], Ones(), Ones(), workload.modules[-1]]))
    assert sorted(masks.values()) == [2, 2, 2, 2], "forward and recomputation, of 2 layers and 2 microbatches"
    assert run.training.passes.losses


@pytest.mark.parametrize("name", FEWER)
def test_tied_embeddings_add_the_gradients_of_both_ends(name):
    schedule = build(name, 2, 4, num_steps=3)
    model = replace(TINY, tied=True)
    workload = workload_of(schedule, model)
    assert workload.tied == {(0, "weight"): ((0, "weight"), (5, "weight"))}
    check_same(schedule, workload, learning_rate=1e-2)


@pytest.mark.parametrize("name", FEWER)
def test_only_adapters_are_trained(name):
    schedule = build(name, 2, 4, num_steps=2, num_layers=2)
    workload = workload_of(schedule, replace(TINY, training_mode="lora", lora_rank=2))
    run = train(schedule, workload, learning_rate=1e-1)
    assert_same(run, reference_of(run))
    assert {name.rpartition(".")[2] for _, name in run.training.optimizer.masters} == {"lora_a", "lora_b"}
    assert run.training.mean_loss(1) != run.training.mean_loss(0)


@pytest.mark.parametrize("name", FEWER)
def test_gradients_are_clipped_by_the_norm_of_all(name):
    schedule = build(name, 2, 4, num_steps=2, num_layers=2)
    workload = workload_of(schedule, replace(TINY, tied=True))
    run = train(schedule, workload, learning_rate=1e-2, clip_norm=0.05)
    assert_same(run, reference_of(run))
    assert clipping_matters(run)


def clipping_matters(run):
    """Whether plain training without a bound on the norm comes to other weights."""
    training = run.training
    free = replace(training.settings, optimizer=replace(training.settings.optimizer, clip_norm=None))
    unbound = Run(Training(training.uncut, training.schedule, free), run.timeline)
    others = reference_of(unbound).masters
    return any(not torch.equal(master, others[place]) for place, master in training.optimizer.masters.items())


@pytest.mark.parametrize("round_size", [slow(1), 2, 3, slow(7)])
def test_accumulation_over_calls_adds_one_call_after_another(round_size):
    schedule = build("roundpipe", 3, 7, num_steps=2, round_size=round_size)
    rounds = tuple(tuple(range(start, min(start + round_size, 7))) for start in range(0, 7, round_size))
    groups = gradient_groups(Analysis(schedule))
    assert all(groups[stage, 1] == rounds for stage in range(4))
    run = train(schedule, workload_of(schedule, dtype=torch.float32))
    assert_same(run, reference_of(run))


def test_groups_follow_the_order_of_a_lane():
    assert gradient_groups(Analysis(build("1f1b", 2, 3)))[0, 1] == ((0, 1, 2),)
    assert gradient_groups(Analysis(build("looped_bfs", 2, 3)))[0, 1] == ((2, 1, 0),)


def test_lowered_communication_changes_nothing():
    schedule = lower_communication(build("roundpipe", 3, 4, seed=3), lane="net")
    run = train(schedule, workload_of(schedule))
    assert_same(run, reference_of(run, updates=False))


@pytest.mark.parametrize("name, grain", SPARED_GRAINS)
def test_backward_in_two_halves_changes_nothing(name, grain):
    schedule = split_backward(build(name, 2, 4, num_steps=2))
    assert {Kind.I, Kind.W} < {action.kind for action in schedule.compute(0)}
    workload = workload_of(schedule, replace(TINY, tied=True, dropout=0.1))
    run = train(schedule, workload, recompute_grain=grain)
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0


def test_recomputation_of_its_own_changes_nothing():
    schedule = build("1f1b", 2, 3, num_layers=5)
    rows = tuple(
        tuple(each for action in schedule.compute(device) for each in recomputed(action)) for device in range(2)
    )
    schedule = replace(schedule, rows=rows)
    for grain in ("stage", "layer"):
        run = train(schedule, workload_of(schedule), recompute_grain=grain)
        assert_same(run, reference_of(run, updates=False))


def recomputed(action: Action) -> list[Action]:
    return [action._replace(kind=Kind.R), action] if action.kind is Kind.B else [action]


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_recomputation_is_done_when_the_gradient_is_awaited(grain, monkeypatch):
    schedule = build("roundpipe", 2, 2, num_layers=4, stages=(1, 3))
    training = Training(workload_of(schedule), schedule, Settings(recompute_grain=grain))
    ran, before = [], []
    real = Stages.graph
    monkeypatch.setattr(Stages, "graph", lambda self, modules, *rest: ran.append(modules) or real(self, modules, *rest))

    def backward(action, number, gate):
        ran.clear()
        training.handlers[Kind.B](action, number, lambda: before.append(list(ran)))

    costs = uneven_costs(schedule)
    execute(training.program(costs), training.handlers | {Kind.B: backward}, VirtualBackend(costs))
    first = {"stage": [range(2, 4), range(2)], "layer": [range(3, 4), range(1, 2)]}[grain]
    assert sorted(before, key=lambda ranges: -ranges[0].start) == [[first[0]]] * 2 + [[first[1]]] * 2


def test_weights_in_16_bits_are_updated_in_32():
    schedule = build("roundpipe", 2, 4, num_steps=4)
    run = train(schedule, workload_of(schedule, dtype=torch.bfloat16), learning_rate=1e-3)
    assert_same(run, reference_of(run))
    assert {master.dtype for master in run.training.optimizer.masters.values()} == {torch.float32}


@pytest.mark.parametrize("grain", ["stage", slow("layer")])
@pytest.mark.parametrize("name", SPARED)
def test_nothing_is_left_over(name, grain):
    """Every kept input and boundary tensor is used up, and the model's own weights are as they were."""
    schedule = build(name, 2, 2, num_steps=2, num_layers=3)
    workload = workload_of(schedule)
    before = [parameter.clone() for module in workload.modules for parameter in module.parameters()]
    training = train(schedule, workload, recompute_grain=grain).training
    after = [parameter for module in workload.modules for parameter in module.parameters()]
    assert all(map(torch.equal, before, after))
    assert training.passes.num_left == 0


# --- what is refused ---


def test_a_loss_that_is_not_a_number_is_named():
    schedule = build("roundpipe", 2, 4)
    workload = workload_of(schedule)
    with torch.no_grad():
        workload.modules[3].mlp.down.weight.fill_(torch.inf)
    with pytest.raises(ActionFailed, match=r"the loss of microbatch 0 is (nan|inf); lower learning_rate") as seen:
        train(schedule, workload)
    assert isinstance(seen.value.__cause__, NonFiniteLoss)


def test_a_workload_that_does_not_fit_is_refused():
    schedule = build("1f1b", 2, 4)
    workload = workload_of(schedule)
    with pytest.raises(ValueError, match="sums to 4 layers, the model has 3"):
        Training(replace(workload, modules=workload.modules[:-1]), schedule)
    with pytest.raises(ValueError, match="4 microbatches a step, the workload 3"):
        Training(replace(workload, num_microbatches=3), schedule)
    with pytest.raises(ValueError, match="no partition"):
        Training(workload, replace(schedule, partition=None))
    with pytest.raises(ValueError, match="recompute_grain='tensor': one of stage, layer"):
        Settings(recompute_grain="tensor")


def test_batches_do_not_depend_on_the_schedule():
    data = SyntheticTokens(37, 5, 2, seed=4)
    workloads = [
        Workload(build_model(TINY, seed=4), data, build(name, 2, 4).shape.num_microbatches, 4)
        for name in (entry("1f1b").name, "roundpipe")
    ]
    for microbatch in range(8):
        one, other = (workload.batch(microbatch) for workload in workloads)
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.labels, other.labels)


# --- the last stage's graph kept -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=6)
@given(data=st.data())
@pytest.mark.slow
def test_a_kept_last_stage_is_not_run_again_and_trains_the_same(data):
    draw = data.draw
    name = draw(st.sampled_from(["1f1b", "interleaved_1f1b", "pipedream_2bw"]))
    devices, seed, chunks = draw(st.integers(1, 4)), draw(st.integers(0, 99)), 2 if "inter" in name else 1
    schedule = build(name, devices, draw(st.integers(1, 6)), seed=seed, num_layers=5, num_steps=2, chunks=chunks)
    workload = workload_of(schedule, replace(TINY, dropout=0.1))
    run = train(schedule, workload, recompute="except_last")
    assert not run.training.passes.recomputed(schedule.shape.num_stages - 1)
    assert run.training.passes.num_left == 0
    assert_same(run, reference_of(run))


def test_a_kept_last_stage_holds_what_running_it_again_would():
    """One microbatch's activations, so no more than its backward needs anyhow."""
    schedule = build("1f1b", 2, 4, num_layers=4, chunks=1)
    peaks = {}
    for recompute in ("all", "except_last"):
        run = train(schedule, workload_of(schedule), recompute=recompute, device_memory_bytes=10**9)
        peaks[recompute] = run.training.memory.peak_bytes
    assert peaks["except_last"][0] == peaks["all"][0]
    assert peaks["except_last"][1] <= peaks["all"][1]


def test_a_last_stage_that_does_not_go_back_at_once_cannot_be_kept():
    schedule = build("gpipe", 2, 4, chunks=1)
    with pytest.raises(ValueError, match="recompute=except_last: the last stage of gpipe does other work"):
        train(schedule, workload_of(schedule), recompute="except_last")
    with pytest.raises(ValueError, match="recompute='last': one of all, except_last"):
        Settings(recompute="last")


@pytest.mark.parametrize("with_decay", [False, True])
def test_after_one_step_adamw_heads_where_the_signs_of_the_gradient_say(with_decay):
    """One step: the mean is the gradient and the root of the mean square its size; decay takes 0.1 of the weight."""
    weight = torch.tensor([2.0, -4.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.0, weight_decay=0.1)
    weight.grad = torch.tensor([0.5, 3.0], dtype=torch.float64)
    assert direction(optimizer, weight, with_decay=with_decay) is None
    optimizer.step()
    expected = [1 + 0.2, 1 - 0.4] if with_decay else [1.0, 1.0]
    assert direction(optimizer, weight, with_decay=with_decay).tolist() == pytest.approx(expected, rel=1e-6)
