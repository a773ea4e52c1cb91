"""Times on the engine of a calibrated machine: what is counted, what its factors make of it, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rpbench.config.configuration import CONF
from rpbench.cost.hardware.basis import make_basis
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.hardware.measured import CALIBRATED, FACTORS, HALVES, PARTS, TERMS, factor_name
from rpbench.mesh.layers import engine_kernels
from rpbench.mesh.layers.engine_kernels import ADDED_BYTES, PUBLISHED_BYTES
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.run.cluster_file import factors, factors_ahead
from rpbench.workload.architecture import Architecture

COST = OmegaConf.to_container(OmegaConf.load(CONF / "cost" / "analytic.yaml"))
GPT = Architecture("a_gpt", num_layers=3, hidden=256, heads=8, vocab=4096, gated=False, seq_len=128)
RATES = {
    "matmul_flops_per_s": 1e11,
    "wide_matmul_flops_per_s": 1e11,
    "matmul_efficiency": 1.0,
    "attention_efficiency": 0.5,
    "memory_bytes_per_s": 2e10,
    "memory_efficiency": 1.0,
    "copy_bytes_per_s": 1e10,
    "host_bytes_per_s": 4e10,
}
ONES = {"half_rate_width": 10.0, **dict.fromkeys((*FACTORS, *HALVES), 1.0)}


def engine_times(model, num_tokens, basis):
    return times_of(setting_of(model, num_tokens, basis, "engine"))


def counted(model, num_tokens, basis):
    return engine_kernels.counted(eager_kernels(setting_of(model, num_tokens, basis)))


def basis_of(measured):
    return make_basis(Machine("mine", **RATES, measured=measured), COST["constants"], COST["declared"])


def only(*names):
    """Factors of which all others are 0."""
    return basis_of(dict.fromkeys((*FACTORS, *HALVES), 0.0) | {"half_rate_width": 10.0} | dict.fromkeys(names, 1.0))


def test_counts_are_those_of_the_shapes():
    counts = counted(GPT, 128, basis_of(ONES))
    assert set(counts) == set(PARTS)
    products = 2 * 128 * 12 * 256**2 * (1 + 10 / 128) / 1e11
    attention = 4 * 128 * 256 * GPT.keys_per_query("causal") / (1e11 * 0.5)
    assert counts["forward"]["products"] == pytest.approx(products + attention)
    assert counts["backward"]["products"] == pytest.approx(2 * products + 2.5 * attention)
    assert counts["backward"]["weights"] == pytest.approx(ADDED_BYTES * GPT.layer_parameters / 2e10)
    # The head makes its gradients where it makes its loss: three products, once.
    assert counts["head_forward"]["products"] == pytest.approx(3 * 2 * 128 * 256 * 4096 * (1 + 10 / 128) / 1e11)
    assert counts["head_backward"]["products"] == counts["head_backward"]["traffic"] == 0
    assert counts["head_step"]["weights"] == pytest.approx((28 + PUBLISHED_BYTES) * 4096 * 256 / 4e10)
    assert counted(replace(GPT, tied=True), 128, basis_of(ONES))["embedding_step"]["weights"] == 0


@pytest.mark.parametrize(
    ("part", "field", "first", "others"),
    [
        ("forward", "forward", 1, 1),
        ("recompute", "recompute", 1, 1),
        ("backward", "backward", 1, 1),
        ("step", "step", 1, 1),
        ("embedding_forward", "forward", 1, 0),
        ("embedding_backward", "backward", 1, 0),
        ("embedding_step", "step", 1, 0),
    ],
)
def test_the_embedding_is_counted_with_the_first_layer(part, field, first, others):
    times = getattr(engine_times(GPT, 128, only(factor_name(part, "layer"))), field)
    assert list(times) == [first, others, others]


@pytest.mark.parametrize("part", ["head_forward", "head_backward", "head_step"])
def test_the_head_is_a_part_of_its_own(part):
    times = engine_times(GPT, 128, only(factor_name(part, "layer")))
    assert getattr(times, part) == 1
    assert sum(times.forward) == sum(times.backward) == sum(times.step) == 0


@given(tokens=st.integers(1, 4096))
def test_the_halves_of_a_backward_have_their_shares(tokens):
    shares = {"engine_input_grad_share": 0.8, "engine_weight_grad_share": 0.5}
    times = engine_times(GPT, tokens, basis_of(ONES | shares))
    for whole, inputs, weights in zip(times.backward[1:], times.input_grad[1:], times.weight_grad[1:], strict=True):
        assert inputs == pytest.approx(0.8 * whole)
        assert weights == pytest.approx(0.5 * whole)
    embedding = times.backward[0] - times.backward[1]
    assert times.input_grad[0] + times.weight_grad[0] == pytest.approx(1.3 * times.backward[1] + embedding)
    assert times.head_input_grad + times.head_weight_grad == pytest.approx(times.head_backward)


@given(tokens=st.integers(16, 8192), more=st.floats(1.1, 4))
def test_more_tokens_take_longer_but_not_more_than_in_proportion(tokens, more):
    few, many = (engine_times(replace(GPT, seq_len=128), tokens * times, basis_of(ONES)) for times in (1, more))
    for part in ("forward", "recompute", "backward"):
        assert getattr(few, part)[1] < getattr(many, part)[1] <= more * getattr(few, part)[1] * (1 + 1e-9)
    assert few.head_backward == many.head_backward  # the gradients are there already
    assert few.step == many.step


@pytest.mark.parametrize("name", CALIBRATED)
def test_a_figure_that_is_missing_is_an_error(name):
    measured = {key: value for key, value in ONES.items() if key != name}
    basis = basis_of(measured)
    if name == "half_rate_width":  # the general constant stands in
        assert engine_times(GPT, 128, basis).forward[0] > engine_times(GPT, 128, basis_of(ONES)).forward[0]
        return
    with pytest.raises(ValueError, match=f"cluster=mine has no measured.{name}.*python -m rpbench calibrate"):
        engine_times(GPT, 128, basis)


@pytest.mark.parametrize("name", sorted(RATES))
def test_a_rate_that_is_missing_is_an_error(name):
    rates = {key: value for key, value in RATES.items() if key != name}
    basis = make_basis(Machine("mine", **rates, measured=ONES), COST["constants"], COST["declared"])
    if name == "copy_bytes_per_s":  # devices that hand tensors over have no link
        assert engine_times(GPT, 128, basis).hop == 0
        return
    with pytest.raises(ValueError, match=f"cluster=mine has no {name}"):
        engine_times(GPT, 128, basis)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"engine_forward_product": 1.0}, "unknown constant.*did you mean engine_forward_products"),
        ({"engine_forward_products": "fast"}, r"cluster\.measured\.engine_forward_products='fast'"),
        ({"engine_forward_products": -0.5}, "at least 0"),
        ({"engine_forward_products": float("nan")}, "finite"),
        ({"engine_forward_products": None}, "finite"),
    ],
)
def test_impossible_figures_are_refused(measured, said):
    with pytest.raises(ValueError, match=said):
        Machine("mine", measured=measured)


# --- factors -------------------------------------------------------------------------------------------------

positive = st.floats(0.01, 100)


@given(
    counts=st.lists(st.tuples(*[positive] * len(TERMS)), min_size=6, max_size=8),
    chosen=st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=4, max_size=4).filter(any),
)
def test_probes_without_noise_are_met_exactly(counts, chosen):
    times = [float(np.dot(row, chosen)) for row in counts]
    found = factors(counts, times)
    assert min(found) >= 0
    for row, took in zip(counts, times, strict=True):
        assert np.dot(row, found) == pytest.approx(took, rel=1e-6)


def test_factors_are_found_again_and_never_negative():
    counts = [(1.0, x, x * x) for x in (1.0, 2.0, 4.0, 8.0)]
    assert factors(counts, [3 + 2 * x for _, x, _ in counts]) == pytest.approx([3, 2, 0], abs=1e-9)
    # Plain least squares would take something away for the square.
    times = [1.0, 1.9, 3.6, 6.5]
    plain = np.linalg.lstsq(np.array(counts) / np.array(times)[:, None], np.ones(4), rcond=None)[0]
    assert plain.min() < 0 <= min(factors(counts, times))
    # Relative errors count: a long probe weighs no more than a short one.
    assert factors([(1.0,), (100.0,)], [1.0, 200.0]) == pytest.approx([1.2])


@given(
    work=st.lists(st.tuples(positive, positive), min_size=8, max_size=8),
    chosen=st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)),
    num_hidden=st.integers(0, 4),
)
def test_where_the_host_is_ahead_a_layer_is_the_least_that_anything_takes(work, chosen, num_hidden):
    """Where enough probes show more than their issue to tell two terms of work apart."""
    did = sorted(float(np.dot(row, chosen)) for row in work)
    layer = did[num_hidden]
    seen = [row for row in work if np.dot(row, chosen) > 1.01 * layer]
    assume(len(seen) > 1 and np.linalg.cond(np.array(seen)) < 1e3)
    counts = [(1.0, *row) for row in work]
    times = [max(layer, float(np.dot(row, chosen))) for row in work]
    found = factors_ahead(counts, times)
    assert min(found) >= 0
    for row, took in zip(counts, times, strict=True):
        assert max(found[0], np.dot(row[1:], found[1:])) == pytest.approx(took, rel=1e-5)


def test_a_layer_that_is_issued_ahead_hides_behind_its_work():
    ahead = engine_times(GPT, 128, basis_of(ONES | {"engine_issues_ahead": 1.0}))
    plain = engine_times(GPT, 128, basis_of(ONES))
    longest, both = ahead.forward[1], plain.forward[1]  # of what a layer takes and all else, and their sum
    assert longest == max(ONES["engine_forward_layer_s"], both - ONES["engine_forward_layer_s"]) < both
    assert ahead.step == plain.step  # the host does it


@pytest.mark.parametrize("fit", [factors, factors_ahead])
@pytest.mark.parametrize("times", [[], [1.0, 0.0]])
def test_probes_that_took_no_time_are_refused(times, fit):
    with pytest.raises(ValueError, match="above 0"):
        fit([(1.0,)] * len(times), times)
