"""Megatron's layout of a pipeline: its letters by hand, what it cannot hold, and what its order is not."""

import pytest
from torch_cases import schedule_near

from rpbench.ir.partition import Partition, parse
from rpbench.torch_runtime.formats.export import Given, export
from rpbench.torch_runtime.formats.frameworks import megatron_layout, megatron_options, megatron_virtual_stages


def written(name):
    return export(schedule_near(name, 2, 4), "megatron_layout", Given(lambda: None))


@pytest.mark.parametrize(
    "cut, ranks, layout, virtual",
    [
        ("3-5", 2, "Et*3|t*5L", None),
        ("2-1-3-2", 2, "Ett|t|t*3|ttL", None),
        ("0-4-0", 3, "E|t*4|L", None),
        ("2-2-2-2", 2, "Ett|tt|tt|ttL", 2),
    ],
)
def test_megatrons_layout_by_hand(cut, ranks, layout, virtual):
    """Letters and counts as Megatron's documentation has them: E and L once, as many t as layers."""
    options = megatron_options(parse(cut), ranks)
    assert options["pipeline-model-parallel-layout"] == layout == megatron_layout(parse(cut))
    assert options["pipeline-model-parallel-size"] == ranks
    equal = megatron_virtual_stages(parse(cut), ranks)
    assert (equal and equal["num-virtual-stages-per-pipeline-rank"]) == virtual
    assert equal is None or "pipeline-model-parallel-layout" not in equal  # Megatron takes one of the two


def test_megatron_takes_loops_only():
    with pytest.raises(ValueError, match="3 stages on 2 ranks"):
        megatron_options(parse("1-1-1"), 2)
    with pytest.raises(ValueError, match="V and wave placements have no layout"):
        written("zb_v")
    with pytest.raises(ValueError, match="cuts forward and backward apart"):
        megatron_layout(Partition((2, 2), (1, 1, 2)))


@pytest.mark.parametrize(
    ("name", "runs"),
    [("1f1b", True), ("interleaved_1f1b", True), ("combined_1f1b", True), ("zb_h1", False), ("gpipe", False)],
)
def test_megatrons_options_say_if_the_order_is_another(name, runs):
    assert written(name).startswith(f"# Megatron does not run {name}: ") != runs


def test_megatron_reads_its_layout():
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    for cut, ranks in (("3-5", 2), ("2-1-3-2", 2), ("1-2-3-1-1-1", 3)):
        found = layouts.PipelineParallelLayerLayout.from_str(megatron_layout(parse(cut)), ranks)
        counts = [
            sum(part.name == "decoder" for part in found.layout[rank][chunk])
            for chunk in range(len(found.layout[0]))
            for rank in range(ranks)
        ]
        assert counts == list(parse(cut).forward)
        found.validate_layer_layout(num_layers=parse(cut).num_layers, mtp_num_layers=0)
