"""The duel: every contender in real time on this machine, in turn, on the same work."""

from rpbench.harness.record import Record
from rpbench.harness.request import Request


def records(request: Request) -> list[Record]:
    """As of `rpbench.harness.modes.duel.run`, which needs torch; whoever reads records does not.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    from rpbench.harness.modes.duel.run import records

    return records(request)
