"""Calls back to back: the bubble between calls 20 and 50 of 60, against an independent simulation's table."""

import csv
from pathlib import Path

import pytest

from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import measure

ROWS = [
    row
    for row in csv.DictReader((Path(__file__).parents[2] / "analysis/published/async_bubble.csv").open())
    if row["num_microbatches_per_call"].isdigit()
]


def test_the_table_has_four_sizes_of_five_models():
    assert len(ROWS) == 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['num_microbatches_per_call']}")
def test_steady_bubble_agrees_to_a_hundredth_of_a_percent(row, published_cell):
    microbatches = int(row["num_microbatches_per_call"])
    schedule, costs = published_cell(
        "roundpipe",
        row["model"],
        num_microbatches=microbatches,
        num_steps=60,
        round_size=microbatches,
        asynchronous=True,
    )
    graph = build_graph(schedule)
    ours = measure(graph, simulate_graph(graph, costs), costs, switch_after_last_forward=True)
    assert 100 * ours["bubble_steady"] == pytest.approx(float(row["bubble_percent"]), abs=0.00501)
