"""Weight policies: which version of the weights forward and backward read, and the late rest of policy selective.

A version is the number of optimizer steps a stage's weights have seen. Schedules do not store versions;
`rpbench.ir.checks.versions` finds them by replaying an order.

Policy selective steps important columns at once and the rest late (`LateRest`). With w warm-up steps and an interval
of S steps, a step to version v is one of these:

    v <= w     columns are not chosen yet: the host steps the whole stage, and the device waits for it
    v > w      the device steps its chosen columns; the gradients of the others add up on the host

The windows of the host are the versions w + 1 to w + S, w + S + 1 to w + 2 S, ...; the last of a run may be shorter.
STEP_REST@v steps what the window that ends with v has added up. At that boundary the device takes in a host's result:

    settled        that of this window, which the device waits for
    not settled    that of the window before, made beside this window: none at the first boundary

So without settled boundaries the gradient of a step enters S to 2 S - 1 steps late. A boundary is settled where steps
do not overlap, before columns are chosen anew, and at the end of the run. LOAD:P@v brings what version v takes in.

Source: ZenFlow in DeepSpeed (runtime/zenflow), after a description of that code. Settled boundaries before a choice and
at the end are our choice: they lose no update that is under way.
"""

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple


class Policy(Enum):
    """The versions that are read. t: step of a microbatch; newest: the version its stage published last.

    | policy     | forward reads       | backward reads     | paper                              |
    | flush      | t                   | the same           | GPipe                              |
    | stash      | newest              | the same           | PipeDream                          |
    | vertical   | newest at stage 0   | the same           | PipeDream, vertical sync           |
    | 2bw        | t - 1               | the same           | PipeDream-2BW                      |
    | latest     | newest              | newest             | PipeMare                           |
    | predict    | newest (+ forecast) | newest             | PipeOptim, XPipe, SpecTrain        |
    | delayed    | t - 1               | the same           | ZeRO-Offload DPU, RoundPipe async, |
    |            |                     |                    | cyclic data parallelism (CDP-v1)   |
    | optimistic | t                   | the same           | zero-bubble post-validation        |
    | cyclic     | t if s + i >= S - 1, | the same          | cyclic data parallelism (CDP-v2),  |
    |            | t - 1 elsewhere     |                    | stage s of S on worker i           |
    | trial      | t - 1               | the same           | ACCO: every other step is a trial  |
    | selective  | t, the rest older   | the same           | ZenFlow (`LateRest`)               |

    The first microbatch of a step makes a forecast, and the other microbatches of that step share it.
    """

    FLUSH = "flush"
    STASH = "stash"
    VERTICAL = "vertical"
    TWO_BW = "2bw"
    LATEST = "latest"
    PREDICT = "predict"
    DELAYED = "delayed"
    OPTIMISTIC = "optimistic"
    CYCLIC = "cyclic"
    TRIAL = "trial"
    SELECTIVE = "selective"


# The version read is a function of the step alone: t minus this.
STEPS_BEHIND = {
    Policy.FLUSH: 0,
    Policy.OPTIMISTIC: 0,
    Policy.SELECTIVE: 0,
    Policy.TWO_BW: 1,
    Policy.DELAYED: 1,
    Policy.TRIAL: 1,
}
# A step begins when the one before has ended, and no update is late.
DRAINED = (Policy.FLUSH, Policy.OPTIMISTIC)
# The version read follows from microbatch and stage, so it is known before anything runs.
KNOWN = (*STEPS_BEHIND, Policy.CYCLIC)
# These policies are made for one step per microbatch; the others step once per `num_microbatches`.
ASYNCHRONOUS = frozenset({Policy.STASH, Policy.VERTICAL, Policy.LATEST, Policy.PREDICT})


def is_trial(policy: Policy, version: int) -> bool:
    """Whether the STEP to a version is a trial: its weights are read, but masters, moments and count stay.

    Under policy trial every odd version is one; the STEP to the next version starts where the trial started.
    """
    return policy is Policy.TRIAL and version % 2 == 1


def versions_averaged(policy: Policy, version: int) -> tuple[int, ...]:
    """The versions whose windows of microbatches a STEP averages: its own and, after a trial, the trial's."""
    return (version - 1, version) if policy is Policy.TRIAL and version % 2 == 0 else (version,)


def update_of(policy: Policy, version: int) -> int:
    """The update, counted from 1, that the STEP to a version makes or tries; learning rates depend on it."""
    return (version + 1) // 2 if policy is Policy.TRIAL else version


# --- policy selective ---

_MOST_STEPS = 10**6  # as many as a run may have


