"""Mobius: more stages than devices, bound to them in turns, every stage run for all microbatches at a time.

Neither its source nor its settings are public. What is timed here is the order of a looped breadth-first pipeline
with the cut that the artifact of RoundPipe gives its simulator for that order, and an optimizer on the host behind
it; a process a device, so that loops over experts run side by side. A stand-in, to be read as such.

Source: Feng et al., "Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", ASPLOS'23; settings assumed.
"""

from functools import lru_cache

from rpbench import registry
from rpbench.cost.analytic import analytic_times
from rpbench.cost.basis import Basis
from rpbench.cost.published import published_partition
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Shape
from rpbench.predict.case import Case, Terms
from rpbench.predict.roundpipe import expert_loop_s, optimizer_s, paced
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import simulate_graph


def step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step."""
    cut = planned(case)
    times = analytic_times(case.model, case.microbatch_tokens, basis)
    graph = _graph(case.num_devices, len(cut.forward), case.settings.chunks.num)
    return {
        "pipeline": float(max(simulate_graph(graph, paced(times, cut, case, basis)).end)),
        "expert loop": expert_loop_s(case, basis) / case.num_devices,
        "optimizer": optimizer_s(case, basis),
    }


def planned(case: Case) -> Partition:
    """The artifact's cut for eight devices; elsewhere stages of equal numbers of layers, about one each."""
    devices, layers = case.num_devices, case.model.num_layers
    if devices == 8 and case.model.published_name:
        return published_partition("looped_bfs", case.model.published_name)
    chunks = -(-layers // devices)
    stages = chunks * devices
    return symmetric(tuple(int(stage < layers) for stage in range(stages)))


@lru_cache(maxsize=16)
def _graph(num_devices: int, num_stages: int, num_microbatches: int) -> Graph:
    return build_graph(registry.entry("looped_bfs").build(Shape(num_devices, num_stages, num_microbatches)))
