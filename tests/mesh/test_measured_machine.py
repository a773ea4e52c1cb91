"""Measured machine: meshes on a calibrated cluster take the collectives that were measured on it."""

from dataclasses import replace

import pytest
from jobs import BARE

from rpbench.cost.hardware.collective_rates import COLLECTIVES
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.data_parallel import reduced
from rpbench.mesh.job import Job
from rpbench.mesh.layers.collectives import exchange_s, gather_s, reduce_s, scatter_s
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.parameters import held
from rpbench.mesh.placement import reached
from rpbench.mesh.software import declared_software
from rpbench.workload.architecture import architecture

RATE = {"all_reduce": 1e9, "all_gather": 2e9, "reduce_scatter": 4e9, "all_to_all": 8e9}  # bytes a second


def row(pace, latency=0.0):
    ends = {"bytes_per_s_low": pace, "bytes_per_s_high": pace, "latency_s_low": latency, "latency_s_high": latency}
    return {"num_ranks": 2, "bytes_per_s": pace, "latency_s": latency, **ends}


MINE = Machine(
    "mine",
    num_devices=4,
    host_memory_bytes=64_000_000_000,
    matmul_flops_per_s=1e11,
    wide_matmul_flops_per_s=9e10,
    matmul_efficiency=1.0,
    attention_efficiency=0.5,
    memory_bytes_per_s=2e10,
    memory_efficiency=1.0,
    copy_bytes_per_s=7e9,
    collectives={name: row(pace) for name, pace in RATE.items()},
)


def job(**mesh):
    own = replace(architecture("llama3_8b"), num_layers=2)
    shape = Mesh(**mesh)
    return Job(own, MINE.with_devices(shape.num_devices), shape, BARE, 256)


def test_every_collective_takes_what_was_measured_of_it():
    """4 devices, 8 GB: 3/4 of them at the collective's own pace, twice that for an all-reduce; by hand."""
    found = job(data=4)
    group = found.replica_group()
    assert gather_s(8e9, group) == pytest.approx(3.0)
    assert scatter_s(8e9, group) == pytest.approx(1.5)
    assert reduce_s(8e9, group) == pytest.approx(12.0)
    assert exchange_s(8e9, group) == pytest.approx(0.75)


def test_data_parallelism_of_a_mesh_takes_them():
    """ZeRO-1: gradients of 4 bytes scattered at 4 GB/s, weights of 2 bytes gathered at 2 GB/s: 3/4 of a second a G."""
    found = job(data=4, sharing=Sharing("optimizer"))
    own = held(found, 0)
    seconds = reduced(found, own)
    assert seconds.gradients == pytest.approx(0.75 * 4 * own.dense / 4e9)
    assert seconds.parameters == pytest.approx(0.75 * 2 * own.dense / 2e9)


def test_tensor_parallelism_takes_them():
    plain, cut = (job(tensor=2, sequence_parallel=each) for each in (False, True))
    size = 2.0 * 256 * plain.architecture.hidden / 2  # of bytes, one half of them sent
    kinds = [next(iter(each.kinds.values())) for each in (plain, cut)]
    shown = 2 * (1 - BARE.hidden_tensor)
    assert kinds[0].forward_exposed == pytest.approx(shown * 2 * size / 1e9)
    assert kinds[1].forward_exposed == pytest.approx(shown * (size / 2e9 + size / 4e9))


def test_what_was_measured_is_all_reached():
    machine = MINE
    assert reached(machine, declared_software("megatron_core")).intra_bytes_per_s == RATE["all_gather"]
    assert set(machine.collectives) == set(COLLECTIVES)
    assert machine.device.memory_bytes == 16_000_000_000


def test_a_cluster_without_a_rate_says_which():
    with pytest.raises(ValueError, match="has no matmul_flops_per_s"):
        assert replace(MINE, matmul_flops_per_s=None).device
