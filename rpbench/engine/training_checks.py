"""Checks of a training run: refuse a schedule, workload and settings that do not fit together."""

import inspect

from rpbench.engine.compute.stage import Grain
from rpbench.engine.layout import Layout
from rpbench.engine.state.updates.compensation import Compensation
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind, parts_of
from rpbench.ir.checks.residency import moves_activations
from rpbench.ir.policy import boundaries
from rpbench.ir.schedule import Schedule
from rpbench.ir.waits.saved_inputs import keeping_stage
from rpbench.passes.recomputation import Recompute, check_nothing_leaves, check_recompute


def check_stored(schedule: Schedule, layout: Layout, grain: Grain) -> None:
    """Refuse a STORE:A of inputs that several forwards keep, which is possible where every layer's input is kept."""
    if grain == "stage" or not schedule.shape.separate_cuts:
        return
    for action in (action for _, _, row in schedule.items() for action in row):
        if (action.kind, action.object) == (Kind.STORE, "A"):
            keeper = layout.forward[keeping_stage(schedule, action.stage)]
            apart = [module for module in layout.backward[action.stage] if module not in keeper]
            if apart:
                raise ValueError(
                    f"recompute_grain=layer: {action} is of what several forward stages keep (modules "
                    f"{list(layout.backward[action.stage])}, of which {apart} are another's); use recompute_grain=stage"
                )


def check_kept(schedule: Schedule, recompute: Recompute, compensation: Compensation) -> None:
    """Refuse to keep activations whose weights change before the backward, or to move those of several forwards."""
    check_recompute(schedule, recompute)
    if recompute != "all":  # the engine's kept graphs hold the very weights of their forward
        check_nothing_leaves(schedule, recompute, {"P", "G"})
    if recompute != "all" and schedule.shape.tensor_parallel:
        raise ValueError(
            f"recompute={recompute}: devices of {schedule.name} meet inside recomputations, and its sums count "
            "them; use recompute=all"
        )
    if recompute != "all" and schedule.shape.num_parts > 1:
        raise ValueError(
            f"recompute={recompute}: segments of {schedule.name} read keys and values of earlier ones, and the "
            "engine keeps no graphs of several segments; use recompute=all, or mode=simulate"
        )
    if recompute == "none" and schedule.shape.separate_cuts and moves_activations(schedule):
        raise ValueError(
            f"recompute=none: {schedule.name} moves activations, and its backward stages have other layers than its "
            "forward stages; use recompute=all, or the same cut both ways"
        )
    if recompute != "all" and compensation.is_needed:
        raise ValueError(f"recompute={recompute}: what makes up for late gradients changes weights; use recompute=all")


def check_selective(workload: Workload, schedule: Schedule) -> None:
    """Refuse late columns that are never loaded, and tied weights: columns are chosen by one gradient."""
    rule = schedule.late_rest
    if rule is None:
        return
    ends = boundaries(rule, schedule.shape.num_steps)
    if Kind.STEP in schedule.kinds and ends and Kind.LOAD not in schedule.kinds:
        raise ValueError(
            f"{schedule.name} has no LOAD:P: of {rule.rest} of the columns the host would step what no device sees, as "
            f"it is to at {[end.version for end in ends]}; take the schedule with all it moves, as `show` prints it"
        )
    check_untied(schedule, has_tied=bool(workload.tied))


def check_momentum(settings: Compensation, optimizer: OptimizerSettings) -> None:
    """Refuse (ValueError) an optimizer without the moments or momentum that compensation needs."""
    asked = {
        "spike_compensation": settings.spike_compensation,
        "weight_prediction": settings.predictor == "pipelined_backprop",
    }
    names = [name for name, is_asked in asked.items() if is_asked]
    if settings.is_needed and optimizer.name not in ("adamw", "sgd"):
        raise ValueError(
            f"optimizer={optimizer.name}: late gradients are compensated with the moments of adamw or the momentum of "
            "sgd; use optimizer=adamw"
        )
    if names and not (optimizer.name == "sgd" and optimizer.momentum):
        raise ValueError(
            f"optimizer={optimizer.name} optimizer.momentum={optimizer.momentum}: {' and '.join(names)} of "
            "pipelined_backprop must have the velocity of gradient descent with momentum; use optimizer=sgd "
            f"optimizer.momentum=0.9, or {' '.join(f'schedule.{name}=false' for name in names)}"
        )


def check_untied(schedule: Schedule, *, has_tied: bool) -> None:
    """Refuse tied weights where columns are chosen by the gradient of one matrix."""
    if schedule.late_rest is not None and has_tied:
        raise ValueError(
            f"{schedule.name} chooses columns of a matrix by its gradient, and model.tied=true has one that "
            "two stages share, whose gradients are added up when it is stepped; use model.tied=false"
        )


def check_shape(workload: Workload, schedule: Schedule) -> None:
    """Refuse a cut of other layers or none, other microbatches, and segments that the workload cannot be cut into."""
    if schedule.partition is None:
        raise ValueError("the schedule has no partition: give it one by with_partition()")
    schedule.partition.check_layers(len(workload.chain) - 2)
    if schedule.shape.num_segments > 1:
        _check_parts(workload, schedule)
    if schedule.shape.num_microbatches != workload.num_microbatches:
        raise ValueError(
            f"the schedule has {schedule.shape.num_microbatches} microbatches a step, the workload "
            f"{workload.num_microbatches}: make both for the same number"
        )


def _check_parts(workload: Workload, schedule: Schedule) -> None:
    num_parts, seq_len = schedule.shape.num_parts, workload.batch(0).tokens.shape[1]
    if workload.lengths:
        if any(len(set(own)) > 1 for own in workload.lengths):
            raise ValueError(
                f"{num_parts} segments of a sequence, and workload.lengths packs unequal ones into a microbatch, which "
                "are whole: set workload.microbatch_sequences=1, or take a schedule without segments"
            )
        seq_len = min(map(min, workload.lengths))
    if num_parts > seq_len:
        raise ValueError(
            f"{num_parts} segments of a sequence of {seq_len} tokens: a segment holds at least 1; take fewer segments"
        )
    parts = (part for _, _, row in schedule.items() for action in row for part in parts_of(action))
    split = next((part for part in parts if part.kind in (Kind.I, Kind.W, Kind.FB)), None)
    if split is not None:
        raise ValueError(
            f"{split}: gradients of keys and values pass between segments in whole backwards only; "
            "use schedule=seq1f1b as it is, or mode=simulate"
        )
    for module in workload.modules[1:-1]:
        if "earlier" not in inspect.signature(module.forward).parameters:
            raise ValueError(
                f"{type(module).__name__} runs whole sequences, the schedule cuts them into {num_parts} segments: "
                "its forward must take the earlier ones' keys and values; use one segment, or another schedule"
            )
