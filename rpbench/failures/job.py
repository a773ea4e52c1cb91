"""Job: what every policy knows of a run - its ranks, the seconds of a step, the bytes of a rank's state, the paces."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite


@dataclass(frozen=True)
class Job:
    """A pipeline schedule on one or more pipelines that share the microbatches of a step.

    Args:
        num_stages: ranks of a pipeline (p in papers), each with stages of its own.
        num_pipelines: replicas of it (d).
        num_microbatches: of a step, of each pipeline (m).
        step_s: seconds of a step without failures, and without what a policy adds.
        begun_s: for each microbatch, when its first forward begins.
        state_bytes: weights and optimizer state of each rank of a pipeline; zeros where the model has no shape.
        detect_s: from a failure until it is known.
        restart_s: until processes stand again, on new machines where ranks are replaced.
        store_bytes_per_s: of the persistent store, for all ranks together; None: without limit. So are the others.
        net_bytes_per_s: between the hosts of two ranks, one way.
        host_bytes_per_s: between a device and the memory of its host.

    Raises:
        ValueError: for a time or a pace that cannot be.
    """

    num_stages: int
    num_pipelines: int
    num_microbatches: int
    step_s: float
    begun_s: tuple[float, ...]
    state_bytes: tuple[int, ...]
    detect_s: float = 0.0
    restart_s: float = 0.0
    store_bytes_per_s: float | None = None
    net_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("detect_s", "restart_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: seconds, 0 or more")
        for name in ("store_bytes_per_s", "net_bytes_per_s", "host_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ValueError(f"{name}={value}: bytes a second above 0, or null for no limit")

    @property
    def num_ranks(self) -> int:
        """Of all pipelines."""
        return self.num_stages * self.num_pipelines

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(range(self.num_ranks))

    @property
    def all_state_bytes(self) -> int:
        """The state of all ranks."""
        return self.num_pipelines * sum(self.state_bytes)

    def place(self, rank: int) -> tuple[int, int]:
        """Pipeline and stage rank of a rank."""
        return divmod(rank, self.num_stages)

    def bytes_of(self, ranks: Iterable[int]) -> int:
        """The state of some ranks."""
        return sum(self.state_bytes[rank % self.num_stages] for rank in ranks)

    def begun(self, into_s: float) -> int:
        """Microbatches, of all pipelines, of which something has run so far into a step."""
        return self.num_pipelines * sum(start < into_s for start in self.begun_s)

    def again(self, lost_steps: int, into_s: float) -> int:
        """Microbatches to do again: those of lost steps, and those that have begun of the step that was running."""
        return lost_steps * self.num_microbatches * self.num_pipelines + self.begun(into_s)


def seconds(num_bytes: float, bytes_per_s: float | None) -> float:
    """How long some bytes take; nothing where their pace has no limit."""
    return num_bytes / bytes_per_s if bytes_per_s else 0.0
