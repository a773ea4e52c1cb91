"""Clusters: the configs against the published machine table, and refused values."""

import csv
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rpbench.cost.hardware.machine import Machine, devices_named, machine, machine_of

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "conf" / "cluster").glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    return dict(OmegaConf.load(ROOT / "conf" / "cluster" / f"{name}.yaml"))  # type: ignore[call-overload]


def published(item: str, machine: str) -> float:
    with open(ROOT / "analysis" / "published" / "hardware.csv", newline="") as lines:
        found = [r["value"] for r in csv.DictReader(lines) if r["item"] == item and machine in r["applies_to"]]
    assert len(found) == 1
    return float(found[0])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_set_every_field(path: Path) -> None:
    config = read(path.stem)
    assert set(config) == {field.name for field in fields(Machine)} - {"collectives"}  # which calibrate alone writes
    assert machine(path.stem).name == path.stem


@pytest.mark.parametrize(("name", "gpu"), [("8x_rtx4090", "rtx4090"), ("8x_a800", "a800")])
def test_configs_agree_with_the_published_machines(name: str, gpu: str) -> None:
    cluster = machine(name)
    assert cluster.matmul_flops_per_s == published("fp16_peak", gpu) * 1e12
    assert cluster.price_usd_per_hour == published("server_price", gpu)
    assert cluster.num_devices == published("gpu_count", gpu)
    assert cluster.host_to_device_bytes_per_s == published("interconnect_one_way", "rtx4090") * 1e9
    assert cluster.device_memory_bytes is not None
    gib = cluster.device_memory_bytes / 2**30
    assert gib == (24 if gpu == "rtx4090" else published("gpu_memory", gpu))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_devices", 0),
        ("num_devices", 2.5),
        ("device_memory_bytes", -1),
        ("matmul_flops_per_s", 0.0),
        ("matmul_flops_per_s", float("inf")),
        ("host_to_device_bytes_per_s", float("nan")),
        ("price_usd_per_hour", "cheap"),
        ("price_usd_per_hour", True),
    ],
)
def test_impossible_values_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"cluster\.{field}=.*null"):
        Machine("mine", **{field: value})


def test_so_many_devices_are_named_by_a_count_and_a_kind():
    """`4x_l40s` is no file: its keys are those of a node's machine; a name without a count is another form."""
    found = devices_named("4x_l40s")
    assert found is not None
    assert (found["gpu"], found["num_devices"], found["name"]) == ("l40s", 4, "4x_l40s")
    assert [devices_named(text) for text in ("dgx_h100", "x_l40s", "04x_l40s", "4y_l40s")] == [None] * 4


def test_a_memory_in_other_units_than_bytes_is_refused_with_what_processes_reserve() -> None:
    with pytest.raises(ValueError, match="device_memory_bytes=24: bytes, such as 24e9; processes reserve 1,000"):
        machine_of({"name": "small", "gpu": "t4", "device_memory_bytes": 24})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("measured", 0.5),
        ("declared", [1]),
        ("declared", "ab"),
        ("published_name", float("inf")),
        ("host_to_device_bytes_per_s", "fast"),
        ("host_to_device_bytes_per_s", 10**400),
    ],
)
def test_a_value_that_others_follow_from_is_refused_by_its_own_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^cluster\.{key}="):
        machine_of({"name": "mine", "gpu": "rtx4090", key: value})
