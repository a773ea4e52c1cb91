"""Layers as an engine sees them: countable, cuttable, reproducible."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import FAMILIES, GPT, QWEN3, batch, loss_and_gradients, varied
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from rpbench.models import DecoderLayer, Embedding, Head, build_layer, build_model, shared_parameters
from rpbench.workload.architecture import architecture
from rpbench.workload.counts import Experts

CONF = Path(__file__).parents[2] / "conf" / "model"
CONFIGURED = {path.stem: architecture(path.stem) for path in sorted(CONF.glob("*.yaml")) if path.stem != "abstract"}


@pytest.mark.parametrize("name", [name for name, model in CONFIGURED.items() if model.latent is None])
def test_modules_hold_as_many_parameters_as_the_shape_says(name: str) -> None:
    model = CONFIGURED[name]
    layers = build_model(model, device="meta")
    parameters = dict(layers.named_parameters())  # a tied weight is listed once
    base = sum(parameter.numel() for name, parameter in parameters.items() if "lora" not in name)
    trainable = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    assert (base, trainable) == (model.total_parameters, model.trainable_parameters)
    assert len(layers) == model.num_layers + 2


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"latent": CONFIGURED["deepseek_v3"].latent}, "latent attention"),
        ({"experts": Experts(4, 2, 8, shared_inner=8)}, "shared experts"),
        ({"experts": Experts(4, 2, 8), "num_dense_layers": 1}, "first layers without experts"),
        ({"learned_positions": 16}, "learned positions"),
        ({"num_prediction_layers": 1}, "layers that predict further tokens"),
    ],
)
def test_what_no_module_builds_is_said_in_a_sentence(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"has {what}, which the modules of this project cannot build"):
        build_layer(replace(GPT, **changes), 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_holds_its_share(family: str) -> None:
    model = FAMILIES[family]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in build_model(model)]
    decoders = [model.layer_parameters] * model.num_layers
    assert sizes == [model.embedding_parameters, *decoders, model.head_parameters]


@settings(max_examples=15)
@given(family=st.sampled_from(list(FAMILIES)), cuts=st.sets(st.integers(1, 4)))
def test_any_cut_into_stages_gives_the_bits_of_the_whole_model(family: str, cuts: set[int]) -> None:
    """Stages with explicit weights and detached boundaries, as an engine runs them, against one plain step."""
    model = FAMILIES[family]
    tokens, labels = batch(model)
    whole = varied(model)
    loss, wanted = loss_and_gradients(whole, tokens, labels)

    bounds = [0, *sorted(cuts), model.num_layers + 2]
    stages = [list(range(first, last)) for first, last in pairwise(bounds)]
    weights: list[dict[str, Any]] = [
        {name: weight.detach().requires_grad_() for name, weight in layer.named_parameters()} for layer in whole
    ]
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    x = tokens
    for stage in stages:
        x = x.detach().requires_grad_() if outputs else x
        inputs.append(x)
        for index in stage:
            arguments = (x, labels) if index == model.num_layers + 1 else (x,)
            x = functional_call(whole[index], weights[index], arguments)
        outputs.append(x)
    assert torch.equal(outputs[-1].detach(), loss)

    gradient = None
    for x, y in zip(reversed(inputs), reversed(outputs), strict=True):
        y.backward(gradient)
        gradient = x.grad
    for group in shared_parameters(model):
        (owner, name), *others = group
        for layer, other in others:
            weights[owner][name].grad += weights[layer][other].grad
            weights[layer][other].grad = None
    got = {f"{index}.{name}": w.grad for index, layer in enumerate(weights) for name, w in layer.items()}
    assert {name for name, value in got.items() if value is not None} == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_alone_has_the_weights_it_has_in_the_whole_model(family: str) -> None:
    model = FAMILIES[family]
    whole = build_model(model, seed=5)
    for index in reversed(range(model.num_layers + 2)):
        alone = build_layer(model, index, seed=5).state_dict()
        assert alone.keys() == whole[index].state_dict().keys()
        for name, weight in whole[index].state_dict().items():
            assert torch.equal(alone[name], weight), (index, name)


def test_weights_depend_on_the_seed_and_the_layer_and_on_the_type_by_rounding_only() -> None:
    first: Any = build_model(GPT, seed=0)
    second: Any = build_model(GPT, seed=1)
    assert not torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[1].mlp.up.weight, first[2].mlp.up.weight)
    assert first[1].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    double = build_model(GPT, seed=0, dtype=torch.float64)
    half = build_model(GPT, seed=0, dtype=torch.bfloat16)
    for name, weight in first.named_parameters():
        assert torch.equal(double.get_parameter(name), weight.double())
        assert torch.equal(half.get_parameter(name), weight.bfloat16())


def test_tied_weights_are_one_parameter_and_their_places_are_told() -> None:
    layers: Any = build_model(QWEN3)
    assert shared_parameters(QWEN3) == (((0, "weight"), (4, "weight")),)
    assert layers[4].weight is layers[0].weight
    assert shared_parameters(replace(QWEN3, tied=False)) == ()
    apart: Any = build_model(replace(QWEN3, tied=False))
    assert torch.equal(apart[0].weight, layers[0].weight)
    assert not torch.equal(apart[4].weight, apart[0].weight)


def test_layers_are_embedding_decoders_and_head() -> None:
    layers = build_model(GPT)
    kinds = [type(layer) for layer in layers]
    assert kinds == [Embedding, DecoderLayer, DecoderLayer, DecoderLayer, Head]


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_leaves_a_layer_as_it_was(family: str) -> None:
    model = FAMILIES[family]
    layers = varied(model)
    before = {name: dict(vars(module)) for name, module in layers.named_modules()}
    weights = {name: value.clone() for name, value in layers.state_dict().items()}
    loss_and_gradients(layers, *batch(model))
    assert {name: dict(vars(module)) for name, module in layers.named_modules()} == before
    assert all(torch.equal(value, weights[name]) for name, value in layers.state_dict().items())


def test_dropout_is_drawn_from_the_generator_and_only_in_training() -> None:
    model = replace(GPT, dropout=0.25)
    layers = varied(model)
    tokens, _ = batch(model)
    torch.manual_seed(3)
    first = layers(tokens)
    second = layers(tokens)
    torch.manual_seed(3)
    assert torch.equal(layers(tokens), first)
    assert not torch.equal(second, first)
    assert torch.equal(layers.eval()(tokens), varied(GPT)(tokens))


@pytest.mark.parametrize("branch", ["attention.o", "mlp.down"])
def test_dropout_meets_the_embedding_and_both_branches(branch: str) -> None:
    layers = varied(replace(GPT, dropout=0.5))
    tokens, _ = batch(GPT, num_sequences=8)
    x = layers[0](tokens)
    assert share_of_zeros(x) == pytest.approx(0.5, abs=0.05)
    with torch.no_grad():
        layers[1].get_submodule(branch).weight.zero_()  # leaves the other branch
    assert share_of_zeros(layers[1](x) - x) == pytest.approx(0.5, abs=0.05)


def share_of_zeros(x: torch.Tensor) -> float:
    return (x == 0).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_stay_near_float32(family: str, dtype: torch.dtype) -> None:
    model = replace(FAMILIES[family], num_layers=1)
    tokens, labels = batch(model)
    loss, gradients = loss_and_gradients(build_model(model, dtype=dtype), tokens, labels)
    exact, _ = loss_and_gradients(build_model(model), tokens, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    assert all(value.dtype == dtype and value.isfinite().all() for value in gradients.values())


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 5: small has the layers 0 \(embedding\), 1 to 3, and 4 \(head\)"):
        build_layer(GPT, 5)


def test_shapes_without_a_module_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.head_dim=5: rotary positions need an even number"):
        build_layer(replace(GPT, head_dim=5), 1)
    with pytest.raises(ValueError, match=r"gated=false.*gpt_oss needs a gate"):
        build_layer(replace(FAMILIES["gpt_oss"], gated=False), 1)


@pytest.mark.parametrize("name, share", [("mid_gpt", 0.3), ("fat_head_gpt", 0.6)])
def test_heads_of_the_duel_have_their_share_of_a_step(name: str, share: float) -> None:
    """FLOPs of forward and backward; decoder layers run their forward twice, the head once."""
    model = CONFIGURED[name]
    head = 3 * model.head_forward_flops(1)
    layers = 4 * model.num_layers * model.layer_forward_flops(1)
    assert head / (head + layers) == pytest.approx(share, abs=0.05)


# What accelerators refuse when they are asked for the same bits every time: `torch.use_deterministic_algorithms` in
# torch 2.13, its list of what raises, by the names of the operators.
REFUSED = {
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "put_", "put", "histc"),
    *("adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
    *("max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward", "bincount"),
    *("upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "reflection_pad1d_backward", "median"),
    *("reflection_pad2d_backward", "reflection_pad3d_backward", "nll_loss_forward", "nll_loss2d_forward", "resize_"),
    *("_ctc_loss_backward", "_embedding_bag_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    *("scatter_reduce", "scatter_reduce_"),
}


class Done(TorchDispatchMode):
    """The names of the operators that have run; a sum along a row counts as its own where it is of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_float = name in ("cumsum", "cumsum_") and args[0].is_floating_point()
        self.names.add(f"{name} of floats" if is_float else name)
        return func(*args, **(kwargs or {}))


def done_by(model: Any, dtype: torch.dtype) -> set[str]:
    with Done() as done:
        loss_and_gradients(varied(replace(model, dropout=0.1), dtype), *batch(model))
    return done.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_accelerators_can_give_the_bits_of_every_family_twice(name: str, dtype: torch.dtype) -> None:
    done = done_by(FAMILIES[name], dtype)
    assert len(done) > 30
    assert not done & (REFUSED | {"cumsum of floats"})
    assert ("_grouped_mm" in done) == (name == "gpt_oss" or (name == "qwen3_moe" and dtype is torch.float32))


def test_a_sum_along_a_row_that_accelerators_refuse_is_seen() -> None:
    with Done() as done:
        torch.ones(2, 3).cumsum(1)
        torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))
    assert {"cumsum of floats", "nll_loss_forward"} <= done.names
