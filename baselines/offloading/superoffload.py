"""SuperOffload: the host steps a stage as soon as its gradient arrives, and undoes steps that were too early.

As in `zero_offload`, gradients go to the host as they are made, and the optimizer runs there. It does not wait for the
end of the backward, when overflow and the norm of all gradients are known. VALIDATE checks them then, and a ROLLBACK
ends each step: it undoes the step after an overflow, and repeats it if gradients are clipped. New weights return to the
device as they are made; the next step begins when all is settled. With 1 device, 3 stages and 1 microbatch a step:

    compute   0F0 1F0 2F0 2B0 1B0 0B0                          0F1 1F1 2F1 ...
    d2h                       2STORE:G 1STORE:G 0STORE:G
    host                               2STEP@1 1STEP@1 0STEP@1 0VALIDATE@1 2ROLLBACK@1 1ROLLBACK@1 0ROLLBACK@1
    h2d                       2FREE:P          2LOAD:P@1 1LOAD:P@1 0LOAD:P@1

Nothing is stale: the step that remains is the step of plain training. If the host is fast enough, only the following
comes after the last backward: the transfer of one gradient, one step, and the transfer of its weights.

`speculate=false` does what the released code does with gradient clipping: VALIDATE comes first and no step is undone.
`device_stages` of the first stages, whose gradients come last, are stepped on the devices after VALIDATE.

Several devices keep shards (ZeRO-3), gathered for every visit once they are settled.

Source: SuperOffload (arXiv 2509.21271, ASPLOS'26), after a description of its abstract and of the code in DeepSpeed
(superoffload_stage3).
"""

from collections.abc import Iterator
from dataclasses import replace

from baselines.data_parallel.data_parallel import whole_microbatches, with_steps
from rpbench.ir.action import Action, Kind
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Row, Schedule, Shape
from rpbench.passes.lower import each_row
from rpbench.passes.offload import offload, shard
from rpbench.registry import schedule


def _lower(order: Schedule, *, prefetch: int, speculate: bool, device_stages: int, gather_each_visit: bool) -> Schedule:
    on_host = range(device_stages, order.shape.num_stages)
    steps = each_row(
        with_steps(order, on_host), lambda lane, row: (_with_ends if speculate and lane == "host" else _with_looks)(row)
    )
    if order.shape.num_ranks > 1:
        steps = shard(steps, parameters="visit" if gather_each_visit else "step", gradients="visit", prefetch=prefetch)
    if not on_host:
        return steps
    stored = offload(steps, gradients="visit", parameters=None, stages=on_host)
    loads = tuple(_loads(order.shape, on_host))
    return replace(stored, rows=tuple({**dict(lanes), "h2d": loads} for lanes in stored.rows))


@schedule(
    "superoffload",
    source="arXiv 2509.21271",
    looped=True,
    lower=_lower,
    searched={"gather_each_visit": (True, False), "device_stages": (0, 1, 2)},
    whole_microbatches=True,
    gathers={"gather_each_visit": True},
)
def superoffload(
    shape: Shape, *, speculate: bool = True, device_stages: int = 0, gather_each_visit: bool = True
) -> Schedule:
    """The order of data parallelism.

    Args:
        speculate: step before overflow and norm are known.
        device_stages: first stages that the devices step, from 0 to all.
        gather_each_visit: several devices gather weights for every visit; otherwise once a step, and hold all.
    """
    whole_number = isinstance(device_stages, int) and not isinstance(device_stages, bool)
    if not whole_number or not 0 <= device_stages <= shape.num_stages:
        raise ValueError(
            f"schedule.device_stages={device_stages}: stages that the devices step, from 0 to {shape.num_stages}, of "
            f"which there are {shape.num_stages}; take 0"
        )
    return whole_microbatches(shape, "superoffload", Policy.OPTIMISTIC)


def _with_looks(row: Row) -> Iterator[Action]:
    """A row with a VALIDATE before the steps to a version, where the first stage's is among them."""
    first = {action.version for action in row if (action.kind, action.stage) == (Kind.STEP, 0)}
    for action in row:
        if action.kind is Kind.STEP and action.version in first:
            first.discard(action.version)
            yield Action(Kind.VALIDATE, 0, version=action.version)
        yield action


def _with_ends(row: Row) -> Iterator[Action]:
    """A host's row: the steps to a version, a VALIDATE where the first stage's is among them, a ROLLBACK of each."""
    for version in dict.fromkeys(action.version for action in row):
        steps = [action for action in row if action.version == version]
        yield from steps
        if any(step.stage == 0 for step in steps):
            yield Action(Kind.VALIDATE, 0, version=version)
        yield from (step._replace(kind=Kind.ROLLBACK) for step in steps)


def _loads(shape: Shape, stages: range) -> Iterator[Action]:
    """Load weights for the first step; after a stage's last backward replace them by its next ones."""
    yield from (Action(Kind.LOAD, stage, version=0, object="P") for stage in stages)
    for step in range(1, shape.num_steps + 1):
        for stage in reversed(stages):
            yield Action(Kind.FREE, stage, object="P")
            if step < shape.num_steps:
                yield Action(Kind.LOAD, stage, version=step, object="P")
