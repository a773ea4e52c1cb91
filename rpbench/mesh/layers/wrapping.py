"""Wrapping: today's times of layers, made for one device, under a mesh.

A mesh changes the times of any source (published, profiled, analytic) by a ratio of this package's seconds: those of a
device of the mesh over those of one device alone. A mesh of ones changes nothing, to the last bit.
"""

from collections.abc import Sequence
from dataclasses import replace

from rpbench.cost.table import LayerTimes, Number
from rpbench.mesh.job import Job
from rpbench.mesh.layers.layer_seconds import Seconds
from rpbench.mesh.layout import Mesh, Sharing


def under_mesh(times: LayerTimes, job: Job) -> LayerTimes:
    """The times of a job's layers on a device of its mesh, from those on one device.

    Args:
        times: of one microbatch through each layer on one device.

    Raises:
        ValueError: if the layers are not those of the job.
    """
    if times.num_layers != len(job.architecture.layers):
        raise ValueError(f"times of {times.num_layers} layers for a model of {len(job.architecture.layers)}")
    if all(getattr(job.mesh, axis) == 1 for axis in ("tensor", "context", "expert")):
        return times
    alone = _alone(job)
    pairs = [(job.kinds[kind], alone.kinds[kind]) for kind in job.architecture.layers]

    def scaled(values: Sequence[Number], of: str) -> list[Number]:
        return [value * _ratio(new, old, of) for value, (new, old) in zip(values, pairs, strict=True)]

    return replace(
        times,
        forward=scaled(times.forward, "forward_all"),
        recompute=scaled(times.recompute, "forward_all"),
        backward=scaled(times.backward, "backward_all"),
        input_grad=scaled(times.input_grad, "input_grad") if times.input_grad else (),
        weight_grad=scaled(times.weight_grad, "weight_grad") if times.weight_grad else (),
        head_forward=times.head_forward * _ratio(job.head, alone.head, "forward_all"),
        head_backward=times.head_backward * _ratio(job.head, alone.head, "backward_all"),
        head_input_grad=times.head_input_grad * _ratio(job.head, alone.head, "input_grad"),
        head_weight_grad=times.head_weight_grad * _ratio(job.head, alone.head, "weight_grad"),
        step=[value / job.mesh.tensor for value in times.step],
        head_step=times.head_step / job.mesh.tensor,
    )


def _alone(job: Job) -> Job:
    """The same layers on one device, one microbatch, without replicas."""
    return replace(
        job,
        mesh=Mesh(sharing=Sharing("none")),
        machine=job.machine.with_devices(1),
        num_microbatches=1,
        chunks=1,
        cut=(),
        schedule="1f1b",
    )


def _ratio(new: Seconds, old: Seconds, of: str) -> float:
    before: float = getattr(old, of)
    after: float = getattr(new, of)
    return after / before if before else 1.0
