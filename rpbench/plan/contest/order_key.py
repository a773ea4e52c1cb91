"""Order key: which plans compute the same actions in the same order, so that a comparison counts them once."""

from collections.abc import Hashable

from rpbench.ir.action import COMPUTE
from rpbench.plan.contest.frame import posed
from rpbench.plan.contest.plans import Tuned
from rpbench.plan.contest.terms import Terms


def order_key(plan: Tuned, terms: Terms) -> Hashable:
    """What plans with the same order have in common: every device's computation, action by action.

    The layers behind the stages are no part of it, nor activations that move, nor which weights are read: BPipe has the
    order of 1F1B. What a method itself says that it moves is, and a late update beside the method without one.
    """
    entry = plan.contender.entry
    method = entry.name if entry.lower is not None else "", plan.contender.fixed
    order = posed(plan.contender, plan.setting, terms, plan.num_steps).order(plan.partition)
    return method, tuple(
        tuple((action.kind, action.stage, action.microbatch, action.part, action.sub) for action in row)
        for row in (
            [action for action in order.compute(device) if action.kind in COMPUTE]
            for device in range(order.shape.num_ranks)
        )
    )
