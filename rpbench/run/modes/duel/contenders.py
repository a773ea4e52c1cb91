"""Contenders of a duel, and the reference of each.

- Duel of schedules: the reference is 1F1B.
- Torch duel: several engines run a schedule on the same partition and microbatches. Contenders are called
  `schedule/role`; the reference is torch's own schedule of that name.
- Duel on accelerators: the reference is our own engine, the others are other people's runtimes.

A reference runs under several names, so that each of them is a contender whose ratio should be 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpbench import registry

BASE = "1f1b"  # the reference
TWINS = ("1f1b_twin", "1f1b_twin_2", "1f1b_twin_3")  # the reference under other names
REFERENCES = (BASE, *TWINS)
LIMIT = "limit"
NUM_COPIES = 10  # of the base in an A/A duel, besides the references

OWN, TWIN, TABLE, THREADS = "own", "own_twin", "table", "threads"  # roles in a torch duel

ENGINES: Mapping[str, str] = {  # of a torch duel, by role
    OWN: "torch's schedule",
    TWIN: "torch's schedule",
    TABLE: "torch with our table",
    THREADS: "our threads",
}


@dataclass(frozen=True)
class Contender:
    name: str
    schedule: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dispatch: str = "round_robin"  # of the jobs of a streamed schedule to devices
    # `rpbench` is ours, `torch` is torch's on processes; `side by side` is ours without scheduling: each device runs
    # its part of the streamed plan that has the least work. Other duels have words of their own
    engine: str = "rpbench"
    plan_of: str = ""  # the contender whose plan it runs; if empty, its own is searched
    rounds: bool = False  # whether the number of microbatches a round is searched as well

    @property
    def role(self) -> str:
        """A key of `ENGINES` in a torch duel, else the name."""
        return self.name.rpartition("/")[2]

    @property
    def searches(self) -> bool:
        """Whether its plan is found by a search."""
        return not self.plan_of and self.engine != "side by side"

    def choices(self, num_microbatches: int) -> Sequence[Mapping[str, Any]]:
        """Options of the schedule that its search tries."""
        if not self.rounds:
            return ({},)
        halves = [num_microbatches >> shift for shift in range(num_microbatches.bit_length())]
        return [{"round_size": size} for size in dict.fromkeys(halves)]


def is_reference(name: str) -> bool:
    return name in REFERENCES or name.rpartition("/")[2] in (OWN, TWIN)


def groups(names: Iterable[str]) -> list[list[str]]:
    """Names that are compared with each other: all, or in a torch duel those of one schedule."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition("/")[0], []).append(name)
    return list(found.values())


_REFERENCES = (Contender(BASE, "1f1b"), *(Contender(name, "1f1b", plan_of=BASE) for name in TWINS))
_OTHERS = (
    *(Contender(name, name) for name in ("gpipe", "interleaved_1f1b", "looped_bfs", "pipedream_2bw", "vocab_parallel")),
    Contender("roundpipe", "roundpipe", rounds=True),
    Contender("roundpipe_async", "roundpipe", {"asynchronous": True}, rounds=True),
    Contender("roundpipe_dynamic", "roundpipe", dispatch="dynamic", rounds=True),
    Contender("torch_1f1b", "1f1b", engine="torch"),
    Contender(LIMIT, "roundpipe", engine="side by side"),
)


def contenders(who: str = "all") -> list[Contender]:
    """Contenders whose schedule is registered, references first.

    `who` is `all`, `twins` (an A/A duel: the base under many names), or names joined by `+`; ValueError otherwise.
    """
    return [contender for contender in (*_REFERENCES, *_others(who)) if contender.schedule in registry.entries()]


def _others(who: str) -> tuple[Contender, ...]:
    if who == "twins":
        return tuple(Contender(f"1f1b_copy_{number}", "1f1b", plan_of=BASE) for number in range(1, NUM_COPIES + 1))
    names = [each.name for each in _OTHERS]
    asked = names if who == "all" else who.split("+")
    for name in asked:
        if name not in names:
            raise ValueError(f"mode.contenders={who}: all, twins, or some of {'+'.join(names)}; {name} is none of them")
    return tuple(each for each in _OTHERS if each.name in asked)


def gpu_contenders(schedule: str) -> list[Contender]:
    return [
        Contender(OWN, schedule),
        Contender(TWIN, schedule, plan_of=OWN),
        Contender("fsdp2", "zero_3", engine="FSDP2"),
        Contender("zero_offload", "zero_offload", engine="DeepSpeed"),
        Contender("released", "roundpipe", engine="RoundPipe"),
    ]


def torch_contenders(schedules: Sequence[str]) -> list[Contender]:
    return [
        Contender(f"{schedule}/{role}", schedule, engine=engine)
        for schedule in schedules
        for role, engine in ENGINES.items()
    ]
