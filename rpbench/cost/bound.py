"""Constants that published timings bind: when one is taken to be larger, the corrections get smaller.

A model's corrections are measured over counted time of its layers on one machine. What is counted there holds
constants that may be off; the measured time does not. So a constant that counts more on that machine is made up for
by the correction, and only what differs from the timed run - other sizes of a microbatch, another machine - is left of
its error.
"""

from dataclasses import replace

from rpbench.cost.analytic import PARTS, analytic_times, correction_name
from rpbench.cost.basis import Basis
from rpbench.cost.machine import NUMBERS
from rpbench.cost.published import published_tokens_per_microbatch
from rpbench.workload.architecture import Architecture

TIMED_SEQ_LEN = 2048  # tokens of a sequence where layers were timed


def rebound(model: Architecture, basis: Basis, name: str, factor: float, measured_on: Basis | None) -> Basis:
    """The constants with one multiplied, and the model's corrections as its timings give them then.

    Args:
        measured_on: the constants on the machine where the timings were taken; None leaves the corrections.
    """
    found = basis.scaled(name, factor)
    corrections = {part: correction_name(model.published_name or "", part) for part in PARTS}
    bound = {part: known for part, known in corrections.items() if known in basis.values}
    if measured_on is None or not bound or name in bound.values() or name not in measured_on.values:
        return found
    if name in NUMBERS and measured_on.cluster_name != basis.cluster_name:
        return found
    before, after = (_counted(model, each) for each in (measured_on, measured_on.scaled(name, factor)))
    values = {known: basis.values[known] * before[part] / after[part] for part, known in bound.items()}
    return replace(found, values={**found.values, **values})


def _counted(model: Architecture, basis: Basis) -> dict[str, float]:
    """Counted time of the parts that were timed."""
    timed = replace(model, seq_len=TIMED_SEQ_LEN, context=None)
    times = analytic_times(timed, published_tokens_per_microbatch(model.published_name or ""), basis)
    parts = (times.forward[0], times.backward[0], times.head_forward, times.head_backward)
    return dict(zip(PARTS, parts, strict=True))
