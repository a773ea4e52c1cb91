"""The torch duel: our threads, torch's runtime with our table, and torch's own schedule of the same name, in turn.

It is the duel (`rpbench.run.modes.duel`) with other contenders, compared schedule by schedule, on given partitions,
without optimizer and recomputation.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from rpbench import registry
from rpbench.config.choices import ConfigError, TorchDuel
from rpbench.config.request import Request
from rpbench.cost.table import CostTable
from rpbench.engine.backends.threads import CpuBackend, one_thread, usable_cores
from rpbench.records.record import Record
from rpbench.run.assemble import Assembled
from rpbench.run.modes.duel.contenders import THREADS, Contender, is_reference, torch_contenders
from rpbench.run.modes.duel.findings import derived_fields
from rpbench.run.modes.duel.run import Fields, found_or_made, play_all, write_all
from rpbench.run.modes.duel.starts import job_of
from rpbench.run.modes.duel.teams import RankTeam, Team, ThreadTeam
from rpbench.run.modes.duel.verdict import Started, timed_fields
from rpbench.run.scheduled import assembled_of
from rpbench.torch_runtime.processes.ranks import Ranks
from rpbench.torch_runtime.request import SAME_NAME, TorchRequest, make_request


def torch_teams(
    requests: Mapping[str, TorchRequest],
    costs: Mapping[str, CostTable],
    stall_s: float,
    entrants: Sequence[Contender],
    stack: ExitStack,
) -> Iterator[tuple[str, Team]]:
    """Contenders on threads, and on ranks that each hold all of the others; these end after `stall_s` without progress.

    `requests` are by contender; `costs`, by schedule, order the programs of our engine.
    """
    cores, num_ranks = usable_cores(), next(iter(requests.values())).num_ranks
    backend, ranks = stack.enter_context(CpuBackend(cores)), stack.enter_context(Ranks(num_ranks, stall_s))
    for entrant in entrants:
        request = requests[entrant.name]
        if entrant.role == THREADS:
            yield entrant.name, ThreadTeam(request, costs[entrant.schedule], backend)
        else:
            yield entrant.name, RankTeam(entrant.name, request, ranks, cores)


def records(request: Request) -> list[Record]:
    entrants = torch_contenders(request.mode_as(TorchDuel).schedules)
    return found_or_made(request, entrants, lambda ids: _made(request, entrants, ids))


def _made(request: Request, entrants: Sequence[Contender], ids: Mapping[str, str]) -> list[Record]:
    mode = request.mode_as(TorchDuel)
    _check(mode.schedules)
    with one_thread():
        cuts = {name: assembled_of(_of_schedule(request, name)) for name in mode.schedules}
    requests = {each.name: _asked(request, each, cuts[each.schedule]) for each in entrants}
    teams = partial(torch_teams, requests, {name: cut.costs for name, cut in cuts.items()}, mode.stall_s)

    def timed(fit: Sequence[str], starts: Sequence[Started]) -> dict[str, Fields]:
        return {name: timed_fields(name, starts, num_steps=1) for name in fit}

    job = job_of(request, "torch duel", entrants, teams)
    rows = play_all(request, job, ids, lambda each: _opening(request, each, cuts[each.schedule]), timed)
    return write_all(request, rows, derived_fields({row["contender"]: row for row in rows}))


def _check(schedules: Sequence[str]) -> None:
    """Refuse schedules that torch itself does not have."""
    unknown = [name for name in schedules if name not in SAME_NAME]
    if unknown or not schedules:
        raise ConfigError(
            f"mode.schedules={','.join(unknown or schedules)}: torch has {', '.join(SAME_NAME)} of its own; take some "
            "of these"
        )


def _of_schedule(request: Request, name: str) -> Request:
    entry = registry.entry(name)
    schedule = replace(request.schedule, chosen=name, entry=entry, options=entry.options)
    return replace(request, schedule=schedule, num_steps=1, recompute="none")


def _asked(request: Request, entrant: Contender, cut: Assembled) -> TorchRequest:
    return make_request(
        cut.schedule,
        request.given_model,
        microbatch_sequences=request.workload.microbatch_sequences,
        seed=request.seed,
        dtype=request.dtype,
        optimizer=None,
        order_of=SAME_NAME[entrant.schedule] if is_reference(entrant.name) else "table",
    )


def _opening(request: Request, entrant: Contender, cut: Assembled) -> Fields:
    return {
        "schedule": entrant.schedule,
        "generator": entrant.schedule,
        "role": entrant.role,
        "partition_layers": str(cut.schedule.partition),
        "num_stages": cut.schedule.shape.num_stages,
        "num_actions": cut.schedule.num_actions,
        "optimizer": request.optimizer.name,
    }
