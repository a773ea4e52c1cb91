"""The torch duel: our threads, torch's runtime with our table, and torch's own schedule of the same name, in turn."""

from rpbench.config.request import Request
from rpbench.records.record import Record


def records(request: Request) -> list[Record]:
    """As of `rpbench.run.modes.torch_duel.run`, which needs torch; whoever reads records does not.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    from rpbench.run.modes.torch_duel.run import records

    return records(request)
