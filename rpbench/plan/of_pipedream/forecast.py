"""Forecast: what PipeDream's cost model says of a pipeline, beside one machine and beside data parallelism."""

from dataclasses import dataclass
from math import ceil

from rpbench.plan.of_pipedream.cuts import Cuts
from rpbench.plan.of_pipedream.machines import Network, all_reduce_s
from rpbench.plan.of_pipedream.pipedream import Pipeline


@dataclass(frozen=True)
class Traffic:
    """Bytes that all machines together send for one minibatch.

    Args:
        boundary: outputs of stages forward, and their gradients back.
        all_reduce: gradients of replicated stages: 2 (k-1)/k of the parameters, k being the replicas.
        data_parallel: the same, with the whole model on every machine of the network.
        narrowest: one boundary at the cut of the smallest output, with nothing replicated: no two stages send less.
    """

    boundary: float
    all_reduce: float
    data_parallel: float
    narrowest: float

    @property
    def saved(self) -> float | None:
        """Share of the bytes of data parallelism that the pipeline does not send; None if that sends nothing."""
        return 1 - (self.boundary + self.all_reduce) / self.data_parallel if self.data_parallel else None

    @property
    def saved_at_boundaries(self) -> float | None:
        """`saved` with the stages' outputs alone, as for a pipeline that is not replicated."""
        return 1 - self.boundary / self.data_parallel if self.data_parallel else None

    @property
    def saved_at_most(self) -> float | None:
        """`saved` by the pipeline that sends least of all, however slow: what "up to" can mean for this model."""
        return 1 - self.narrowest / self.data_parallel if self.data_parallel else None


def data_parallel_time_s(cuts: Cuts, network: Network) -> float:
    """Seconds a minibatch takes with all layers on all machines, gradients added up level by level."""
    time_s, below = one_machine_time_s(cuts), 1
    parameters = float(cuts.parameter_bytes[0, cuts.last])
    for num, bandwidth in zip(network.machines_per_level, network.bandwidth_bytes_per_s, strict=True):
        time_s = (time_s + all_reduce_s(parameters, num, bandwidth) / below) / num
        below *= num
    return time_s


def one_machine_time_s(cuts: Cuts) -> float:
    """Seconds of all layers."""
    return float(cuts.time_s[0, cuts.last])


def traffic(cuts: Cuts, network: Network, pipeline: Pipeline) -> Traffic:
    """What a pipeline sends, and what data parallelism would."""
    shares = [
        (stage.replicas - 1) / stage.replicas * float(cuts.parameter_bytes[stage.first, stage.last])
        for stage in pipeline.stages
    ]
    everywhere = 2 * (network.num_machines - 1) / network.num_machines * float(cuts.parameter_bytes[0, cuts.last])
    return Traffic(
        2 * sum(float(cuts.output_bytes[stage.last]) for stage in pipeline.stages[:-1]),
        2 * sum(shares),
        everywhere,
        min(everywhere, 2 * float(cuts.output_bytes[1 : cuts.last].min(initial=everywhere))),
    )


def weight_versions(pipeline: Pipeline) -> list[int]:
    """Minibatches that are under way in each stage, and so the versions of its weights that are kept.

    Machines from the stage on over its own, rounded up; for the first stage the paper's NOAM (section 3.2).
    """
    replicas = [stage.replicas for stage in pipeline.stages]
    return [ceil(sum(replicas[stage:]) / replicas[stage]) for stage in range(len(replicas))]


def stage_bytes(cuts: Cuts, pipeline: Pipeline) -> list[float]:
    """Bytes on a machine of each stage: activations and parameters, once for every minibatch under way."""
    return [
        versions * float((cuts.activation_bytes + cuts.parameter_bytes)[stage.first, stage.last])
        for versions, stage in zip(weight_versions(pipeline), pipeline.stages, strict=True)
    ]
