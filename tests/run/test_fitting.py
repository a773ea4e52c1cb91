"""recompute=fitting: as many stages keep their activations as the memory takes, and it says which."""

import numpy as np
import pytest

from rpbench.config.choices import ConfigError
from rpbench.config.request import load
from rpbench.cost.footprint.fitting import fitting_stages
from rpbench.run.assemble import assemble

RUN = ("schedule=1f1b", "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=published", "charge=bytes",
       "num_microbatches=16")  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, (0, 1, 2)), (99, (0, 1, 2)), (65, (1, 2)), (55, (0, 2)), (40, (2,)), (20, ()), (5, ())]
)
def test_stages_keep_from_the_last_one_up(limit, kept):
    """By hand: stages of 20, 30 and 25 bytes beside 10; where the middle one has no room, the first may have it."""
    found = fitting_stages(lambda keeps: 10 + keeps @ np.array([[20], [30], [25]]), 1, np.ones((3, 1), int), limit)
    assert tuple(np.flatnonzero(found[0])) == kept


def made(*more):
    return assemble(load([*RUN, *more]))


def times_of(assembled):
    return {kind: [(work.pre, work.main) for work in each] for kind, each in assembled.costs.work.items()}


def test_with_room_nothing_is_recomputed_and_without_everything():
    roomy, none = made("recompute=fitting"), made("recompute=none")
    assert roomy.keeps == tuple(range(8))
    assert times_of(roomy) == times_of(none)
    tight = made("recompute=fitting", "++cluster.device_memory_bytes=10000000000")
    assert tight.keeps == ()
    assert times_of(tight) == times_of(made())


def test_in_between_some_stages_keep_and_all_fit():
    limit = 17_500_000_000
    found = made("recompute=fitting", f"++cluster.device_memory_bytes={limit}")
    assert found.keeps
    assert len(found.keeps) < 8
    kept = [found.costs.of(kind, stage).pre for kind in found.costs.work if kind.name == "B" for stage in found.keeps]
    assert kept == [0] * len(found.keeps)


def test_the_record_says_which_stages(rpbench):
    limit = 17_500_000_000
    status, (record,), _ = rpbench(*RUN, "recompute=fitting", f"++cluster.device_memory_bytes={limit}")
    assert (status, record["status"]) == (0, "ok")
    assert 0 < len(record["keeping_stages"]) < 8
    assert max(record["peak_memory_bytes"]) <= limit


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=tiny_gpt", "backend=cpu"), "recompute=fitting with mode=train: stage by stage is simulated"),
        (("model=abstract",), "recompute=fitting: what fits follows from a model's bytes"),
        (("model=llama3_8b", "cluster=dgx_h100", "mesh.tensor=2", "num_devices=8"), "recompute=fitting under a mesh"),
    ],
)
def test_it_is_refused_where_nobody_could_do_it(words, said):
    with pytest.raises(ConfigError, match=said):
        load(["schedule=1f1b", "recompute=fitting", *words])


def test_what_comes_and_goes_keeps_nothing():
    with pytest.raises(ValueError, match=r"recompute=fitting: the stages of roundpipe come and go"):
        assemble(load(["schedule=roundpipe", *RUN[1:], "recompute=fitting"]))
