"""What each constant does to the throughput of a streamed pipeline, from few simulations.

Most constants act on a step through the devices' seconds in forwards, those in backwards, or the bytes of the
optimizer: the step is simulated once for each of these kinds, and their change with a constant is counted. By the
chain rule

    slope of a constant = sum over kinds of (slope of a kind) x (change of the kind with the constant)

The rates of links and host and the times of the interpreter are varied themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from math import log

from rpbench.cost.hardware.basis import Basis
from rpbench.predict.case import Case
from rpbench.predict.streamed.jobs import Jobs, Lanes
from rpbench.predict.streamed.streaming import lanes_of
from rpbench.predict.streamed.traffic import Need, Needs, Run, timed_with
from rpbench.sim.shared_links import HOST

# By how much a constant is varied to see what it does.
STEP = 1.05
_VARIED = ("copy_bytes_per_s", "host_bytes_per_s", "expert_pass_s", "loop_share")
_KINDS = (("F", "R"), ("B", "FB"), ("refresh", "convert", "adam"))


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
    before = _sizes(lanes, needs)
    found = {}
    for name in basis.uncertain():
        other = case.varied(name, STEP)
        varied = Needs(jobs, case, other).of_all(lanes)
        if name in _VARIED:
            found[name] = slope(varied, other)
            continue
        after = _sizes(lanes, varied)
        found[name] = sum(
            by_kind[kinds] * log(after[kinds] / before[kinds]) / log(STEP) for kinds in _KINDS if before[kinds]
        )
    return found


def _longer(lanes: Lanes, needs: Sequence[Need], kinds: Sequence[str]) -> list[Need]:
    """The same with some kinds drawn out."""
    return [
        need._replace(own_s=need.own_s * STEP, amount=need.amount * (STEP if need.served_by == HOST else 1))
        if slot.what in kinds
        else need
        for slot, need in zip(lanes.slots, needs, strict=True)
    ]


def _sizes(lanes: Lanes, needs: Sequence[Need]) -> dict[tuple[str, ...], float]:
    """Seconds of the devices or bytes of the host by kind, a task of every slot."""
    return {
        kinds: sum(
            need.amount if need.served_by == HOST else need.own_s
            for slot, need in zip(lanes.slots, needs, strict=True)
            if slot.what in kinds
        )
        for kinds in _KINDS
    }
