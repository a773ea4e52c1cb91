"""Mobius: more stages than devices, bound to them in turns, every stage run for all microbatches at a time.

Neither its source nor its settings are public. What is timed here is the order of a looped breadth-first pipeline
with the cut that the artifact of RoundPipe gives its simulator for that order, weights streamed and activations
crossing the host as for RoundPipe (`rpbench.predict.streaming`), and an optimizer on the host behind it. A
process a device, so that loops over experts run side by side. A stand-in, to be read as such.

Source: Feng et al., "Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", ASPLOS'23; settings assumed.
"""

from rpbench.cost.hardware.basis import Basis
from rpbench.cost.published import published_partition
from rpbench.ir.partition import Partition, symmetric
from rpbench.predict.case import Case, Terms, waiting_s
from rpbench.predict.streaming import Jobs
from rpbench.predict.traffic import devices_per_complex, timed


def step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step."""
    run = timed(jobs_of(case), case, basis)
    computed, (computing, _) = run.computed_s(0), run.busy_s(range(1))
    waiting = case.settings.chunks.num * waiting_s(case.model, basis) / case.num_devices
    return {
        "computation": computing,
        "expert loop": waiting,
        "idle": computed - computing,
        "optimizer": run.finished_s(0) - computed,
    }


def jobs_of(case: Case) -> Jobs:
    """The jobs of a step."""
    num, complexes = case.settings.chunks.num, devices_per_complex(case.basis)
    return Jobs(planned(case), case.num_devices, num, 1, 1, False, bound=True, devices_per_complex=complexes)


def planned(case: Case) -> Partition:
    """The artifact's cut for eight devices; elsewhere stages of equal numbers of layers, about one each."""
    devices, layers = case.num_devices, case.model.num_layers
    if devices == 8 and case.model.published_name:
        return published_partition("looped_bfs", case.model.published_name)
    chunks = -(-layers // devices)
    stages = chunks * devices
    return symmetric(tuple(int(stage < layers) for stage in range(stages)))
