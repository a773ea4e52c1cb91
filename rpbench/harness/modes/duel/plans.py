"""Plans: what the contenders of a duel run, as a file that another duel can be given.

Layer times are profiled once, plans are searched once, and every start runs these. A duel that is repeated elsewhere
may be given the file (`mode.plans`), so that both compare the same plans.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rpbench.cost.profiled import from_text, to_text
from rpbench.cost.table import LayerTimes
from rpbench.harness.choices import ConfigError, Duel
from rpbench.harness.modes.duel.contenders import Contender
from rpbench.harness.modes.duel.tuning import problem_of, tuned, unscheduled
from rpbench.harness.request import Request
from rpbench.harness.source_file import read_source
from rpbench.ir.check import check
from rpbench.ir.partition import parse
from rpbench.plan.whole import WholePlan, evaluate_whole
from rpbench.strict_json import parsed

SCHEMA = "rpbench-duel-plans 1"

Plans = dict[str, WholePlan]


def make_plans(request: Request, entrants: Sequence[Contender]) -> tuple[LayerTimes, Plans]:
    """The layer times and the plan of every contender, searched or read.

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
    return times, tuned(request, list(entrants), mode.search_budget, keeps_last=keeps_last)


def plans_text(times: LayerTimes, plans: Mapping[str, WholePlan]) -> str:
    """The file: the profile, and each contender's partition and options."""
    found = {
        name: {
            "partition": str(plan.schedule.partition),
            "options": dict(plan.options),
            "num_evaluated": plan.num_evaluated,
            "keeps_last": plan.keeps_last,
        }
        for name, plan in plans.items()
    }
    return json.dumps({"schema": SCHEMA, "profile": json.loads(to_text(times)), "plans": found}, indent=1) + "\n"


def _read(request: Request, entrants: Sequence[Contender], path: str) -> tuple[LayerTimes, Plans]:
    source = read_source("mode.plans", path)
    assert source is not None
    try:
        found = parsed(source.text)
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        times = from_text(json.dumps(found["profile"]))
        plans = {entrant.name: _made(request, entrant, times, found["plans"]) for entrant in entrants}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"mode.plans={path}: {error}; give the plans.json of a duel with the same sizes") from None
    return times, plans


def _made(request: Request, entrant: Contender, times: LayerTimes, found: Mapping[str, Any]) -> WholePlan:
    own = found[entrant.plan_of or entrant.name]
    unmeasured = replace(request, cost=replace(request.cost, name="constant"))  # whose times are then put in
    problem = replace(problem_of(unmeasured, entrant, keeps_last=own["keeps_last"]), times=times)
    if entrant.engine == "side by side":
        streamed = evaluate_whole(replace(problem, keeps_last=False), parse(own["partition"]), "round_robin", {})
        return unscheduled(streamed)
    plan = evaluate_whole(problem, parse(own["partition"]), entrant.dispatch, own["options"])
    check(plan.schedule)
    return replace(plan, num_evaluated=own["num_evaluated"])
