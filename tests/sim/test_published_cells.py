"""The 25 published cells of figure 17, every printed field to the last of its four decimals."""

import csv
from pathlib import Path

import pytest

from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import measure

CELLS = list(csv.DictReader((Path(__file__).parents[2] / "analysis/published/bubble.csv").open()))


def test_there_are_25_cells():
    assert len({(cell["scheduler"], cell["model"]) for cell in CELLS}) == 25


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell['scheduler']}-{cell['model']}")
def test_cell_is_reproduced_to_four_decimals(cell, published_cell):
    name = cell["scheduler"].replace("-", "_")
    schedule, costs = published_cell(name, cell["model"])
    graph = build_graph(schedule)
    ours = measure(
        graph,
        simulate_graph(graph, costs),
        costs,
        switch_after_last_forward=entry(name).switch_after_last_forward,
    )
    capacity_s = 8 * ours["makespan_s"]
    printed = {
        "layer_events": str(ours["num_layer_events"]),
        "makespan_ms": f"{1000 * ours['makespan_s']:.4f}",
        "bubble_time_gpu_ms": f"{1000 * ours['idle_s']:.4f}",
        "bubble_ratio_percent": f"{100 * ours['bubble_makespan']:.4f}",
        "comm_total_ms": f"{1000 * ours['comm_total_s']:.4f}",
        "comm_exposed_ms": f"{1000 * ours['comm_exposed_s']:.4f}",
        "comm_exposed_ratio_percent": f"{100 * ours['comm_exposed_s'] / capacity_s:.4f}",
    }
    for part in ("fill", "switch", "drain", "intra"):
        printed[f"{part}_time_gpu_ms"] = f"{1000 * ours[f'{part}_s']:.4f}"
        printed[f"{part}_ratio_percent"] = f"{100 * ours[f'{part}_s'] / capacity_s:.4f}"
    assert printed == {field: cell[field] for field in printed}
