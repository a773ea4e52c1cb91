"""The duel: every contender in real time on this machine, in turn, on the same work."""

from rpbench.config.request import Request
from rpbench.records.record import Record


def records(request: Request) -> list[Record]:
    """As of `rpbench.run.modes.duel.run`, which needs torch; whoever reads records does not."""
    from rpbench.run.modes.duel.run import records

    return records(request)
