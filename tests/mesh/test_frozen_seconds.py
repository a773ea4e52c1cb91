"""Seconds of layers of counted kernels as they stood before all software had one function (at 256a044)."""

import csv
from pathlib import Path

import pytest

from analysis.predictions.compare import declared_basis
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.workload.architecture import architecture

with (Path(__file__).parent / "frozen_seconds.csv").open(newline="") as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("framework", ["roundpipe", "megatron_counted"])
def test_seconds_of_layers_have_not_moved(framework):
    rows = [row for row in ROWS if row["software"] == framework]
    assert len(rows) == 24
    for row in rows:
        numbers = declared_basis(row["machine"])
        times = times_of(setting_of(architecture(row["model"]), float(row["tokens"]), numbers, framework))
        found = {
            "forward_s": times.forward[0],
            "input_grad_s": times.input_grad[0],
            "weight_grad_s": times.weight_grad[0],
            "head_forward_s": times.head_forward,
            "head_backward_s": times.head_backward,
        }
        assert found == pytest.approx({name: float(row[name]) for name in found}, rel=1e-9), row
