"""Jobs that tests share: small models on known machines."""

from dataclasses import replace

from rpbench.cost.hardware.machine import machine
from rpbench.ir.partition import symmetric
from rpbench.mesh.exact import problem_of
from rpbench.mesh.job import Job
from rpbench.mesh.layout import Mesh
from rpbench.mesh.software import declared_software
from rpbench.sim.longest_path import simulate
from rpbench.workload.architecture import Architecture, architecture

# A framework none of whose constants was fitted, without what a step costs beside its computation.
BARE = declared_software("megatron_core").with_constants(
    {"microbatch_s": 1e-12, "step_s": 1e-12, "jitter": 1e-12, "broadcast_s": 1e-12, "layer_s": 1e-12}
)


def job(mesh: Mesh, *, own: Architecture | None = None, on: str = "dgx_h100", software=BARE, **options) -> Job:
    """A job of an eight-layer model, or of another."""
    own = own or replace(architecture("llama3_8b"), num_layers=8)
    options = {"seq_len": 4096, "num_microbatches": 8, **options}
    return Job(own, machine(on).with_devices(mesh.num_devices), mesh, software, **options)


def makespan_s(found: Job) -> float:
    """Seconds from the first forward to the last backward of a job's pipeline, simulated alone."""
    problem, cut = problem_of(found), symmetric(found.cut)
    return float(max(simulate(problem.order(cut), problem.costs(cut)).end))
