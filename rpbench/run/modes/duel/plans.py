"""Plans: what the contenders of a duel run, as a file that another duel can be given.

Layer times are profiled once, plans are searched once, a run-off chooses between near ones, and every start runs
these. A duel that is repeated elsewhere may be given the file (`mode.plans`), so that both compare the same plans.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rpbench.config.choices import ConfigError, Duel
from rpbench.config.files.source_file import read_source
from rpbench.config.request import Request
from rpbench.cost.profiled import from_text, to_text
from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import parse
from rpbench.plan.whole import WholePlan, evaluate_whole
from rpbench.run.modes.duel.contenders import Contender
from rpbench.run.modes.duel.run_off import Raced
from rpbench.run.modes.duel.tuning import problem_of, shortlists
from rpbench.strict_json import parsed

SCHEMA = "rpbench-duel-plans 1"


def make_plans(request: Request, entrants: Sequence[Contender]) -> tuple[LayerTimes, dict[str, list[WholePlan]]]:
    """The layer times, and the plans of every contender that has its own: the best few searched, or the one read.

    Raises:
        ConfigError: if the file of plans is none, or not of these contenders.
        ValueError: if a schedule cannot be built for these sizes.
    """
    mode = request.mode
    assert isinstance(mode, Duel)
    if mode.plans is not None:
        return _read(request, entrants, mode.plans)
    times = problem_of(request, entrants[0]).times
    keeps_last = mode.recompute == "except_last"
    return times, shortlists(request, entrants, mode.search_budget, keeps_last=keeps_last)


def plans_text(times: LayerTimes, plans: Mapping[str, WholePlan], raced: Mapping[str, Sequence[Raced]]) -> str:
    """The file: the profile, each contender's partition and options, and what the run-off chose from."""
    found = {
        name: {
            **_named(plan),
            "num_evaluated": plan.num_evaluated,
            "keeps_last": plan.keeps_last,
            "run_off": [
                _named(each.plan)
                | {
                    "simulated_makespan_s": each.plan.makespan,
                    "speed": each.speed,
                    "error": each.error if each.speed is not None else None,
                    "num_comparisons": each.num_comparisons,
                }
                for each in raced.get(name, ())
            ],
        }
        for name, plan in plans.items()
    }
    return json.dumps({"schema": SCHEMA, "profile": json.loads(to_text(times)), "plans": found}, indent=1) + "\n"


def _named(plan: WholePlan) -> dict[str, Any]:
    return {"partition": str(plan.schedule.partition), "options": dict(plan.options)}


def _read(request: Request, entrants: Sequence[Contender], path: str) -> tuple[LayerTimes, dict[str, list[WholePlan]]]:
    source = read_source("mode.plans", path)
    assert source is not None
    try:
        found = parsed(source.text)
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        times = from_text(json.dumps(found["profile"]))
        plans = {each.name: [_made(request, each, times, found["plans"])] for each in entrants if each.searches}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"mode.plans={path}: {error}; give the plans.json of a duel with the same sizes") from None
    return times, plans


def _made(request: Request, entrant: Contender, times: LayerTimes, found: Mapping[str, Any]) -> WholePlan:
    own = found[entrant.name]
    unmeasured = replace(request, cost=replace(request.cost, name="constant"))  # whose times are then put in
    problem = replace(problem_of(unmeasured, entrant, keeps_last=own["keeps_last"]), times=times)
    plan = evaluate_whole(problem, parse(own["partition"]), entrant.dispatch, own["options"])
    return replace(plan, num_evaluated=own["num_evaluated"])
