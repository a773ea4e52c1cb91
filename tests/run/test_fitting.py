"""recompute=fitting: as many layers keep their activations as the memory takes, and it says how many."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.cost.footprint.fitting import fitting_layers
from rpbench.ir.action import Kind
from rpbench.run.assemble import assemble
from rpbench.run.mesh_run import planned

RUN = ("schedule=1f1b", "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=published", "charge=bytes",
       "num_microbatches=16")  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (None, (5, 3, 4)),
        (170, (5, 3, 4)),
        (169, (4, 3, 4)),
        (157, (3, 3, 4)),
        (110, (0, 3, 4)),
        (109, (1, 2, 4)),
        (69, (1, 0, 4)),
        (50, (0, 0, 4)),
        (29, (0, 0, 1)),
        (10, (0, 0, 0)),
        (5, (0, 0, 0)),
    ],
)
def test_layers_keep_from_the_last_stage_up(limit, kept):
    """By hand: five layers of 12 bytes, three of 20 and four of 10, beside 10."""
    layers = np.array([[5, 3, 4]])

    def peaks(keeps):
        assert ((keeps >= 0) & (keeps <= layers)).all()
        return 10 + keeps @ np.array([[12], [20], [10]])

    assert fitting_layers(peaks, layers, np.ones((3, 1), int), limit).tolist() == [list(kept)]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_one_more_layer_never_fits(data):
    """Any stages on any devices, many plans at once: each plan fits, and one more layer of any stage does not.

    That is, if a stage that has nothing to make again needs no less for that: it may, once the stages below are known.
    """
    num_stages, devices, plans = (data.draw(st.integers(1, most)) for most in (6, 4, 3))
    numbers = partial(arrays, np.int64, elements=st.integers(0, 9))
    layers, each = data.draw(numbers((plans, num_stages))), data.draw(numbers(num_stages))
    holds = data.draw(arrays(np.int64, (num_stages, devices), elements=st.integers(0, 1)))
    again = data.draw(st.sampled_from([0, 0, 7]))  # of a stage with a layer to make again

    def peaks(keeps):
        return (keeps * each + again * (keeps < layers)) @ holds

    limit = data.draw(st.integers(0, 200))
    found, whole = fitting_layers(peaks, layers, holds, limit), peaks(layers)
    for plan in range(plans):
        kept = found[plan]
        if (whole[plan] <= limit).all():
            assert (kept == layers[plan]).all()
        elif (peaks(0 * layers)[plan] > limit).any():
            assert not kept.any()
        else:
            assert (peaks(found)[plan] <= limit).all()
            for stage in np.flatnonzero(kept < layers[plan]) if not again else ():
                more = found.copy()
                more[plan, stage] += 1
                assert (peaks(more)[plan] > limit).any()


def made(*more):
    return assemble(load([*RUN, *more]))


def times_of(assembled):
    return {kind: [(work.pre, work.main) for work in each] for kind, each in assembled.costs.work.items()}


def test_with_room_nothing_is_recomputed_and_without_everything():
    roomy, none = made("recompute=fitting"), made("recompute=none")
    assert roomy.keeps == roomy.choice.partition.backward
    assert times_of(roomy) == times_of(none)
    tight = made("recompute=fitting", "++cluster.device_memory_bytes=10000000000")
    assert tight.keeps == (0,) * 8
    assert times_of(tight) == times_of(made())


def test_where_nothing_is_recomputed_an_order_that_follows_from_times_is_made_for_that():
    run = ("schedule=v_half", "model=llama31_8b", "num_microbatches=32", "workload.microbatch_sequences=1")
    for words in (("cluster=8x_h100", "cost=analytic", "num_devices=8"), ("cluster=dgx_h100", "mesh.pipeline=8")):
        asked = [load([*run, *words, f"recompute={each}"]) for each in ("fitting", "none", "all")]
        found = [planned(each)[2] if getattr(each.mesh, "machine", None) else assemble(each).schedule for each in asked]
        assert found[0] == found[1] != found[2], words


def test_in_between_some_layers_keep_and_all_fit():
    limit = 17_500_000_000
    found = made("recompute=fitting", f"++cluster.device_memory_bytes={limit}")
    cut, again = found.choice.partition.backward, made().costs.work[Kind.B]
    assert 0 < sum(found.keeps) < sum(cut)
    shares = [1 - kept / layers for kept, layers in zip(found.keeps, cut, strict=True)]
    assert any(0 < share < 1 for share in shares)
    expected = [share * work.pre for share, work in zip(shares, again, strict=True)]
    assert [work.pre for work in found.costs.work[Kind.B]] == pytest.approx(expected)


def test_the_record_says_which_layers(rpbench):
    limit = 17_500_000_000
    status, (record,), _ = rpbench(*RUN, "recompute=fitting", f"++cluster.device_memory_bytes={limit}")
    assert (status, record["status"]) == (0, "ok")
    assert 0 < sum(record["kept_layers"]) < 28
    assert max(record["peak_memory_bytes"]) <= limit


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=tiny_gpt", "backend=cpu"), "recompute=fitting with mode=train: layer by layer is simulated"),
        (("model=abstract",), "recompute=fitting: what fits follows from a model's bytes"),
    ],
)
def test_it_is_refused_where_nobody_could_do_it(words, said):
    with pytest.raises(ConfigError, match=said):
        load(["schedule=1f1b", "recompute=fitting", *words])


@pytest.mark.parametrize("bits, kept", [(32, [3, 4, 4, 4, 4, 5, 5, 2]), (8, [4, 4, 4, 4, 4, 5, 5, 2])])
def test_one_pipeline_keeps_the_same_layers_on_one_host_and_under_a_mesh(bits, kept, rpbench):
    asked = ("schedule=1f1b", "model=llama31_8b", "cluster=a100_40gb_roce", "cost=analytic", "num_devices=8",
             "num_microbatches=32", "workload.microbatch_sequences=2", "partition=4-4-4-4-4-5-5-2",
             "recompute=fitting", f"++model.optimizer_bits={bits}")  # fmt: skip
    _, (host,), _ = rpbench(*asked, "charge=bytes")
    _, (mesh,), _ = rpbench(*asked, "mesh.pipeline=8", "mesh.data=1", "mesh.shard=none")
    assert host["kept_layers"] == mesh["kept_layers"] == kept
    assert mesh["peak_memory_bytes"] == pytest.approx(host["peak_memory_bytes"], rel=1e-4)
    assert mesh["step_time_s"] == pytest.approx(host["step_time_s"], rel=1e-3)


@pytest.mark.parametrize("mesh", [(), ("mesh.pipeline=4", "mesh.data=2")])
@pytest.mark.parametrize("word", ["none", "fitting"])
@pytest.mark.parametrize(
    ("name", "why"), [("pipemare", "reads other weights than its forward"), ("roundpipe", "come and go")]
)
def test_what_cannot_keep_activations_is_refused_on_one_host_and_under_a_mesh(name, why, word, mesh, rpbench):
    asked = (f"schedule={name}", "model=llama32_3b", "cluster=dgx_h100", "cost=analytic", "num_devices=8",
             "num_microbatches=8", *mesh, f"recompute={word}")  # fmt: skip
    status, _, told = rpbench(*asked)
    assert status == 2
    assert why in told


def test_what_comes_and_goes_keeps_nothing():
    with pytest.raises(ValueError, match=r"recompute=fitting: the stages of roundpipe come and go"):
        assemble(load(["schedule=roundpipe", *RUN[1:], "recompute=fitting"]))


def test_a_search_times_the_layers_that_stay(rpbench):
    """Where all fits, the cut is the one that is found without recomputation."""
    words = ("schedule=combined_1f1b", "model=llama32_1b", "cluster=8x_w7800", "cost=analytic", "num_devices=4")
    more = ("num_microbatches=8", "workload.microbatch_sequences=2", "partition=search")
    found = [rpbench(*words, *more, f"recompute={word}")[1][0] for word in ("fitting", "none")]
    assert found[0]["partition_layers"] == found[1]["partition_layers"]
    assert found[0]["makespan_s"] == found[1]["makespan_s"]
