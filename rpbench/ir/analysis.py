"""Analysis: what checks, costs, simulator and engine need to know of a schedule, each computed once, on first use."""

from functools import cached_property

from rpbench.ir.action import Kind
from rpbench.ir.checks.deadlock import execution_rounds, slots_of
from rpbench.ir.checks.residency import hosted_levels, resident_levels
from rpbench.ir.checks.versions import Versions, implied_versions, replay_in
from rpbench.ir.index import Index
from rpbench.ir.moved_objects import Payload, carries, payloads_of
from rpbench.ir.schedule import Schedule
from rpbench.ir.waits.moves import Moves, all_producers, has_transfers
from rpbench.ir.waits.visits import Visit, visits_of


class Analysis:
    """A schedule and what follows from it; pass this on instead of computing any of it again.

    On first use they raise ScheduleError: `index` for indices out of range or an action that stands twice, `moves` for
    transfers that match nothing, `rounds` if no rank can move, `versions` for a version that is not out.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    @cached_property
    def index(self) -> Index:
        """Its actions by number."""
        return Index(self.schedule)

    @cached_property
    def visits(self) -> list[list[Visit]]:
        """The visits of every device."""
        return visits_of(self.index)

    @cached_property
    def moves(self) -> Moves:
        """Its transfers, matched with the visits they serve."""
        return Moves(self.index, lambda: self.visits)

    @cached_property
    def transfer_edges(self) -> list[tuple[int, int]]:
        """(producer, consumer) of every dependency that transfers add; none for a schedule without."""
        return self.moves.edges if has_transfers(self.schedule) else []

    @cached_property
    def producers(self) -> list[tuple[int, ...]]:
        """For each action those it waits for, transfers included, without those that its lane puts before it anyway."""
        return all_producers(self.index, self.transfer_edges)

    @cached_property
    def rounds(self) -> list[int]:
        """For each action the round in which it can run (`rpbench.ir.checks.deadlock`)."""
        return execution_rounds(self.index, self.producers)

    @cached_property
    def slots(self) -> tuple[list[int], list[int]]:
        """The slots in which each action begins and ends, if computations take one slot (`slots_of`)."""
        return slots_of(self.index, self.producers)

    @cached_property
    def resident_levels(self) -> list[set[tuple[int, ...]]]:
        """Per device, how many microbatches of each stage it holds (`rpbench.ir.checks.residency`)."""
        return resident_levels(self.index, *self.slots)

    @cached_property
    def hosted_levels(self) -> list[set[tuple[int, ...]]]:
        """Per device, how many microbatches of each stage it has on the host (`rpbench.ir.checks.residency`)."""
        return hosted_levels(self.index, *self.slots)

    @cached_property
    def versions(self) -> Versions:
        """The weight versions that its actions read (`rpbench.ir.checks.versions`).

        Without STEP actions nothing is published and one version is kept; the version read follows from the policy's
        table if that is a function of the step, and is 0 otherwise.
        """
        return replay_in(self.index, self.rounds) if self.has_steps else implied_versions(self.schedule)

    @property
    def has_steps(self) -> bool:
        """Whether weights change."""
        return Kind.STEP in self.schedule.kinds

    @cached_property
    def payload(self) -> dict[int, Payload]:
        """The objects that actions move over links, by number of the action."""
        if not carries(self.schedule):
            return {}
        return payloads_of(self.schedule, self.moves if has_transfers(self.schedule) else None)


def analysed(schedule: Schedule | Analysis) -> Analysis:
    """The analysis of a schedule; an analysis is returned as it is."""
    return schedule if isinstance(schedule, Analysis) else Analysis(schedule)


def peak_resident(analysis: Analysis) -> list[int]:
    """The most stage activations each device holds at once, its partners' included; ScheduleError if it cannot run."""
    return [max(map(sum, levels)) for levels in analysis.resident_levels]
