"""Request: one run as it was asked for, its choices typed, and which of its transfers take time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rpbench.config.choices import (
    BackendConfig,
    CheckpointConfig,
    ConfigError,
    CostConfig,
    Duel,
    Failures,
    Mode,
    OptimizerConfig,
    Simulate,
    TorchDuel,
    TrackerConfig,
    WorkloadConfig,
)
from rpbench.config.configuration import RunConfig
from rpbench.config.files import SourceFile
from rpbench.config.keys import MOVES
from rpbench.cost.hardware.machine import Machine
from rpbench.registry import Entry
from rpbench.workload.architecture import Architecture

if TYPE_CHECKING:
    from rpbench.config.mesh import MeshChoice
    from rpbench.mesh.software import Software

M = TypeVar("M", bound=Mode)

ABSTRACT = "abstract"  # the model without a shape
CONSTANTS = ("optimizer_bytes", "adam_bytes")  # cost constants: traffic of the optimizer for one parameter
WORDS = ("hops", "bytes")


@dataclass(frozen=True)
class ScheduleChoice:
    chosen: str  # the option of `schedule=`, such as `roundpipe_call`
    entry: Entry  # its registered generator
    options: Mapping[str, Any]  # keyword arguments of the generator
    file: SourceFile | None = None  # a schedule in text form instead of the generator's
    segments: int | None = None  # of every sequence, where not the options but an order says how many

    @property
    def num_segments(self) -> int:
        return self.segments or self.entry.num_segments(self.options)


@dataclass(frozen=True)
class Request:
    mode: Mode
    schedule: ScheduleChoice
    model: Architecture | None  # None for model=abstract
    num_layers: int | None  # of model=abstract, if given
    cluster: Machine
    workload: WorkloadConfig
    cost: CostConfig
    backend: BackendConfig | None  # None unless the mode is train
    optimizer: OptimizerConfig
    tracker: TrackerConfig
    num_devices: int
    num_microbatches: int
    num_steps: int
    chunks_per_device: int | None
    partition: str
    dispatch: str
    offload: str
    prefetch: int
    charge: str
    recompute: str
    tuning_budget: int | None
    seed: int
    dtype: str
    verify: bool
    checkpoint: CheckpointConfig
    results_dir: Path
    save_timeline: bool
    force: bool
    choices: Mapping[str, str | None]  # group -> chosen option, with the experiment and the resolved mode
    overrides: tuple[str, ...]  # `key=value` of the command line or of a cell of a sweep
    subject: Mapping[str, Any]  # all that decides what the run measures, as plain data; files by their SHA-256
    notes: tuple[str, ...] = ()  # on how the choices were read, a sentence each
    software: "Software | None" = None  # whose kernels cost=analytic counts, if named
    # None for a run whose devices are the ranks of its schedule. With one, `num_devices` counts all devices
    mesh: "MeshChoice | None" = None
    # microbatches of the schedule for each requested one; the workload's sequences are those of a piece. 1 except for
    # schedules that halve microbatches
    pieces: int = 1

    def mode_as(self, kind: type[M]) -> M:
        """The mode of a run that is known to be of this kind."""
        assert isinstance(self.mode, kind)
        return self.mode

    @property
    def given_model(self) -> Architecture:
        """The model of a run that would have been refused without one."""
        assert self.model is not None
        return self.model

    @property
    def entry(self) -> Entry:
        return self.schedule.entry

    @property
    def model_name(self) -> str:
        return self.model.name if self.model else ABSTRACT

    @property
    def asked_microbatches(self) -> int:
        """Microbatches of a step as requested, before they are cut into pieces."""
        return self.num_microbatches // self.pieces

    @property
    def tokens_per_microbatch(self) -> int | None:
        """Tokens of a microbatch with sequences as long as the model's; None for a model without sequences."""
        return self.workload.microbatch_sequences * self.model.seq_len if self.model else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all microbatches of a step, over all replicas; 0 where unknown."""
        own = sum(self.workload.microbatch_tokens) or self.num_microbatches * (self.tokens_per_microbatch or 0)
        return own * (self.backend.data_parallel if self.backend else 1)

    @property
    def meshed(self) -> "MeshChoice | None":
        """The mesh of a run whose ranks are groups of devices; None also for a pipeline on one host."""
        return self.mesh if self.mesh is not None and self.mesh.machine is not None else None

    @property
    def measures(self) -> bool:
        """Whether the results depend on this machine's speed."""
        timed, backend = ("cpu", "device", "emulated", "torch"), self.backend
        on_clock = backend is not None and backend.name in timed and backend.dry_accelerators is None
        measured_costs = self.cost.name == "profiled" and self.cost.profile is None
        with_processes = isinstance(self.mode, Failures) and self.mode.run == "processes"
        return isinstance(self.mode, Duel | TorchDuel) or with_processes or on_clock or measured_costs


# --- charging: `charge=hops` or `charge=bytes` (`rpbench.cost.charges`) -------------------------------------------


def charged_as(config: RunConfig, mode: Mode, entry: Entry, cluster: Machine, cost: CostConfig) -> dict[str, str]:
    """`charge` and `offload` of a run: as requested; by default everything that can be is charged.

    A schedule whose weights follow its work then moves them (`offload=all`); others move nothing.
    """
    charge = config.charge
    if charge is None:
        is_possible = isinstance(mode, Simulate) and config.tuning_budget is None
        stays = entry.separate_cuts and config.offload in ("none", "weights")
        in_bytes = is_possible and not stays and _known(config.model, cluster, cost)
        charge = "bytes" if in_bytes else "hops"
    moves = charge == "bytes" and entry.separate_cuts
    return {"charge": charge, "offload": config.offload or ("all" if moves else "none")}


def _known(model: Mapping[str, Any], cluster: Machine, cost: CostConfig) -> bool:
    """Whether the model's bytes, the machine's bandwidths and the optimizer's traffic are known."""
    machine = all(getattr(cluster, name) is not None for name in MOVES)
    known = cost.name == "analytic" or all(name in cost.constants for name in CONSTANTS)
    return machine and "hidden" in model and known


def check_charge(charge: str, offload: str, entry: Entry, mode: Mode) -> None:
    if charge not in WORDS:
        raise ConfigError(f"charge={charge}: one of {', '.join(WORDS)}")
    if charge == "hops":
        return
    if not isinstance(mode, Simulate):
        raise ConfigError(f"charge=bytes with mode={mode.name}: bytes are charged in simulation; use mode=simulate")
    if entry.separate_cuts and offload not in ("all", "auto"):
        raise ConfigError(
            f"charge=bytes with offload={offload}: the weights of {entry.name} follow its work, and their way counts; "
            "use offload=all, or charge=hops"
        )
