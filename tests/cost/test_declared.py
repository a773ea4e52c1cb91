"""Every constant of the analytic costs says where it comes from."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rpbench.cost.hardware.basis import Basis, counted_numbers, make_basis
from rpbench.cost.hardware.declared import Declared, declarations
from rpbench.cost.hardware.machine import NUMBERS, Machine, machine, machine_of

CONF = Path(__file__).parents[2] / "conf"
CLUSTERS = sorted((CONF / "cluster").glob("*.yaml"))
CELL_TABLES = ("throughput", "max_seq_len")


def read(path: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[return-value]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_figure_of_a_cluster_has_an_origin(path):
    found = machine_of(read(path))
    figures = {name for name in NUMBERS if getattr(found, name) is not None} | set(found.measured)
    assert figures <= set(declarations(found.declared))


def test_every_constant_of_the_analytic_costs_has_an_origin():
    numbers, declared = counted_numbers()
    assert set(declarations(declared)) == set(numbers)


def test_fitted_constants_name_cells_of_the_published_tables():
    rows = {**counted_numbers()[1], **machine("8x_rtx4090").declared}
    fitted = {name: each for name, each in declarations(rows).items() if each.origin == "fitted"}
    assert len(fitted) == 26  # as the READMEs count them: 20 of them solved from published layer timings
    for each in fitted.values():
        for cell in each.cells:
            table, _, platform, _ = cell.split("/")
            assert table in (*CELL_TABLES, "layer_timings")
            # Nothing is fitted on a machine whose figures are still to be predicted.
            assert platform in ("8x-rtx4090-24gb", "8x-a800-80gb-sxm")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"origin": "guessed", "source": "nobody"}, "unknown origin 'guessed'"),
        ({"origin": "vendor", "source": ""}, "needs a source"),
        ({"origin": "vendor", "source": "a sheet", "within": -0.1}, "relative deviation"),
        ({"origin": "fitted", "source": "a fit"}, "fitted constants name theirs"),
        ({"origin": "vendor", "source": "a sheet", "cells": ["throughput/a/b/c"]}, "others none"),
        ({"origin": "vendor", "source": "a sheet", "date": "2020"}, "date"),
    ],
)
def test_wrong_declarations_are_refused(row, said):
    with pytest.raises(ValueError, match=said) as error:
        declarations({"rate": row})
    assert str(error.value).startswith("declared.rate")


def test_a_missing_figure_is_an_error_and_no_default():
    basis = make_basis(Machine("mine"), {"a": 1.0}, {"a": vars(Declared("chosen", "ours"))})
    assert basis["a"] == 1.0
    assert basis.read == {"a"}
    with pytest.raises(ValueError, match="cluster=mine has no memory_bytes_per_s"):
        basis["memory_bytes_per_s"]


@pytest.mark.parametrize("value", [-1.0, float("nan"), "fast", True, None])
def test_impossible_constants_are_refused(value):
    with pytest.raises(ValueError, match=r"cost\.constants\.a="):
        make_basis(Machine("mine"), {"a": value}, {})


@pytest.mark.parametrize(
    ("field", "value"), [("matmul_efficiency", 1.2), ("memory_bytes_per_s", "1 TB/s"), ("device_memory_bytes", "24GB")]
)
def test_shares_above_one_and_words_with_units_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"cluster\.{field}="):
        Machine("mine", **{field: value})


def test_what_may_be_off_is_what_was_read_and_declared_with_a_spread():
    declared = {"guessed": Declared("assumed", "a guess", 0.2), "counted": Declared("vendor", "a sheet", 0.0)}
    basis = Basis("mine", {"guessed": 1.0, "counted": 2.0, "plain": 3.0}, declared)
    assert [basis["counted"], basis["plain"], basis.uncertain()] == [2.0, 3.0, []]
    assert [basis["guessed"], basis.uncertain()] == [1.0, ["guessed"]]


@pytest.mark.parametrize("num_devices, domain", [(1, 0), (4, 0), (8, 64), (64, 64)])
def test_one_host_of_a_rack_is_a_domain_of_its_own(num_devices, domain):
    """GB300 NVL72: NVLink joins 64 devices of hosts with 4."""
    found = machine("gb300_nvl72").with_devices(num_devices)
    assert (found.domain, found.domain_devices) == (domain, min(num_devices, domain or 4))
