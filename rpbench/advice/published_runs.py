"""Published runs: the bars of figure 10, simulated as schedules, beside the predictor of whole systems.

Each system of the published tables is simulated as the registered schedule that it runs, with the batch, microbatches
and accumulation of its run script and everything charged. `lacks` names what the schedule leaves out of a system.

A step of replicas grows by the same time with every micro-step: a few are simulated, and the rest extrapolated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rpbench.advice.causes import causes_of
from rpbench.cost.hardware.machine import Machine
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

STEPS = 6  # optimizer steps in a row; where steps overlap, three in the middle count
FEW_CALLS = (1, 3)  # micro-steps of replicas that are simulated


class System(NamedTuple):
    """The schedule that stands for a system."""

    schedule: str  # registered name; with `late`, updates are one step late
    options: Mapping[str, Any]
    late: bool = False
    replicated: bool = False  # whether every device trains microbatches of its own
    lacks: tuple[str, ...] = ()  # what the system does and the schedule leaves out


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
    """A published run, simulated as a schedule."""

    case: Case
    contender: Contender
    setting: Setting
    partition: Partition
    outcome: Outcome  # pace and memory of the simulated steps
    step_time_s: float  # of a whole step; `why` splits it by cause
    why: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.case.tokens_per_step / self.step_time_s

    @property
    def lacks(self) -> tuple[str, ...]:
        """What the system does and the schedule leaves out; loops over experts only if the model has experts."""
        terms = SYSTEMS[self.case.system].lacks
        return tuple(term for term in terms if term != _EXPERTS or self.case.model.experts is not None)


def simulated(case: Case, cluster: Machine) -> Simulated:
    """A published run, simulated action by action.

    Raises ValueError for a system without a schedule, or one that the model cannot be cut for.

    Args:
        case: with the settings of the run (`rpbench.predict.settings.published_settings`).
    """
    if case.system not in SYSTEMS:
        raise ValueError(f"system={case.system}: no schedule stands for it; there are {', '.join(SYSTEMS)}")
    system, settings = SYSTEMS[case.system], case.settings
    if system.replicated:
        return _replicated(case, cluster, system)
    num = settings.num_calls * (settings.chunks.num if settings.num_microbatches > 1 else 1)
    return _run(case, cluster, system, settings.global_sequences / num, settings.global_sequences)


def _replicated(case: Case, cluster: Machine, system: System) -> Simulated:
    """Steps of few and of more micro-steps; each of the remaining ones adds as much as the last of these did."""
    size, calls = case.settings.microbatch_sequences, case.settings.num_calls
    few, more = (min(calls, number) for number in FEW_CALLS)
    found = {
        number: _run(case, cluster, system, size, round(size * case.num_devices * number)) for number in {few, more}
    }
    first, last = found[few], found[more]
    ahead = (calls - more) / max(1, more - few)
    grown = {name: seconds + ahead * (seconds - first.why[name]) for name, seconds in last.why.items()}
    return replace(last, step_time_s=last.step_time_s + ahead * (last.step_time_s - first.step_time_s), why=grown)


def _run(case: Case, cluster: Machine, system: System, size: float, sequences: int) -> Simulated:
    """A run with so many sequences a step, in microbatches of `size`."""
    who, cut = contender(system.schedule, late=system.late), _cut(case, system)
    options = {**who.entry.options, **system.options}
    if system.schedule == "roundpipe":
        options |= {"round_size": case.settings.chunks.num, "asynchronous": system.late}
    chunks = None if who.entry.separate_cuts else len(cut.forward) // case.num_devices
    setting = Setting(size, chunks, "all", 1, tuple(options.items()))
    frame = Frame(who, setting, terms_of_run(case, cluster, size, sequences), cut, STEPS)
    outcome = frame.outcome(cut, "all")
    return Simulated(case, who, setting, cut, outcome, outcome.step_time_s, causes_of(frame, cut, outcome.keeps))


def terms_of_run(case: Case, cluster: Machine, size: float, sequences: int) -> Terms:
    """The terms of a run: its batch, its kernels, and its machine's memory less what processes reserve."""

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
    """The predictor's cut of the run; for replicas one layer a stage, as they recompute."""
    devices, layers = case.num_devices, case.model.num_layers
    if system.schedule == "roundpipe":
        return roundpipe.planned(case)
    if system.schedule == "1f1b":
        return bound_cut(case)
    if system.schedule == "mobius":
        return roundpipe.mobius_cut(case)
    stages = devices if system.schedule == "megatron_tp" else -(-layers // devices) * devices
    each, more = divmod(layers, stages)
    return symmetric(tuple(each + (stage < more) for stage in range(stages)))
