"""Turning: which level of detail turned the ranking of six schedules, over models and machines."""

from dataclasses import replace

from rpbench.cost.machine import machine
from rpbench.mesh.job import Job
from rpbench.mesh.layout import Mesh
from rpbench.mesh.levels import rankings
from rpbench.mesh.software import software
from rpbench.workload.architecture import architecture

# (model, layers, machine, devices, mesh, tokens, microbatches): from little to much to communicate.
PLACES = (
    ("llama3_8b", 32, "dgx_a100", 16, Mesh(2, 8), 4096, 16),
    ("llama3_8b", 32, "a100_800gbps", 16, Mesh(2, 8), 4096, 8),
    ("llama3_70b", 80, "dgx_h100", 64, Mesh(2, 8, 4, sequence_parallel=True), 8192, 32),
    ("llama3_70b", 80, "dgx_h100", 128, Mesh(4, 8, 4, sequence_parallel=True), 8192, 16),
    ("llama31_405b", 126, "gb200_nvl72", 128, Mesh(2, 16, 4, sequence_parallel=True), 8192, 32),
    ("qwen3_30b_a3b", 48, "dgx_h100", 32, Mesh(8, 4, expert=8), 4096, 16),
)


def table() -> list[dict[str, str]]:
    """One row for each place and level: the ranking, and whether it turned."""
    found = []
    for name, layers, cluster, devices, mesh, seq_len, microbatches in PLACES:
        own = replace(architecture(name), num_layers=layers)
        job = Job(
            own,
            machine(cluster).with_devices(devices),
            mesh,
            software("megatron_core"),
            seq_len,
            num_microbatches=microbatches,
        )
        found += [
            {
                "model": name,
                "machine": cluster,
                "devices": str(devices),
                "level": ranked.level,
                "ranking": " > ".join(f"{schedule} {ratio:.3f}" for schedule, ratio in ranked.ranking),
                "turned": str(ranked.turned).lower(),
            }
            for ranked in rankings(job)
        ]
    return found
