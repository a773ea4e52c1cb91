"""Backward in two halves: the gradients of one, bit for bit, with the work of the linear maps left to the second."""

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import build
from spared import slow
from torch import nn
from torch.nn import functional
from training_cases import TINY, assert_same, reference_of, train, workload_of

from rpbench.engine.compute.split_backward import defer, deferring
from rpbench.engine.compute.stage import Graph, Shells, Stages, backward, input_gradient, weight_gradients
from rpbench.engine.state.weights import Weights
from rpbench.models.linear import linear
from rpbench.workload.counts import Experts

TYPES = [torch.float64, torch.float32, torch.bfloat16]


def graph_of(leaves: dict[str, torch.Tensor], start: torch.Tensor | None, run, *, splits: bool) -> Graph:
    """A graph by hand, as `Stages.graph` makes one; `run` takes the input and the leaves by name."""
    named = {(0, name): leaf for name, leaf in leaves.items()}
    if not splits:
        return Graph(start, named, run(start, **leaves))
    with deferring(leaves.values()) as (linears, anchor):
        end = run(start, **leaves)
    return Graph(start, named, end, linears=tuple(linears), anchor=anchor)


def check_same(leaves: dict[str, torch.Tensor], start: torch.Tensor | None, run) -> list[str]:
    """Both ways give the same bits; returns the weights whose gradient was put off."""
    whole = graph_of(leaves, start, run, splits=False)
    grad = torch.randn(whole.end.shape, dtype=whole.end.dtype, generator=torch.Generator().manual_seed(1))
    below, gradients = backward(whole, grad)
    halves = graph_of(leaves, start, run, splits=True)
    below_too, rest = input_gradient(halves, grad)
    put_off = sorted(name for _, name in rest.places.values())
    assert not {name for _, name in rest.gradients} & set(put_off)
    found = weight_gradients(rest)
    assert found.keys() == gradients.keys()
    for place in gradients:
        assert torch.equal(found[place], gradients[place]), place
        assert found[place].dtype == gradients[place].dtype
    assert (below is None) == (below_too is None)
    assert below is None or torch.equal(below, below_too)
    fused, again = backward(graph_of(leaves, start, run, splits=True), grad)
    assert fused is None or torch.equal(fused, below)
    assert all(torch.equal(again[place], gradients[place]) for place in gradients)
    return put_off


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (2, 3, 5), (2, 1, 3, 5)])
def test_a_linear_map_of_any_shape(dtype, bias, shape):
    leaves = {"weight": leaf(7, 5, dtype=dtype)} | ({"bias": leaf(7, dtype=dtype)} if bias else {})
    start = leaf(*shape, dtype=dtype, seed=2)
    assert check_same(leaves, start, lambda x, weight, bias=None: linear(x, weight, bias).sin()) == sorted(leaves)


