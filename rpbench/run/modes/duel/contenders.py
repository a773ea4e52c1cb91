"""Contenders of a duel, and the reference of each.

In the duel of schedules all are compared with 1F1B. In the torch duel a schedule is run by several, on the same cut
and the same microbatches; they are called `schedule/role` and compared with torch's own schedule of that name. A
reference runs under several names, so that each of them is a contender that should come out at 1. On
accelerators that is our own engine, and the others are other people's runtimes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rpbench import registry

BASE = "1f1b"  # what the others are compared with
TWINS = ("1f1b_twin", "1f1b_twin_2", "1f1b_twin_3")  # the same under other names
REFERENCES = (BASE, *TWINS)
LIMIT = "limit"
NUM_COPIES = 10  # of the base in an A/A duel, besides the references

OWN, TWIN, TABLE, THREADS = "own", "own_twin", "table", "threads"  # roles in a torch duel

Engine = Literal[
    "rpbench",
    "torch",
    "side by side",
    "torch's schedule",
    "torch with our table",
    "our threads",
    "FSDP2",
    "DeepSpeed",
    "RoundPipe",
]
ENGINES: Mapping[str, Engine] = {
    OWN: "torch's schedule",
    TWIN: "torch's schedule",
    TABLE: "torch with our table",
    THREADS: "our threads",
}


@dataclass(frozen=True)
class Contender:
    """A contender.

    Args:
        dispatch: how the jobs of a streamed schedule find their devices.
        engine: ours; torch's, on processes; ours without any scheduling, every device for itself, on the work of the
            streamed plan that has least; or one of `ENGINES`.
        plan_of: the contender whose plan is taken; its own is searched where this is empty.
        rounds: whether the number of microbatches a round is searched as well.
    """

    name: str
    schedule: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dispatch: str = "round_robin"
    engine: Engine = "rpbench"
    plan_of: str = ""
    rounds: bool = False

    @property
    def role(self) -> str:
        """A key of `ENGINES` in a torch duel, else the name."""
        return self.name.rpartition("/")[2]

    @property
    def searches(self) -> bool:
        """Whether a search of its own finds its plan."""
        return not self.plan_of and self.engine != "side by side"

    def choices(self, num_microbatches: int) -> Sequence[Mapping[str, Any]]:
        """Options of the schedule among which its search chooses."""
        if not self.rounds:
            return ({},)
        halves = [num_microbatches >> shift for shift in range(num_microbatches.bit_length())]
        return [{"round_size": size} for size in dict.fromkeys(halves)]


def is_reference(name: str) -> bool:
    return name in REFERENCES or name.rpartition("/")[2] in (OWN, TWIN)


def groups(names: Iterable[str]) -> list[list[str]]:
    """Groups of names that are compared with each other: all, or in a torch duel those of one schedule."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition("/")[0], []).append(name)
    return list(found.values())


_REFERENCES = (Contender(BASE, "1f1b"), *(Contender(name, "1f1b", plan_of=BASE) for name in TWINS))
_OTHERS = (
    Contender("gpipe", "gpipe"),
    Contender("interleaved_1f1b", "interleaved_1f1b"),
    Contender("looped_bfs", "looped_bfs"),
    Contender("pipedream_2bw", "pipedream_2bw"),
    Contender("vocab_parallel", "vocab_parallel"),
    Contender("roundpipe", "roundpipe", rounds=True),
    Contender("roundpipe_async", "roundpipe", {"asynchronous": True}, rounds=True),
    Contender("roundpipe_dynamic", "roundpipe", dispatch="dynamic", rounds=True),
    Contender("torch_1f1b", "1f1b", engine="torch"),
    Contender(LIMIT, "roundpipe", engine="side by side"),
)


def contenders(who: str = "all") -> list[Contender]:
    """Contenders whose schedule is registered, references first; for an A/A duel (`twins`) the base under many names.

    `who` is `all`, `twins`, or others' names with `+` between them; raises ValueError for a name that is none of these.
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
    """Contenders of a duel on accelerators: a schedule of ours twice, and other runtimes, by their methods' names."""
    return [
        Contender(OWN, schedule),
        Contender(TWIN, schedule, plan_of=OWN),
        Contender("fsdp2", "zero_3", engine="FSDP2"),
        Contender("zero_offload", "zero_offload", engine="DeepSpeed"),
        Contender("released", "roundpipe", engine="RoundPipe"),
    ]


def torch_contenders(schedules: Sequence[str]) -> list[Contender]:
    """Contenders of a torch duel, schedule by schedule."""
    return [
        Contender(f"{schedule}/{role}", schedule, engine=engine)
        for schedule in schedules
        for role, engine in ENGINES.items()
    ]
