"""PipeDream's partitioner: against every pipeline tried one by one, on graphs worked out by hand, and on VGG-16."""

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layer_graphs import Exhaustive, layer, random_chains, random_graphs

from rpbench.cost.layer_graph import LayerGraph, chain, from_csv
from rpbench.plan.graph_cuts import cuts_of
from rpbench.plan.pipedream import (
    Network,
    Rules,
    all_reduce_s,
    data_parallel_time_s,
    one_machine_time_s,
    plan_pipeline,
    stage_bytes,
    traffic,
    weight_versions,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
PROFILES = "pipedream_profiles"

rules = st.builds(
    Rules,
    count_p2p=st.booleans(),
    straight=st.booleans(),
    use_fewer_machines=st.booleans(),
    memory_bytes=st.one_of(st.none(), st.integers(5, 80).map(lambda size: 1e6 * size)),
)
bandwidth = st.sampled_from((1e8, 1e9, 4e9))


def check_against_all_pipelines(graph, network, rules):
    """The time is that of the best pipeline there is, and the stages are a pipeline that takes it."""
    cuts = cuts_of(graph)
    found, best = plan_pipeline(cuts, network, rules), Exhaustive(graph, network, rules).best()
    if found is None:
        assert best == float("inf")
        return
    assert found.time_s == pytest.approx(best, rel=1e-12)
    ends = [stage.last for stage in found.stages]
    assert [stage.first for stage in found.stages] == [0, *ends[:-1]]
    assert ends[-1] == cuts.last
    assert all(cuts.before[stage.first, stage.last] for stage in found.stages)
    used = sum(stage.replicas for stage in found.stages)
    assert used <= network.num_machines if rules.use_fewer_machines else used == network.num_machines


@settings(max_examples=150, deadline=None)
@given(graph=random_chains(), num=st.integers(1, 5), link=bandwidth, rules=rules)
def test_one_level_of_a_chain_is_as_good_as_every_pipeline_tried(graph, num, link, rules):
    check_against_all_pipelines(graph, Network((num,), (link,)), rules)


@settings(max_examples=120, deadline=None)
@given(graph=random_graphs(5), num=st.integers(1, 4), link=bandwidth, rules=rules)
def test_one_level_of_a_graph_with_branches_is_as_good_as_every_pipeline_tried(graph, num, link, rules):
    check_against_all_pipelines(graph, Network((num,), (link,)), rules)


@settings(max_examples=100, deadline=None)
@given(
    graph=st.one_of(random_chains(5), random_graphs(4)),
    levels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    links=st.tuples(bandwidth, bandwidth),
    rules=rules,
)
@example(chain([layer("n0", 1, 0, 9e6), layer("n1", 1)]), (2, 2), (1e9, 1e8), Rules())  # shares of the lower level
def test_two_levels_are_as_good_as_every_pipeline_tried(graph, levels, links, rules):
    check_against_all_pipelines(graph, Network(levels, links), rules)


@settings(max_examples=25, deadline=None)
@given(
    graph=random_chains(40), num=st.integers(1, 16), link=bandwidth, count_p2p=st.booleans(), seed=st.integers(0, 999)
)
def test_no_random_pipeline_of_many_layers_and_machines_is_faster(graph, num, link, count_p2p, seed):
    network, rules, draw = Network((num,), (link,)), Rules(count_p2p=count_p2p), random.Random(seed)
    cuts = cuts_of(graph)
    found = plan_pipeline(cuts, network, rules)
    times = [time_of(cuts, random_pipeline(cuts.last, num, draw), link, count_p2p) for _ in range(20)]
    ours = [(stage.first, stage.last, stage.replicas) for stage in found.stages]
    assert found.time_s <= min(times) * (1 + 1e-12)
    assert found.time_s == pytest.approx(time_of(cuts, ours, link, count_p2p), rel=1e-12)
    assert found.time_s <= data_parallel_time_s(cuts, network)
    assert found.time_s >= one_machine_time_s(cuts) / num * (1 - 1e-12)


def random_pipeline(last, num_machines, draw):
    num = draw.randint(1, min(last, num_machines))
    ends = [0, *sorted(draw.sample(range(1, last), num - 1)), last]
    machines = [0, *sorted(draw.sample(range(1, num_machines), num - 1)), num_machines]
    own = [after - before for before, after in pairwise(machines)]
    return [(first, end, share) for (first, end), share in zip(pairwise(ends), own, strict=True)]


def time_of(cuts, stages, link, count_p2p):
    """The slowest stage, and with `count_p2p` the slowest transfer, at either end of a boundary."""
    times = []
    for first, last, own in stages:
        times.append(
            (cuts.time_s[first, last] + 4 * (own - 1) * cuts.parameter_bytes[first, last] / (own * link)) / own
        )
        times += [2 * cuts.output_bytes[end] / (link * own) for end in (first, last) if count_p2p]
    return max(times)


# --- by hand ------------------------------------------------------------------------------------------------


def stages_of(graph, network, rules=None):
    cuts = cuts_of(graph)
    found = plan_pipeline(cuts, network, rules)
    return [(cuts.layers_between(stage.first, stage.last), stage.replicas_per_level) for stage in found.stages]


def test_layers_without_parameters_are_replicated_and_the_one_with_many_is_not():
    """Three machines for 6 ms of convolutions and one for 2 ms of a classifier: every stage takes 2 ms."""
    graph = chain([layer("conv1", 3), layer("conv2", 3), layer("classifier", 2, 0, 1e9)])
    cuts, network = cuts_of(graph), Network((4,), (1e9,))
    found = plan_pipeline(cuts, network)
    assert stages_of(graph, network) == [(["conv1", "conv2"], (3,)), (["classifier"], (1,))]
    assert found.time_s == 0.002
    assert data_parallel_time_s(cuts, network) == (0.008 + 4 * 3 * 1e9 / (4 * 1e9)) / 4
    assert weight_versions(found) == [2, 1]
    assert stage_bytes(cuts, found) == [0, 1e9]


BRANCHES = LayerGraph(
    (layer("a", 2, 8e6), layer("b", 3, 1e6), layer("c", 3, 1e6), layer("d", 2)),
    (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")),
)


def test_branches_run_one_after_another_in_a_straight_pipeline():
    """Two machines: a and one branch, the other branch and d; an order of layers in a row has that cut as well."""
    network = Network((2,), (1e9,))
    assert stages_of(BRANCHES, network, Rules(straight=True)) == [(["a", "c"], (1,)), (["b", "d"], (1,))]


def test_a_cut_between_branches_pays_for_the_output_that_the_other_branch_still_needs():
    """With transfers counted, behind a and b cross 9 MB (18 ms), behind both branches 2 MB (4 ms)."""
    network, rules = Network((2,), (1e9,)), Rules(straight=True, count_p2p=True)
    assert stages_of(BRANCHES, network, rules) == [(["a", "b", "c"], (1,)), (["d"], (1,))]
    assert plan_pipeline(cuts_of(BRANCHES), network, rules).time_s == 0.008


def test_a_machine_stays_idle_where_that_is_faster_and_allowed():
    graph = chain([layer("n0", 1, 0, 1e9)])
    network = Network((2,), (1e9,))
    assert stages_of(graph, network) == [(["n0"], (2,))]
    assert stages_of(graph, network, Rules(use_fewer_machines=True)) == [(["n0"], (1,))]


def test_memory_moves_a_cut():
    """4 bytes in the first of two stages count twice, as two minibatches are under way in it."""
    graph = chain([layer("n0", 1, 1, 3), layer("n1", 1, 1, 3), layer("n2", 2, 1, 3)])
    network = Network((2,), (1e9,))
    straight = Rules(straight=True)
    assert stages_of(graph, network, straight) == [(["n0", "n1"], (1,)), (["n2"], (1,))]
    tight = Rules(straight=True, memory_bytes=8)
    assert stages_of(graph, network, tight) == [(["n0"], (1,)), (["n1", "n2"], (1,))]
    assert plan_pipeline(cuts_of(graph), network, Rules(straight=True, memory_bytes=7)) is None


def test_ties_go_to_the_latest_split_and_no_split_wins_over_any():
    even = chain([layer(f"n{index}", 1) for index in range(4)])
    assert [len(names) for names, _ in stages_of(even, Network((3,), (1e9,)), Rules(straight=True))] == [2, 1, 1]
    assert [machines for _, machines in stages_of(even, Network((4,), (1e9,)))] == [(4,)]


def test_what_a_pipeline_sends_beside_data_parallelism():
    """A boundary of 1 MB there and back; 3 of 4 machines add up 6 MB: 2 * 2/3 * 6; all add up 96: 2 * 3/4 * 96."""
    graph = chain([layer("conv", 6, 1e6, 6e6), layer("classifier", 2, 0, 90e6)])
    cuts, network = cuts_of(graph), Network((4,), (1e10,))
    found = plan_pipeline(cuts, network)
    sent = traffic(cuts, network, found)
    assert [stage.replicas for stage in found.stages] == [3, 1]
    assert (sent.boundary, sent.all_reduce, sent.data_parallel) == (2e6, 8e6, 144e6)
    assert sent.saved == 1 - 10 / 144
    assert sent.saved_at_boundaries == sent.saved_at_most == 1 - 2 / 144


@pytest.mark.parametrize(
    "machines, links, message",
    [
        ((), (), "every level has at least 1 machine"),
        ((4, 0), (1.0, 1.0), "every level has at least 1 machine"),
        ((4, 100_000), (1.0, 1.0), "100000 machines in one level"),
        ((4, 4), (1.0,), "machines_per_level has 2 levels, bandwidth_bytes_per_s has 1"),
        ((4,), (0.0,), "every bandwidth is finite and above 0"),
        ((4,), (float("nan"),), "every bandwidth is finite and above 0"),
    ],
)
def test_machines_that_cannot_be_are_refused(machines, links, message):
    with pytest.raises(ValueError, match=message):
        Network(machines, links)
    with pytest.raises(ValueError, match="memory_bytes=-1"):
        Rules(memory_bytes=-1)


def test_tables_that_would_not_fit_are_refused():
    cuts = cuts_of(chain([layer(f"n{index}") for index in range(400)]))
    with pytest.raises(ValueError, match="401 places to cut and 256 machines in one level make tables"):
        plan_pipeline(cuts, Network((256,), (1e9,)))


# --- a profile that our own profiler made: `profile model=fat_head_gpt`, medians of 10 runs on one core ------------

FAT_HEAD = [  # levels, bandwidths, rules -> (first, last, replicas)
    ((4,), (1e9,), Rules(), [(0, 4, 1), (4, 6, 3)]),
    ((4,), (1.25e8,), Rules(), [(0, 5, 1), (5, 6, 3)]),  # a slower link: adding up no more than the head's gradients
    ((2, 2), (1e9, 1.25e8), Rules(), [(0, 3, 1), (3, 5, 1), (5, 6, 2)]),
    ((3,), (1e9,), Rules(straight=True), [(0, 3, 1), (3, 5, 1), (5, 6, 1)]),
]


@pytest.mark.parametrize("levels, links, rules, stages", FAT_HEAD)
def test_the_head_that_no_cut_can_balance_gets_the_machines(levels, links, rules, stages):
    nodes, edges = (GOLDEN.joinpath(f"fat_head_gpt_{table}.csv").read_text() for table in ("nodes", "edges"))
    graph, network = from_csv(nodes, edges), Network(levels, links)
    found = plan_pipeline(cuts_of(graph), network, rules)
    assert [(stage.first, stage.last, stage.replicas) for stage in found.stages] == stages
    assert found.time_s == pytest.approx(Exhaustive(graph, network, rules).best(), rel=1e-9)


# --- VGG-16, from the profile that PipeDream was released with --------------------------------------------------

VGG16 = [  # levels, bandwidths, transfers counted -> (first, last, replicas), over one machine, over data parallel
    ((4,), (1e10,), False, [(0, 15, 3), (15, 40, 1)], 3.952, 1.232),
    ((4, 4), (1e10, 1.25e9), False, [(0, 16, 12), (16, 25, 3), (25, 40, 1)], 15.243, 3.069),
    ((16,), (1.25e9,), False, [9, 1, 2, 1, 1, 1, 1], 14.436, 3.130),
    ((16,), (1.25e9,), True, [(0, 24, 13), (24, 33, 2), (33, 40, 1)], 12.274, 2.661),
    ((4,), (1e10,), True, [(0, 15, 3), (15, 40, 1)], 3.952, 1.232),
]


@pytest.fixture(scope="module")
def vgg16():
    places = [ROOT.parent / "shared" / "reference" / PROFILES]
    if given_place := os.environ.get("RPBENCH_PIPEDREAM_PROFILES"):
        places.insert(0, Path(given_place))
    for folder in places:
        if (folder / "vgg16_nodes.csv").exists():
            nodes, edges = ((folder / f"vgg16_{table}.csv").read_text() for table in ("nodes", "edges"))
            return cuts_of(from_csv(nodes, edges).without_inputs())
    pytest.skip(
        "the released VGG-16 profile is not part of this project: put vgg16_nodes.csv and vgg16_edges.csv into a "
        "folder and name it by RPBENCH_PIPEDREAM_PROFILES"
    )


@pytest.mark.parametrize("levels, links, count_p2p, stages, over_one, over_all", VGG16)
def test_vgg16_comes_out_as_from_the_released_optimizer(vgg16, levels, links, count_p2p, stages, over_one, over_all):
    network = Network(levels, links)
    found = plan_pipeline(vgg16, network, Rules(count_p2p=count_p2p))
    if isinstance(stages[0], int):
        assert [stage.replicas for stage in found.stages] == stages
    else:
        assert [(stage.first, stage.last, stage.replicas) for stage in found.stages] == stages
    assert round(one_machine_time_s(vgg16) / found.time_s, 3) == over_one
    assert round(data_parallel_time_s(vgg16, network) / found.time_s, 3) == over_all


def test_vgg16_on_the_papers_15_and_1_machines_is_two_percent_slower(vgg16):
    """Convolutions on 15 machines, the classifier on one (SOSP'19, table 1); transfers are shorter than either."""
    parameters = float(vgg16.parameter_bytes[0, CLASSIFIER])
    time_s = (vgg16.time_s[0, CLASSIFIER] + all_reduce_s(parameters, 15, 1.25e9)) / 15
    assert vgg16.layers_between(CLASSIFIER, vgg16.last)[0] == "node35"
    assert 2 * vgg16.output_bytes[CLASSIFIER] / 1.25e9 < time_s
    assert round(one_machine_time_s(vgg16) / time_s, 2) == 12.04


CLASSIFIER = 33  # the cut in front of the first linear layer