def test_inputs_that_are_not_contiguous():
    leaves = {"weight": leaf(7, 5), "over": leaf(4, 7)}

    def run(x, weight, over):
        return linear(linear(x.transpose(0, 1), weight).transpose(0, 1), over).cos()

    assert check_same(leaves, leaf(3, 6, 5, seed=2), run) == ["over", "weight"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dims", [(1, 0), (1, 0, 2), (1, 2, 0), (2, 1, 0), (0, 2, 1)])
def test_inputs_in_any_order_of_dimensions(dtype, dims):
    sizes = (64, 48, 40)[: len(dims)]
    start = leaf(*sizes, dtype=dtype, seed=2)
    leaves = {"weight": leaf(32, sizes[dims[-1]], dtype=dtype), "bias": leaf(32, dtype=dtype)}
    put_off = check_same(leaves, start, lambda x, weight, bias: linear(x.permute(dims), weight, bias).sin())
    assert put_off == ["bias", "weight"]


def test_weights_written_between_forward_and_backward_are_refused():
    weight = leaf(5, 5)
    graph = graph_of({"weight": weight}, leaf(3, 5, seed=2), lambda x, weight: linear(x, weight).sin(), splits=True)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        input_gradient(graph, torch.ones(3, 5, dtype=torch.float64))


def test_what_a_graph_uses_twice_is_not_put_off():
    leaves = {"twice": leaf(5, 5), "scaled": leaf(5, 5), "once": leaf(5, 5), "scale": leaf(5)}

    def run(x, twice, scaled, once, scale):
        x = linear(linear(x, twice).sin(), twice)
        x = linear(x, scaled) * scaled.sum() * scale
        return linear(x, once)

    assert check_same(leaves, leaf(3, 5, seed=2), run) == ["once"]


def test_a_weight_that_is_computed_is_not_put_off():
    leaves = {"weight": leaf(5, 5), "gain": leaf(5, 1)}
    assert check_same(leaves, leaf(3, 5, seed=2), lambda x, weight, gain: linear(x, weight * gain)) == []


def test_a_frozen_weight_leaves_the_rest_alone():
    frozen = torch.eye(5, dtype=torch.float64)
    leaves = {"thin": leaf(2, 5), "wide": leaf(5, 2)}

    def run(x, thin, wide):
        return linear(x, frozen) + 2 * linear(linear(x, thin), wide)

    assert check_same(leaves, leaf(3, 5, seed=2), run) == ["thin", "wide"]


def test_maps_below_which_nothing_needs_a_gradient_are_reached():
    tokens = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    leaves = {"first": leaf(3, 2), "second": leaf(3, 3)}

    def run(x, first, second):
        return linear(linear(tokens, first).sin(), second)

    assert check_same(leaves, None, run) == ["first", "second"]


def test_maps_whose_result_is_not_used_have_no_gradient():
    leaves = {"used": leaf(3, 3), "unused": leaf(3, 3)}

    def run(x, used, unused):
        linear(x, unused)
        return linear(x, used)

    assert check_same(leaves, leaf(2, 3, seed=2), run) == ["used"]


def test_a_module_without_a_linear_map_has_all_its_work_in_the_first_half():
    leaves = {"gain": leaf(5)}
    norm = graph_of(leaves, leaf(3, 5, seed=2), lambda x, gain: functional.rms_norm(x, (5,), gain), splits=True)
    _, rest = input_gradient(norm, torch.ones(3, 5, dtype=torch.float64))
    assert (rest.linears, rest.places) == ([], {})
    assert list(rest.gradients) == [(0, "gain")]
    assert weight_gradients(rest) == rest.gradients


def test_the_halves_do_the_work_of_the_whole_once():
    """No matrix product of a weight gradient in I, none of an input gradient in W."""
    products = Counter[str]()

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products[func.overloadpacket.__name__] += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            return func(*args, **(kwargs or {}))

    leaves = {f"w{number}": leaf(5, 5, seed=number) for number in range(4)}

    def run(x, **weights):
        for weight in weights.values():
            x = linear(x, weight).sin()
        return x

    graph = graph_of(leaves, leaf(3, 5, seed=9), run, splits=True)
    with Count():
        _, rest = input_gradient(graph, torch.ones(3, 5, dtype=torch.float64))
        assert products.total() == 4
        weight_gradients(rest)
        assert products.total() == 8


def test_memory_goes_at_i_but_for_what_w_needs():
    weight, start = leaf(5, 5), leaf(3, 5, seed=2)
    kept: dict[str, weakref.ref] = {}

    def run(x, weight):
        hidden = (x * 2).sin()
        y = linear(hidden, weight)
        kept["output"] = weakref.ref(y)
        out = y.exp()
        kept["saved"] = weakref.ref(out)
        return out * 1

    graph = graph_of({"weight": weight}, start, run, splits=True)
    _, rest = input_gradient(graph, torch.ones(3, 5, dtype=torch.float64))
    del graph
    gc.collect()
    assert kept["output"]() is None
    assert kept["saved"]() is None
    (map_,) = rest.linears
    assert map_.left is not None
    weight_gradients(rest)
    assert map_.left is None


def test_defer_says_which_maps_it_puts_off():
    weight = leaf(3, 3)
    with deferring([weight]) as (linears, _):
        end = linear(linear(leaf(2, 3), weight), weight)
    assert defer(end, linears) == []


def test_a_map_one_of_whose_weights_was_made_on_the_way_is_not_put_off():
    """What made it would lose its gradient: then the whole map goes back with the inputs."""
    weight, bias = leaf(3, 3), leaf(3)
    with deferring([weight, bias]) as (linears, _):
        linear(leaf(2, 3), weight, bias)
        linear(leaf(2, 3), weight, 2 * bias)
        linear(leaf(2, 3), 2 * weight, bias)
    assert [map_.weights for map_ in linears] == [(weight, bias)]


# --- whole models ---

MODELS = {
    "tied": replace(TINY, tied=True),
    "lora": replace(TINY, training_mode="lora", lora_rank=2),
    "experts": replace(TINY, family="gpt_oss", experts=Experts(4, 2, 4 * TINY.hidden)),
    "dropout": replace(TINY, dropout=0.2),
}


@pytest.mark.parametrize("name", [slow("zb_h2"), "zb_v", slow("two_bp")])
@pytest.mark.parametrize("model", MODELS)
def test_models_with_what_cannot_be_put_off(name, model):
    schedule = build(name, 2, 4, num_steps=2)
    run = train(schedule, workload_of(schedule, MODELS[model], dtype=torch.float32))
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0


def test_only_schedules_that_split_pay_for_it():
    schedule = build("1f1b", 2, 2)
    workload = workload_of(schedule)
    weights = Weights(workload, Counter())
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    plain, split = (Stages(workload, weights, Shells(workload.modules), splits=splits) for splits in (False, True))
    assert plain.graph(range(1, 2), x, (0, 0), 0).linears == ()
    assert len(split.graph(range(1, 2), x, (0, 0), 0).linears) == sum(
        isinstance(module, nn.Module) and type(module).__name__ == "Linear" for module in workload.modules[1].modules()
    )
