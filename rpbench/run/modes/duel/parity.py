"""Parity: who trains as plain training does may take part."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from baselines.systems.ranks import RankFailed
from rpbench.engine.executor import ActionFailed
from rpbench.run.modes.duel.start import Job, make_teams
from rpbench.run.modes.duel.team import Parity, Team
from rpbench.run.training.tensors import one_thread


def check_parity(job: Job, sequence_tokens: int) -> dict[str, Parity]:
    """Every contender's distance from plain training on short sequences, and why it may not enter, if it may not.

    A plan that several run is compared once for each of them.
    """
    found: dict[str, Parity] = {}
    with one_thread(), ExitStack() as stack:
        for name, team in make_teams(job, stack):
            found[name] = _parity(team, sequence_tokens) | {"parity_seq_len": sequence_tokens}
            if found[name]["parity"]:
                far = max(found[name]["grad_max_abs_diff"], found[name]["weight_max_abs_diff"])
                print(f"duel {job.model.name}: {name} within {far:g} of plain training", file=sys.stderr, flush=True)
    return found


def _parity(team: Team, sequence_tokens: int) -> Parity:
    try:
        found = team.check(sequence_tokens)
    except (ActionFailed, RankFailed, ValueError, RuntimeError) as error:
        return {"parity": False, "reason": f"{type(error).__name__}: {error}"}
    far = max(found["grad_max_abs_diff"], found["weight_max_abs_diff"])
    sound = far <= team.tolerance and found.get("versions_as_reference", True)
    reason = None if sound else f"it does not train as plain training does: off by {far:g}"
    return found | {"parity": sound, "reason": reason}


def without(job: Job, parities: Mapping[str, Parity]) -> Job:
    """The job of those that may take part."""
    return replace(job, entrants=tuple(entrant for entrant in job.entrants if parities[entrant.name]["parity"]))
