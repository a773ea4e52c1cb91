"""Recomputation: which layers run their forward again, and where that stands in a row.

    all          every stage runs its forward again, from the input it has saved
    except_last  the last stage does not, where its backward directly follows its forward, which costs no memory
                 (`rpbench.ir.checks.residency`)
    none         no stage does: a device holds whole activations of every microbatch in flight
    fitting      as few layers do as the memory allows (`rpbench.cost.footprint.fitting`); in simulation

torchgpipe's `checkpoint` says the same of microbatches: `always` is `all`, `never` is `none`; its `except_last` spares
the last microbatch of a batch, which comes back at once on the last stage only.

Passes over a row, for forwards that run earlier because little is kept:

    checkpoint   every backward gets an R of its own right before it. R needs what its forward kept, not the gradient
                 that comes from above, so it runs in the wait for that gradient.
    remove       a forward whose backward directly follows keeps its activations, and needs no R
    prepose      forwards after a rank's first backward move before it; each keeps only its input

At most one recomputed activation exists at a time: the R of a backward follows the backward before it.

Source: Huang et al., "GPipe", NeurIPS'19, section 2.3; Kim et al., "torchgpipe", arXiv 2004.09910, section 3; the
passes of Mario (PPoPP'25), after their description.
"""

from collections.abc import Sequence, Set
from typing import Literal, get_args

from rpbench.ir.action import BACKWARD, Action, Kind, parts_of
from rpbench.ir.checks.residency import turns_at_once
from rpbench.ir.partition import Partition
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Row, Schedule, Weights

# A search tries them in this order: first with as little recomputation as fits.
Recompute = Literal["fitting", "all", "except_last", "none"]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
EXECUTED: tuple[Recompute, ...] = ("all", "except_last", "none")  # what the engines do

# Backward reads the weights that forward read.
_SAME_WEIGHTS = frozenset(
    {
        Policy.FLUSH,
        Policy.STASH,
        Policy.VERTICAL,
        Policy.TWO_BW,
        Policy.DELAYED,
        Policy.OPTIMISTIC,
        Policy.TRIAL,
        Policy.SELECTIVE,
    }
)


def kept_layers(partition: Partition, recompute: str) -> tuple[int, ...]:
    """Layers of each backward stage that run their forward once, under any choice but `fitting`."""
    *others, last = partition.backward
    if recompute == "none":
        return partition.backward
    return (*[0] * len(others), last * (recompute == "except_last"))


def check_nothing_leaves(schedule: Schedule, recompute: str, objects: Set[str]) -> None:
    """Refuse to keep an autograd graph whose weights leave the device before its backward: gathered shards, transfers.

    Costs and memory need no such rule: activations stay while weights come back for the backward.
    """
    moved = {action.object for _, _, row in schedule.items() for action in row if action.object}
    if Kind.UNSHARD in schedule.kinds or moved & objects:
        raise ValueError(f"recompute={recompute}: nothing may leave the devices in between; use recompute=all")


def check_recompute(schedule: Schedule, recompute: Recompute) -> None:
    """Refuse to keep activations that cannot stay where they are; ValueError with a way out."""
    keeps_whole_stages = recompute in ("none", "fitting")
    if recompute == "except_last" and not turns_at_once(schedule):
        raise ValueError(
            f"recompute=except_last: the last stage of {schedule.name} does other work between a forward and its "
            "backward; use recompute=all, or a schedule such as 1f1b"
        )
    if keeps_whole_stages and schedule.weights is Weights.STREAMED:
        raise ValueError(
            f"recompute={recompute}: the stages of {schedule.name} come and go, and nothing of a forward stays on a "
            "device; use recompute=all, or a schedule whose stages stay where they are, such as gpipe"
        )
    if recompute == "except_last":
        check_nothing_leaves(schedule, recompute, {"P", "G", "A"})
    shape = schedule.shape
    if keeps_whole_stages and shape.tensor_parallel:
        raise ValueError(
            f"recompute={recompute}: the sums of {schedule.name} count those of recomputation; use recompute=all"
        )
    if keeps_whole_stages and schedule.policy not in _SAME_WEIGHTS:
        raise ValueError(
            f"recompute={recompute}: the backward of {schedule.name} reads other weights than its forward, which a "
            "kept graph would not; use recompute=all"
        )


def checkpoint(row: Sequence[Action]) -> Row:
    """The row with an R before every backward that does not directly follow its forward."""
    found: list[Action] = []
    for action in row:
        before = found[-1] if found else None
        found += [
            Action(Kind.R, part.stage, part.microbatch, part.part)
            for part in parts_of(action)
            if part.kind in (Kind.B, Kind.I) and not _turns(before, part)
        ]
        found.append(action)
    return tuple(found)


def prepose(row: Sequence[Action], number: int) -> Row:
    """The row with the first `number` forwards after its first backward moved before it.

    A row whose first backward directly follows its own forward stays as it is: that forward keeps what it computes.
    """
    first = next(
        (place for place, action in enumerate(row) if any(part.kind in BACKWARD for part in parts_of(action))), len(row)
    )
    if not first or first == len(row) or any(_turns(row[first - 1], part) for part in parts_of(row[first])):
        return tuple(row)
    moved = [place for place in range(first, len(row)) if row[place].kind is Kind.F][:number]
    stays = [action for place, action in enumerate(row[first:], start=first) if place not in moved]
    return (*row[:first], *(row[place] for place in moved), *stays)


def _turns(before: Action | None, backward: Action) -> bool:
    """Whether an action is the forward of a backward that directly follows."""
    return before == Action(Kind.F, backward.stage, backward.microbatch, backward.part)
