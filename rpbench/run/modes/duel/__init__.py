"""The duel: every contender in real time on this machine, in turn, on the same work."""

from rpbench.config.request import Request
from rpbench.records.record import Record


def records(request: Request) -> list[Record]:
    from rpbench.run.modes.duel.run import records  # torch, which readers of records do not need

    return records(request)
