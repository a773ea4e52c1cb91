"""Without effect: choices that a mode has no use for: refused, or told where they change nothing."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rpbench.config.charging import CONSTANTS
from rpbench.config.choices import ConfigError, Duel, Mode, Predict, Roofline, Simulate, TorchDuel, Train

if TYPE_CHECKING:
    from rpbench.config.request import Request

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


# --- refused -------------------------------------------------------------------------------------------------


def check_mode(request: "Request") -> None:
    """Refuse what a mode has no use for.

    Raises:
        ConfigError: naming what to write instead.
    """
    mode, backend = request.mode, request.backend
    if request.software is not None:
        _check_software(request, request.software.name)
    if request.mesh is not None and not isinstance(mode, Simulate):
        raise ConfigError(
            f"mesh with mode={mode.name}: meshes are simulated; use mode=simulate, search one with rpbench plan "
            "mesh=search, or train replicas and tensor shards with backend=torch backend.data_parallel=2 "
            "backend.tensor_parallel=2"
        )
    if isinstance(mode, Train) and backend is None:
        raise ConfigError("mode=train: choose what executes it, as in backend=virtual, backend=cpu or backend=emulated")
    if not isinstance(mode, Train) and backend is not None:
        raise ConfigError(f"mode={mode.name} has no backend: leave backend={backend.name} out, or take mode=train")
    has_tensors = backend is not None and backend.name != "emulated"
    if request.verify and not has_tensors and not isinstance(mode, Duel):
        where = f"backend={backend.name}" if backend else f"mode={mode.name}"
        raise ConfigError(f"verify=true: {where} has no tensors to compare; use backend=virtual or backend=cpu")
    asked = request.checkpoint.save_to or request.checkpoint.resume_from
    if asked and (backend is None or backend.name not in ("virtual", "cpu")):
        where = f"backend={backend.name}" if backend else f"mode={mode.name}"
        raise ConfigError(f"checkpoint: {asked}: {where} has no state to keep; use backend=virtual or backend=cpu")
    if isinstance(mode, Predict | Roofline | Duel | TorchDuel) and request.model is None:
        raise ConfigError(f"mode={mode.name} needs a model with a shape; choose one, as in model=qwen3_1p7b")
    if request.tuning_budget is not None and not isinstance(mode, Simulate):
        raise ConfigError(
            f"tuning_budget={request.tuning_budget} with mode={mode.name}: plans are searched in simulation; use "
            "mode=simulate"
        )
    _check_frozen(request)
    if request.recompute == "fitting" and not isinstance(mode, Simulate):
        raise ConfigError(
            f"recompute=fitting with mode={mode.name}: stage by stage is simulated; use mode=simulate, or "
            "recompute=all, except_last or none"
        )
    if request.recompute == "fitting" and (request.model is None or request.schedule.file is not None):
        raise ConfigError(
            "recompute=fitting: what fits follows from a model's bytes and a schedule of the registry; "
            "choose both, or use recompute=all"
        )
    if isinstance(mode, Duel) and request.recompute != "all":
        raise ConfigError(f"recompute={request.recompute} with mode=duel: it has a key of its own; set mode.recompute")


def _check_software(request: "Request", name: str) -> None:
    if request.cost.name != "analytic" and (request.mesh is None or request.mesh.machine is None):
        raise ConfigError(
            f"software={name} with cost={request.cost.name}, which has its own seconds: software says what "
            "cost=analytic counts; leave one of both out"
        )


def _check_frozen(request: "Request") -> None:
    ratio = request.cost.max_freeze_ratio
    if not ratio or (isinstance(request.mode, Simulate) and request.mesh is None and request.tuning_budget is None):
        return
    what = f"mode={request.mode.name}"
    if request.mesh is not None:
        what = "a mesh"
    elif request.tuning_budget is not None:
        what = f"tuning_budget={request.tuning_budget}"
    raise ConfigError(
        f"cost.max_freeze_ratio={ratio} with {what}: backwards that make a part of the weight gradients are simulated "
        "for one schedule on one host; use mode=simulate alone, or leave it at 0"
    )
