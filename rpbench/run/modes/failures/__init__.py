"""mode=failures: ranks that die in a run, simulated or as processes that are killed, and what that costs."""

from rpbench.harness.choices import ConfigError, Failures
from rpbench.harness.modes.failures.simulated import prepare
from rpbench.harness.record import Record
from rpbench.harness.recording import recorded
from rpbench.harness.request import Request


def records(request: Request) -> list[Record]:
    """The record of a run with failures.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    assert isinstance(request.mode, Failures)
    if request.mode.run == "simulated":
        return [recorded(request, prepare)]
    if request.model is None:
        raise ConfigError("mode.run=processes trains tensors, which model=abstract does not have; take model=tiny_gpt")
    from rpbench.harness.modes.failures.processes import prepare as prepare_processes  # torch

    return [recorded(request, prepare_processes)]
