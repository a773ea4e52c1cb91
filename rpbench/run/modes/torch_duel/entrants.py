"""Entrants: who runs a schedule, on the same cut and the same microbatches.

torch's own schedule is the reference, and is there twice: the second is one more entrant that should come out at 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Engine = Literal["torch's schedule", "torch with our table", "our threads"]

OWN, TWIN, TABLE, THREADS = "own", "own_twin", "table", "threads"
REFERENCES = (OWN, TWIN)
ENGINES: Mapping[str, Engine] = {
    OWN: "torch's schedule",
    TWIN: "torch's schedule",
    TABLE: "torch with our table",
    THREADS: "our threads",
}


@dataclass(frozen=True)
class Entrant:
    """One of those that run a schedule.

    Args:
        schedule: registered name.
        role: a key of `ENGINES`.
    """

    schedule: str
    role: str

    @property
    def name(self) -> str:
        """Unique in a duel: the contender of its record."""
        return f"{self.schedule}/{self.role}"

    @property
    def engine(self) -> Engine:
        return ENGINES[self.role]

    @property
    def is_reference(self) -> bool:
        return self.role in REFERENCES


def entrants(schedules: Sequence[str]) -> list[Entrant]:
    """Everybody, schedule by schedule."""
    return [Entrant(schedule, role) for schedule in schedules for role in ENGINES]
