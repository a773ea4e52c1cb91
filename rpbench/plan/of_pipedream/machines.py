"""Machines: in which levels they stand, how fast their links are, and what a pipeline may do with them."""

import math
from dataclasses import dataclass
from typing import Any

# The time grows with their square, to a minute for 200 layers.
MOST_MACHINES = 256


@dataclass(frozen=True)
class Network:
    """Machines in levels, the innermost first, e.g. (4, 4): hosts of 4 devices, 4 hosts.

    Args:
        machines_per_level: of each group of the level.
        bandwidth_bytes_per_s: of each machine's link in each level.

    Raises:
        ValueError: if a number is not positive, a level too large, or the two have different lengths.
    """

    machines_per_level: tuple[int, ...]
    bandwidth_bytes_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        machines, links = self.machines_per_level, self.bandwidth_bytes_per_s
        if not machines or any(count < 1 for count in machines):
            raise ValueError(f"machines_per_level={list(machines)}: every level has at least 1 machine")
        if max(machines) > MOST_MACHINES:
            raise ValueError(
                f"{max(machines)} machines in one level: every share of at most {MOST_MACHINES} is tried; "
                "give machines_per_level, such as machines_per_level=[8,64] for 512"
            )
        if len(machines) != len(links):
            raise ValueError(
                f"machines_per_level has {len(machines)} levels, bandwidth_bytes_per_s has {len(links)}: "
                "give one bandwidth for each level, the innermost first"
            )
        if not all(math.isfinite(link) and link > 0 for link in links):
            raise ValueError(f"bandwidth_bytes_per_s={list(links)}: every bandwidth is finite and above 0")

    @property
    def num_machines(self) -> int:
        return math.prod(self.machines_per_level)


@dataclass(frozen=True)
class Rules:
    """What counts and what is allowed.

    Args:
        count_p2p: transfers between stages enter the maximum.
        straight: no stage is replicated.
        use_fewer_machines: machines may stay idle where that is faster.
        memory_bytes: of a machine. A stage needs its activations and parameters once for every minibatch that is
            under way in it: (machines from the stage on) / (its own), rounded up, within its level. None: no limit.
    """

    count_p2p: bool = False
    straight: bool = False
    use_fewer_machines: bool = False
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ValueError(f"memory_bytes={self.memory_bytes:g}: a machine has some; leave it out for no limit")


def all_reduce_s(parameter_bytes: Any, num: int, bandwidth: float) -> Any:
    """Seconds in which `num` machines add up the gradients of some parameters; floats or arrays of them."""
    return 4 * (num - 1) * parameter_bytes / (bandwidth * num)
