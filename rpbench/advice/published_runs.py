"""Published runs: the bars of figure 10 as requests to the simulator of schedules, beside its predictor of systems.

Each system of the published tables is the registered schedule that it runs, with the batch, the microbatches and the
accumulation of its run script and everything charged. What a schedule does not say is left out, and named in `LACKS`.

A step of replicas grows by the same time with every micro-step, so that a few are simulated and the rest continued.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rpbench.advice.causes import causes_of
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.published import published_partition
from rpbench.ir.partition import Partition, symmetric
from rpbench.mesh.layers.layer_seconds import Setting as LayerSetting
from rpbench.mesh.layers.layer_times import optimizer_traffic, setting_of, times_of
from rpbench.plan.contest.contender import Contender, Setting, contender
from rpbench.plan.contest.frame import Frame
from rpbench.plan.contest.plans import Outcome
from rpbench.plan.contest.terms import Limits, Terms
from rpbench.predict import roundpipe
from rpbench.predict.case import Case
from rpbench.predict.megatron import bound_cut

# Optimizer steps in a row, and micro-steps of replicas that are simulated of a step.
STEPS, FEW_CALLS = 6, (1, 3)  # of overlapping steps three in the middle count


class System(NamedTuple):
    """What stands for a system.

    Args:
        schedule: registered name; `late` with updates one step late.
        replicated: whether every device trains microbatches of its own.
        lacks: terms of the system that the schedule does not hold.
    """

    schedule: str
    options: Mapping[str, Any]
    late: bool = False
    replicated: bool = False
    lacks: tuple[str, ...] = ()


_EXPERTS = "the interpreter's loop over experts"
_WHOLE_STEP, _EACH_CALL = {"reduce_each_microbatch": False}, {"reduce_each_microbatch": True}
SYSTEMS: Mapping[str, System] = {
    "roundpipe": System("roundpipe", {}, late=True, lacks=(_EXPERTS,)),
    "roundpipe-sync": System("roundpipe", {}, lacks=(_EXPERTS, "a pass that refreshes the weights on the host")),
    "mobius": System("mobius", {}, lacks=("its batch and settings, which are not public", _EXPERTS)),
    "megatron-pp": System("1f1b", {}, lacks=("the sum of a tied embedding's gradients",)),
    "megatron-tp": System("megatron_tp", {}),
    "zero-2": System(
        "zero_2",
        _EACH_CALL,
        replicated=True,
        lacks=("sums of all gradients, twice the bytes of a scatter, behind the computation", _EXPERTS),
    ),
    "zero-infinity": System(
        "zero_infinity",
        _EACH_CALL,
        replicated=True,
        lacks=("gathers, scatters and copies behind the computation", "adding gradients on the host", _EXPERTS),
    ),
    "fsdp": System("zero_3", _WHOLE_STEP, replicated=True, lacks=("weights kept in fp32",)),
}


@dataclass(frozen=True)
class Simulated:
    """A published run as the simulator of schedules has it.

    Args:
        step_time_s: of a whole step; `why` by cause.
        outcome: pace and memory of what was simulated.
    """

    case: Case
    contender: Contender
    setting: Setting
    partition: Partition
    outcome: Outcome
    step_time_s: float
    why: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.case.tokens_per_step / self.step_time_s

    @property
    def lacks(self) -> tuple[str, ...]:
        """What the system does that the schedule does not say; loops over experts only where there are some."""
        terms = SYSTEMS[self.case.system].lacks
        return tuple(term for term in terms if term != _EXPERTS or self.case.model.experts is not None)


def simulated(case: Case, cluster: Machine) -> Simulated:
    """A published run, simulated action by action.

    Args:
        case: with the settings of the run (`rpbench.predict.settings.published_settings`).

    Raises:
        ValueError: for a system without a schedule, or one that the model cannot be cut for.
    """
    if case.system not in SYSTEMS:
        raise ValueError(f"system={case.system}: no schedule stands for it; there are {', '.join(SYSTEMS)}")
    system = SYSTEMS[case.system]
    return _replicated(case, cluster, system) if system.replicated else _whole(case, cluster, system)


def _whole(case: Case, cluster: Machine, system: System) -> Simulated:
    settings = case.settings
    num = settings.num_calls * (settings.chunks.num if settings.num_microbatches > 1 else 1)
    size = settings.global_sequences / num
    options: dict[str, Any] = {}
    if system.schedule == "roundpipe":
        options = {"round_size": settings.chunks.num, "asynchronous": system.late}
    frame, cut, who, setting = _framed(case, cluster, system, size, settings.global_sequences, options)
    outcome = frame.outcome(cut, "all")
    why = causes_of(frame, cut, outcome.keeps)
    return Simulated(case, who, setting, cut, outcome, outcome.step_time_s, why)


def _replicated(case: Case, cluster: Machine, system: System) -> Simulated:
    """A few micro-steps and more of them; every one of the rest takes what the last of these took."""
    size, calls = case.settings.microbatch_sequences, case.settings.num_calls
    few, more = (min(calls, number) for number in FEW_CALLS)
    found = {}
    for number in {few, more}:
        sequences = round(size * case.num_devices * number)
        frame, cut, who, setting = _framed(case, cluster, system, size, sequences, system.options)
        outcome = frame.outcome(cut, "all")
        found[number] = outcome, causes_of(frame, cut, outcome.keeps)
    last, why = found[more]
    ahead = (calls - more) / max(1, more - few)
    grown = {name: seconds + ahead * (seconds - found[few][1][name]) for name, seconds in why.items()}
    step_s = last.step_time_s + ahead * (last.step_time_s - found[few][0].step_time_s)
    return Simulated(case, who, setting, cut, last, step_s, grown)


def _framed(
    case: Case, cluster: Machine, system: System, size: float, sequences: int, options: Mapping[str, Any]
) -> tuple[Frame, Partition, Contender, Setting]:
    who = contender(system.schedule, late=system.late)
    every = {**who.entry.options, **system.options, **options}
    cut = _cut(case, system)
    chunks = None if who.entry.separate_cuts else len(cut.forward) // case.num_devices
    setting = Setting(size, chunks, "all", 1, tuple(every.items()))
    terms = terms_of_run(case, cluster, system, size, sequences)
    return Frame(who, setting, terms, cut, STEPS), cut, who, setting


def terms_of_run(case: Case, cluster: Machine, system: System, size: float, sequences: int) -> Terms:
    """The terms of a run: its batch, its kernels, its machine less what its processes reserve."""

    def setting(sequences: float) -> LayerSetting:
        return setting_of(case.model, sequences * case.model.seq_len, case.basis, case.software)

    return Terms(
        case.model,
        cluster,
        lambda count: times_of(setting(count)),
        optimizer_traffic(setting(1)),
        case.num_devices,
        sequences,
        (size,),
        STEPS,
        Limits(cluster.usable_memory_bytes, cluster.host_memory_bytes),
    )


def _cut(case: Case, system: System) -> Partition:
    """The cut of the run as the predictor has it; of replicas, a layer a stage as their checkpoints are."""
    devices, layers = case.num_devices, case.model.num_layers
    if system.schedule == "roundpipe":
        return roundpipe.planned(case)
    if system.schedule == "1f1b":
        return bound_cut(case)
    if system.schedule == "mobius" and case.model.published_name:
        return published_partition("looped_bfs", case.model.published_name)
    stages = devices if system.schedule == "megatron_tp" else -(-layers // devices) * devices
    each, more = divmod(layers, stages)
    return symmetric(tuple(each + (stage < more) for stage in range(stages)))
