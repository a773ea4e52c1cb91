"""The torch duel: our threads, torch's runtime with our table, and torch's own schedule of the same name, in turn."""

from rpbench.harness.record import Record
from rpbench.harness.request import Request


def records(request: Request) -> list[Record]:
    """As of `rpbench.harness.modes.torch_duel.run`, which needs torch; whoever reads records does not.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    from rpbench.harness.modes.torch_duel.run import records

    return records(request)
