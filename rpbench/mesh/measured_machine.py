"""Measured machine: a calibrated cluster as the machine of one node that meshes are placed on."""

from dataclasses import replace

from rpbench.cost.collective_rates import collective_rates, ring_hops
from rpbench.cost.hardware import Cluster
from rpbench.mesh.gpu import Gpu
from rpbench.mesh.machine import Machine

WAY_OUT = "run python -m rpbench calibrate ranks=2 on it"


def measured_machine(cluster: Cluster) -> Machine:
    """The machine that a calibration with several ranks has found.

    Rates are as achieved, so all shares of peaks are 1. Devices that share their host's memory have equal parts of it.

    Raises:
        ValueError: if the cluster was not calibrated, or without ranks; then with the way out.
    """
    rates = collective_rates(cluster.collectives)
    if not rates:
        raise ValueError(
            f"cluster={cluster.name} has no measured collectives, and a mesh is made of them: {WAY_OUT}, or take a "
            "machine of conf/machine/, such as cluster=dgx_h100"
        )
    gather = rates["all_gather"]
    return Machine(
        name=cluster.name,
        gpu=_gpu(cluster),
        devices_per_node=cluster.num_devices or gather.num_ranks,
        nodes=1,
        intra_bytes_per_s=gather.bytes_per_s,
        inter_bytes_per_s=gather.bytes_per_s,
        intra_latency_s=gather.latency_s / ring_hops(gather.num_ranks),
        host_bytes_per_s=_known(cluster, "copy_bytes_per_s"),
        reserved_memory_bytes=cluster.reserved_memory_bytes or 0,
        collectives=rates,
        declared={name: row for name, row in cluster.declared.items() if name in rates},
    )


def _gpu(cluster: Cluster) -> Gpu:
    """A device of the cluster; of one whose memory is the host's, the part that it has of it."""
    shared = (cluster.host_memory_bytes or 0) // (cluster.num_devices or 1)
    products = _known(cluster, "matmul_flops_per_s")
    attention = _known(cluster, "wide_matmul_flops_per_s") * _known(cluster, "attention_efficiency")
    source = {"origin": "measured", "within": 0.05, "source": f"cluster={cluster.name}"}
    own = Gpu(
        name=f"device of {cluster.name}",
        flops_16=products,
        memory_bytes=cluster.device_memory_bytes or shared or 1,
        memory_bytes_per_s=_known(cluster, "memory_bytes_per_s"),
        link_bytes_per_s=_known(cluster, "copy_bytes_per_s"),
        multiprocessors=1,
        sustained_16=_known(cluster, "matmul_efficiency"),
        attention_flops_per_s={"flash2": attention},
        sustained_memory=_known(cluster, "memory_efficiency"),
    )
    return replace(own, declared=dict.fromkeys(("flops_16", "memory_bytes_per_s", "link_bytes_per_s"), source))


def _known(cluster: Cluster, name: str) -> float:
    found: float | None = getattr(cluster, name)
    if found is None:
        raise ValueError(f"cluster={cluster.name} has no {name}, which a calibration measures: {WAY_OUT}")
    return found
