"""Jobs: what a streamed pipeline runs where, and the words that its tasks are described in."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rpbench.ir.partition import Partition
from rpbench.sim.shared_links import Tasks

What = Literal["F", "R", "B", "FB", "boundary", "weights", "gradients", "refresh", "convert", "adam"]


class Slot(NamedTuple):
    """What a task does: its kind, of which stage, and of which variant.

    Args:
        stage: forward stages for F, weights of a forward and refresh; backward stages otherwise.
        short: of the last microbatch of a call, which may be shorter.
        routed: the experts of F or R, behind what they wait for.
        backward: weights for a backward job; `again`: gradients of an earlier call come with them.
        pieces: that weights come in.
        group: of the link, one way through one root complex.
    """

    what: What
    stage: int = 0
    short: bool = False
    routed: bool = False
    backward: bool = False
    again: bool = False
    pieces: int = 1
    group: int = 0


@dataclass(frozen=True)
class Jobs:
    """The jobs of a run: what identifies its lanes.

    Args:
        plan: stages; with `plan.fused` the top backward stage runs forward and backward in one visit.
        calls: of one step; every call runs all stages for `microbatches` microbatches.
        routed: layers have experts: a forward knows its tokens' experts, and goes on, when its attention has ended.
        bound: stages stay on the device of their number modulo the devices; else jobs go round over all calls.
        devices_per_complex: devices on one root complex; 0 where complexes hold nobody back.
    """

    plan: Partition
    num_devices: int
    microbatches: int
    calls: int
    steps: int
    asynchronous: bool
    routed: bool = False
    bound: bool = False
    devices_per_complex: int = 0

    def group(self, device: int, *, down: bool) -> int:
        """The copies that a device's copies share a root complex with, one way."""
        return 2 * (device // self.devices_per_complex) + down if self.devices_per_complex else 0

    @property
    def visits(self) -> int:
        """Of stages to devices, in one step."""
        return self.calls * (len(self.plan.forward) + len(self.plan.backward))


@dataclass
class Lanes:
    """The tasks of a run.

    Attributes:
        slots: what the numbers in `tasks.slot` stand for.
        num_devices: that run them.
        computing: what the devices compute in each step; the last of it ends the step.
        host_ends: the last task of the host's lane in each step.
    """

    tasks: Tasks
    slots: tuple[Slot, ...]
    num_devices: int
    computing: list[list[int]]
    host_ends: list[int]
