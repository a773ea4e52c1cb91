"""Verdict: what the messages of a table come to, with the smallest cycle of ranks that wait for each other.

alive       every rank comes to its end, every receive gets the tensor it is named for
unmatched   every rank comes to its end, and a message has one end only, which the next step will meet
mixed       every rank comes to its end, and a receive gets another tensor, without an error
broken      a rank comes to an action at which torch's runtime raises
dead        a rank waits for good
"""

from dataclasses import asdict, dataclass
from typing import Any

from rpbench.torch_runtime.communication.channels import End, Queues, find_messages, meant, token_at
from rpbench.torch_runtime.communication.cycle import Waiting, smallest_cycle, waiting
from rpbench.torch_runtime.communication.execution import Durations, Execution, execute
from rpbench.torch_runtime.communication.tokens import Table


@dataclass(frozen=True)
class Verdict:
    """What a table comes to with one kind of queue.

    Args:
        cycle: the ranks that wait for each other, where it is dead; else what is wrong, if anything.
    """

    queues: str
    grouped: bool
    verdict: str
    cycle: tuple[Waiting, ...]
    execution: Execution

    def fields(self) -> dict[str, Any]:
        """What a program reads of it."""
        return {
            "channels": self.queues,
            "grouped": self.grouped,
            "verdict": self.verdict,
            "cycle": [asdict(each) for each in self.cycle],
        }


def judge(table: Table, queues: Queues, *, grouped: bool = False, durations: Durations | None = None) -> Verdict:
    """What the messages of a table come to."""
    execution = execute(table, find_messages(table, queues, grouped=grouped), durations)
    name, cycle = _judged(execution)
    return Verdict(queues.value, grouped, name, cycle, execution)


def _judged(execution: Execution) -> tuple[str, tuple[Waiting, ...]]:
    table, messages = execution.table, execution.messages
    if execution.broken is not None:
        rank, place = execution.broken
        return "broken", (waiting(table, End(rank, place), execution.faults[rank, place]),)
    if not all(execution.finished):
        return "dead", smallest_cycle(execution)
    for message in messages.all:
        assert message.receive is not None  # every receive stands before the computation that waits for it,
        assert message.send is not None  # and every send is waited for: at its WAIT, or at the end
        if not meant(table, message):
            why = f"it gets what {token_at(table, message.send)} of rank {message.source} sends"
            return "mixed", (waiting(table, message.receive, why),)
    return "alive", ()
