"""The duel: every contender in real time on this machine, in turn, on the same work."""

from rpbench.config.request import Request
from rpbench.records.record import Record


def records(request: Request) -> list[Record]:
    """As of `rpbench.run.modes.duel.run`, imported late: it needs torch, and readers of records do not."""
    from rpbench.run.modes.duel.run import records

    return records(request)
