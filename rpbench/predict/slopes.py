"""What each constant does to the throughput of a streamed pipeline, from few simulations.

Constants of kernels act on a step through the devices' seconds alone - of forwards, of backwards, of the fused stage -
so that the step is simulated once for each of these, and their change with a constant is counted: by the chain rule

    slope of a constant = sum over kinds of (slope of the seconds of a kind) x (change of these with the constant)

Constants of links, host and interpreter are varied themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from math import log

from rpbench.cost.basis import Basis
from rpbench.predict.case import Case
from rpbench.predict.streaming import Jobs, Lanes, lanes_of
from rpbench.predict.traffic import Need, Needs, Run, timed_with

# By how much a constant is varied to see what it does.
STEP = 1.05
_VARIED = ("copy_bytes_per_s", "host_bytes_per_s", "expert_pass_s", "loop_share", "optimizer_bytes", "adam_bytes")
_KINDS = (("F", "R"), ("B",), ("FB",))


def streamed_slopes(case: Case, jobs: Jobs, seconds: Callable[[Run], float]) -> Mapping[str, float]:
    """Relative change of the throughput for a relative change of every uncertain constant, by its name.

    Args:
        seconds: of a step, from a run of the jobs.
    """
    basis, lanes = case.basis, lanes_of(jobs)
    basis.read.clear()
    needs = Needs(jobs, case, basis).of_all(lanes)
    plain = seconds(timed_with(lanes, needs, basis))

    def slope(varied: Sequence[Need], other: Basis) -> float:
        return log(plain / seconds(timed_with(lanes, varied, other))) / log(STEP)

    by_kind = {kinds: slope(_longer(lanes, needs, kinds), basis) for kinds in _KINDS}
    before = _seconds_of(lanes, needs)
    found = {}
    for name in basis.uncertain():
        other = case.varied(name, STEP)
        varied = Needs(jobs, case, other).of_all(lanes)
        if name in _VARIED:
            found[name] = slope(varied, other)
            continue
        after = _seconds_of(lanes, varied)
        found[name] = sum(
            by_kind[kinds] * log(after[kinds] / before[kinds]) / log(STEP) for kinds in _KINDS if before[kinds]
        )
    return found


def _longer(lanes: Lanes, needs: Sequence[Need], kinds: Sequence[str]) -> list[Need]:
    """The same with the devices' seconds of some kinds drawn out."""
    return [
        need._replace(own_s=need.own_s * STEP) if slot.what in kinds else need
        for slot, need in zip(lanes.slots, needs, strict=True)
    ]


def _seconds_of(lanes: Lanes, needs: Sequence[Need]) -> dict[tuple[str, ...], float]:
    """Seconds of the devices by kind, a task of every slot."""
    return {
        kinds: sum(need.own_s for slot, need in zip(lanes.slots, needs, strict=True) if slot.what in kinds)
        for kinds in _KINDS
    }
