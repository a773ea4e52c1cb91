"""mode=failures: what ranks that die cost a run, simulated or with processes that are killed."""

from rpbench.config.choices import ConfigError, Failures
from rpbench.config.request import Request
from rpbench.records.record import Record
from rpbench.run.modes.failures.jobs import prepare
from rpbench.run.recording import recorded


def records(request: Request) -> list[Record]:
    if request.mode_as(Failures).run == "simulated":
        return [recorded(request, prepare)]
    if request.model is None:
        raise ConfigError("mode.run=processes trains tensors, which model=abstract does not have; take model=tiny_gpt")
    from rpbench.run.modes.failures.processes import prepare as prepare_processes  # torch

    return [recorded(request, prepare_processes)]
