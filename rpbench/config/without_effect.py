"""Without effect: choices of a command line that change nothing in a mode, and what else there is to tell of some."""

from collections.abc import Collection, Mapping, Sequence

from rpbench.config.charging import CONSTANTS
from rpbench.config.choices import CostConfig, Mode, Predict, Roofline, Simulate

OF_TENSORS = ("dtype", "optimizer")
# What the published runs of mode=predict have of their own.
OF_SCRIPTS = frozenset(
    [
        "num_microbatches",
        "num_steps",
        "chunks_per_device",
        "partition",
        "recompute",
        "prefetch",
        "dispatch",
        "offload",
        "workload",
        "seed",
    ]
)


def without_effect(mode: Mode, overrides: Sequence[str], *, eager: bool) -> tuple[str, ...]:
    """What was asked for and changes nothing in a mode.

    Args:
        eager: whether constants of counted kernels are read: those of `software=roundpipe` or of a calibrated machine.
    """
    if not isinstance(mode, Simulate | Predict | Roofline):
        return ()
    found = []
    if words := _of_groups(overrides, OF_TENSORS):
        found.append(
            f"{words} without effect: mode={mode.name} has no tensors; it counts 16-bit weights, Adam's states"
        )
    if isinstance(mode, Simulate) and not eager and (words := _constants(overrides)):
        found.append(
            f"{words} without effect: these constants are of kernels that are counted operator by operator, as in "
            "software=roundpipe"
        )
    if isinstance(mode, Predict) and (words := _of_groups(overrides, OF_SCRIPTS)):
        found.append(
            f"{words} without effect: mode=predict takes a system's published run; mode.sequences=N with "
            "mode.microbatches=N are another, and mode=simulate takes all of them"
        )
    return tuple(found)


def _constants(overrides: Sequence[str]) -> str:
    """The words that set constants of kernels, not of what `charge=bytes` moves."""
    keys = {item: item.lstrip("+").partition("=")[0] for item in overrides}
    moved = {f"cost.constants.{name}" for name in CONSTANTS}
    return " ".join(item for item, key in keys.items() if key.startswith("cost.constants.") and key not in moved)


def _of_groups(overrides: Sequence[str], groups: Collection[str]) -> str:
    """The words of a command line that set a key of some groups."""
    keys = [item.lstrip("+").partition("=")[0].partition(".")[0] for item in overrides]
    return " ".join(item for item, key in zip(overrides, keys, strict=True) if key in groups)


def frozen(cost: CostConfig) -> tuple[str, ...]:
    """What there is to tell of weight gradients that are not made."""
    if not cost.max_freeze_ratio:
        return ()
    return (
        f"cost.max_freeze_ratio={cost.max_freeze_ratio}: parts of the weight gradients are not made, so that this is "
        "other training than without; only its times are simulated",
    )


def renamed(choices: Mapping[str, str | None]) -> tuple[str, ...]:
    """What there is to tell of an old name."""
    is_old = choices.get("backend") == "cuda"
    return ("backend=cuda is now called backend=device, and serves every accelerator of torch",) if is_old else ()
