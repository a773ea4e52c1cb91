"""The interpreter's loop over experts where a process runs it for one device alone.

RoundPipe's models ask the device once a layer for the tokens of all experts; its kernels then run as the loop launches
them, and one interpreter loops for all devices: that is simulated (`rpbench.predict.streamed.streaming`).
"""

from rpbench.cost.hardware.basis import Basis
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layers.layer_times import setting_of
from rpbench.workload.architecture import Architecture


def expert_s(model: Architecture, num_tokens: float, basis: Basis) -> float:
    """Seconds of a device for the experts of one layer's forward.

    What a timed layer takes beyond its count is the experts': attention of the same width is counted right elsewhere.
    """
    kernels = eager_kernels(setting_of(model, num_tokens, basis))
    surplus = kernels.correction("forward") - 1
    return kernels.seconds(kernels.experts()) + surplus * kernels.seconds(kernels.forward())


def loop_s(model: Architecture, basis: Basis) -> float:
    """Seconds of the interpreter for one layer's forward; 0 without experts."""
    return basis["expert_pass_s"] * model.experts.total if model.experts else 0.0


def waiting_s(model: Architecture, basis: Basis) -> float:
    """Seconds that a device waits for the loop in forward and recomputation of all layers.

    Hugging Face's loop asks the device for the tokens of every expert, and waits for the answer: launches and kernels
    of an expert follow each other.
    """
    return 2 * model.num_layers * loop_s(model, basis)
