"""No free lunch is left on the table: no single option makes a cell of figure 10 faster by more than one percent."""

from itertools import product

import pytest
from single_changes import improvements
from spared import slow

from rpbench.config.configuration import swept
from rpbench.config.loading import load
from rpbench.plan.contest.search import tune
from rpbench.run.scheduled import budget_of, contender_of, terms_of_request

# A quick one by default, every seventh cell with slow tests; all of them take the better part of an hour.
QUICK = [("gpipe", "qwen3_1p7b")]
CELLS = [(schedule, model) for model, schedule in product(swept("figure10", "model"), swept("figure10", "schedule"))]
SLOW = [*(cell for cell in CELLS[::7] if cell not in QUICK), ("pipedream_2bw", "qwen3_1p7b")]
LEFT = [pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in CELLS if cell not in (*QUICK, *SLOW)]


@pytest.mark.parametrize(("schedule", "model"), [*QUICK, *map(slow, SLOW), *LEFT])
def test_no_single_option_is_left_on_the_table(schedule: str, model: str) -> None:
    request = load(["experiment=figure10", f"schedule={schedule}", f"model={model}"])
    who, terms = contender_of(request), terms_of_request(request)
    try:
        plan = tune(who, terms, budget_of(request))
    except ValueError as refused:
        if "no setting can be built" not in str(refused):  # a search ends with a plan, or where nothing can be built
            raise
        return
    if not plan.outcome.fits:
        assert not any(change.outcome.fits for change in improvements(plan, terms, above=-1.0))
        return
    found = improvements(plan, terms)
    assert found == [], [(each.dimension, each.gain) for each in found]
