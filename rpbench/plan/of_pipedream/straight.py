"""PipeDream's partitioner for a straight pipeline of ours: the cut whose longest stage is shortest.

Nothing is replicated and transfers are not counted; a stage takes its forward, recomputation and backward. With
several stages on a device all of them are balanced, not the devices.
"""

from rpbench.cost.layer_graph import Layer, chain
from rpbench.ir.partition import Partition, symmetric
from rpbench.plan.even import num_bound_stages
from rpbench.plan.greedy import head_total, layer_totals
from rpbench.plan.of_pipedream.cuts import cuts_of
from rpbench.plan.of_pipedream.machines import Network, Rules
from rpbench.plan.of_pipedream.pipedream import plan_pipeline
from rpbench.plan.problem import Problem


def plan_straight(problem: Problem) -> Partition:
    """As many stages as `even` makes; the head may be a stage of its own.

    Raises:
        ValueError: if the directions are cut apart, or there are fewer layers than stages.
    """
    if problem.entry.separate_cuts:
        raise ValueError(
            f"partition=pipedream: schedule {problem.entry.name} cuts forward and backward apart, PipeDream cuts both "
            "at once; use partition=greedy or search"
        )
    ms = 1000 / problem.times.units_per_second
    totals = [float(time * ms) for time in (*layer_totals(problem.times), head_total(problem.times))]
    layers = [Layer(f"layer {number}", "", time, 0, 0, 0) for number, time in enumerate(totals)]
    if not totals[-1]:
        layers.pop()  # a head of no time is no layer
    num_stages = num_bound_stages(problem, "pipedream")
    cuts = cuts_of(chain(layers))
    pipeline = plan_pipeline(cuts, Network((num_stages,), (1.0,)), Rules(straight=True))
    assert pipeline is not None  # there are enough layers
    num_layers = problem.num_layers
    return symmetric(tuple(min(stage.last, num_layers) - min(stage.first, num_layers) for stage in pipeline.stages))