@dataclass(frozen=True)
class LateRest:
    """Which columns devices step at once, and when the host steps the others; ValueError for a value out of range."""

    topk: float  # the fraction of the columns that devices step, from 0 to 1
    update_interval: int = 1  # steps whose gradients of the other columns the host adds up before it steps them
    select_interval: int = 0  # steps between choices of columns, a multiple of `update_interval`; 0: one choice
    overlap: bool = True  # the host steps beside the next interval, and its result comes after that interval
    num_warmup_steps: int = 0  # first steps, which the host makes for all columns and devices wait for

    def __post_init__(self) -> None:
        if isinstance(self.topk, bool) or not isinstance(self.topk, int | float) or not 0 <= self.topk <= 1:
            raise ValueError(f"schedule.topk={self.topk}: the fraction of columns devices step, from 0 to 1; take 0.1")
        object.__setattr__(self, "topk", float(self.topk))
        _check_whole("update_interval", self.update_interval, 1, "steps that the host adds up before its own; take 4")
        _check_whole("select_interval", self.select_interval, 0, "steps between choices of columns; 0 for one choice")
        _check_whole("num_warmup_steps", self.num_warmup_steps, 0, "first steps that the host makes alone; take 0")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"schedule.overlap={self.overlap}: whether the host steps beside devices; true or false")
        if self.select_interval % self.update_interval:
            raise ValueError(
                f"schedule.select_interval={self.select_interval}: columns are chosen where the host has stepped, so "
                f"it must be a multiple of schedule.update_interval={self.update_interval}; take "
                f"{self.select_interval + -self.select_interval % self.update_interval}, or 0 to choose once"
            )

    @property
    def all_at_once(self) -> bool:
        """Whether devices step all columns after the warm-up."""
        return self.topk == 1

    @property
    def rest(self) -> Fraction:
        """The fraction of columns that the host steps."""
        return 1 - Fraction(str(self.topk))

    def chooses(self, version: int) -> bool:
        """Whether the gradient of the step to a version chooses columns; the first choice counts."""
        behind = version - 1 - self.num_warmup_steps
        if behind == 0:
            return True
        return behind > 0 and self.select_interval > 0 and not self.all_at_once and behind % self.select_interval == 0

    @classmethod
    def parse(cls, text_form: str) -> "LateRest":
        """The rule that `str` wrote."""
        try:
            topk, interval, select, overlap, warmup = text_form.split("/")
            numbers = float(topk), int(interval), int(select), overlap == "1", int(warmup)
        except ValueError:
            raise ValueError(f"late_rest={text_form:.40}: five numbers, such as 0.1/4/8/1/0") from None
        return cls(*numbers)

    def __str__(self) -> str:
        numbers = self.update_interval, self.select_interval, int(self.overlap), self.num_warmup_steps
        return "/".join(map(str, (self.topk, *numbers)))


def check_selective(policy: Policy, rule: LateRest | None) -> None:
    """Refuse a late rest without policy selective, and the policy without one, by a ValueError."""
    if (rule is None) != (policy is not Policy.SELECTIVE):
        raise ValueError(
            f"policy {policy.value} with late_rest={rule}: policy selective has a late rest, and no other; "
            "take both or neither"
        )


def _check_whole(name: str, value: object, least: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST_STEPS:
        rule = f"a whole number from {least}, at most {_MOST_STEPS:,}"
        raise ValueError(f"schedule.{name}={value!r:.40}: {rule}: {what}")


class Boundary(NamedTuple):
    """The end of a window."""

    version: int  # of the step that ends the window
    window: range  # the versions whose gradients the host has added up
    brings: int | None  # the version of the boundary whose result comes to the device here; None without one


def boundaries(rule: LateRest, num_steps: int) -> list[Boundary]:
    """All boundaries of a run. Those of the warm-up steps come first: each is settled and has a window of one step."""
    first = min(rule.num_warmup_steps, num_steps)
    found = [Boundary(version, range(version, version + 1), version) for version in range(1, first + 1)]
    if rule.all_at_once:
        return found
    begins = [*range(first, num_steps, rule.update_interval), num_steps]
    before: int | None = None
    for begin, end in pairwise(begins):
        settled = not rule.overlap or end == num_steps or rule.chooses(end + 1)
        found.append(Boundary(end, range(begin + 1, end + 1), end if settled else before))
        before = None if settled else end
    return found


def steps_late(rule: LateRest, num_steps: int) -> list[int]:
    """By step, from 0: the number of steps until the last part of its gradient is applied."""
    late = [0] * num_steps
    ends = boundaries(rule, num_steps)
    taken_in = [(end.brings, end.version) for end in ends if end.brings is not None]
    for end in ends:
        at = min(version for brings, version in taken_in if brings >= end.version)
        for version in end.window:
            late[version - 1] = at - version
    return late


def share_moved(rule: LateRest, version: int) -> Fraction:
    """The fraction of a stage's gradient that goes to the host in the step to a version."""
    return Fraction(1) if version <= rule.num_warmup_steps else rule.rest


def versions_stored(rule: LateRest, num_steps: int) -> range:
    """The versions for which gradients go to the host: all, or those of the warm-up."""
    return range(1, 1 + (min(rule.num_warmup_steps, num_steps) if rule.all_at_once else num_steps))
