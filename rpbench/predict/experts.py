"""The interpreter's loop over experts where a process runs it for one device alone.

A layer's experts run on the device as the loop launches them: the layer takes the longer of the two. Where one
interpreter loops for all devices, they wait for one another; that is simulated (`rpbench.predict.streaming`).
"""

from rpbench.cost.analytic import seconds
from rpbench.cost.basis import Basis
from rpbench.cost.model import Model
from rpbench.cost.operators import expert_forward


def expert_s(model: Model, num_tokens: float, basis: Basis) -> float:
    """Seconds of a device for the experts of one layer's forward."""
    return seconds(expert_forward(model, num_tokens, basis), basis, "eager")


def loop_s(model: Model, basis: Basis) -> float:
    """Seconds of the interpreter for one layer's forward; 0 without experts."""
    return basis["expert_pass_s"] * model.experts_total if model.experts_total > 1 else 0.0


def waiting_s(model: Model, num_tokens: float, basis: Basis) -> float:
    """Seconds that a device waits for the loop in forward and recomputation of all layers."""
    if model.experts_total == 1:
        return 0.0
    return 2 * model.num_layers * max(0.0, loop_s(model, basis) - expert_s(model, num_tokens, basis))
