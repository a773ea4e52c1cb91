"""The longest sequence that fits, in steps of 1,024 tokens, as the published lengths were searched.

One sequence a microbatch, and for data-parallel systems one a device; the verdict alone decides, not the time. The
cut of a bound pipeline is that of the throughput run. A streamed plan follows the times of its layers and so the
length: a length may fit although a shorter one does not, so the search goes on upwards after the bisection.
"""

from dataclasses import replace

from rpbench.predict.case import Case
from rpbench.predict.settings import Settings, length_microbatches
from rpbench.predict.systems import system

STEP_TOKENS = 1024
MOST_STEPS = 2048
# How far above a bisection's answer to look, as a share of it.
LOOK_ABOVE = 0.5


def longest_sequence(case: Case, *, look_above: bool = True) -> int:
    """Tokens of the longest sequence that fits, a multiple of 1,024; 0 if none does.

    Args:
        look_above: also look for lengths above one that does not fit.

    Raises:
        ValueError: for an unknown system, or a machine without a figure that is needed.
    """
    chosen = system(case.system)
    if chosen.refuses(case):
        return 0
    trial = replace(case, settings=_of_one_sequence(case))

    def fits(steps: int) -> bool:
        of_length = trial.of_length(STEP_TOKENS * steps)
        return chosen.memory_of_length(of_length, case).verdict(case.basis).fits

    low, high = 0, MOST_STEPS  # `low` fits, `high` does not
    if fits(high):
        return STEP_TOKENS * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not (look_above and case.system.startswith("roundpipe")):
        return STEP_TOKENS * low
    above = range(low + 1, low + 1 + int(LOOK_ABOVE * low))
    return STEP_TOKENS * max([low, *(steps for steps in above if fits(steps))])


def _of_one_sequence(case: Case) -> Settings:
    """One sequence a device; for RoundPipe one a microbatch, of which the scripts take ten or as few as one."""
    if case.system.startswith("roundpipe"):
        num = length_microbatches(case.model.published_name, case.basis.get("device_memory_bytes", 0.0))
        return Settings(num, 1, num, 1.0, "run scripts: one sequence a microbatch")
    calls = case.num_devices if case.system.startswith("megatron") else 1
    return Settings(case.num_devices, calls, 1, 1.0, "run scripts: one sequence a device")
