"""Columns let pass what the checks of actions let pass, and refuse what these refuse, in the same words."""

import random

import pytest

from rpbench.cost.constant import unit_times
from rpbench.ir.action import Action, Kind, overlap
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check_versions, checked_actions
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape, Weights
from rpbench.registry import entries
from rpbench.sim.checked import checked_graph, plain_rows
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph

# name -> (ranks, stages, microbatches)
PLAIN = {
    "1f1b": (3, 3, 4),
    "interleaved_1f1b": (2, 4, 4),
    "zb_h1": (3, 3, 6),
    "chimera": (4, 4, 4),
    "dualpipe_v": (2, 4, 5),
    "seq1f1b": (2, 2, 3),
    "pipe_offload": (2, 4, 6),
}


def build(name, *, num_steps=1):
    ranks, stages, microbatches = PLAIN[name]
    parts = 2 if name == "seq1f1b" else 1
    return entries()[name].build(Shape(ranks, stages, microbatches, num_steps=num_steps, num_parts=parts))


def told(check, schedule):
    """What a check says of a schedule; empty if it lets it pass."""
    try:
        check(schedule)
    except ValueError as error:
        return str(error)
    return ""


def action_by_action(schedule):
    analysis = checked_actions(schedule)
    try:
        build_graph(analysis)
    except ValueError:
        _ = analysis.rounds
        raise
    check_versions(analysis)


def test_plain_schedules_are_told_by_their_columns():
    for name in PLAIN:
        assert plain_rows(build(name)) is not None, name


# --- what breaks a schedule -----------------------------------------------------------------------------------


def changed(schedule, rows):
    return Schedule(schedule.shape, tuple(rows), placement=schedule.placement, weights=schedule.weights)


def anything(rng, action, shape):
    """An action with one field changed, often to what cannot be; of an OVERLAP one of its parts."""
    if action.sub:
        parts = list(action.sub)
        place = rng.randrange(len(parts))
        parts[place] = anything(rng, parts[place], shape)
        return overlap(*parts)
    field = rng.choice(["kind", "stage", "microbatch", "part", "version", "object", "peer", "sub"])
    value = {
        "kind": rng.choice([*Kind]),
        "stage": rng.choice([-1, 10**12, *range(shape.num_stages + 2)]),
        "microbatch": rng.choice([None, -1, 10**12, *range(shape.total_microbatches + 2)]),
        "part": rng.choice([-1, 0, 1, 2]),
        "version": rng.choice([0, 1]),
        "object": "A",
        "peer": rng.choice([0, "host"]),
        "sub": rng.choice([(), (action,), (action, Action(Kind.B, action.stage, action.microbatch))]),
    }[field]
    return action._replace(**{field: value})


def mutated(rng, schedule):
    """A schedule with an action taken out, doubled, moved, changed, or run together with the next."""
    rows = [{lane: list(row) for lane, row in lanes} for lanes in schedule.rows]
    lanes = rng.choice(rows)
    row = lanes[rng.choice([*lanes])]
    if not row:
        return schedule
    place = rng.randrange(len(row))
    match rng.randrange(7):
        case 0:
            del row[place]
        case 1:
            row.insert(rng.randrange(len(row)), row[place])
        case 2:
            row.insert(rng.randrange(len(row)), row.pop(place))
        case 3:
            other = rng.choice(rows)
            other[rng.choice([*other])].append(row.pop(place))
        case 4:
            other = rng.randrange(len(row))
            row[place], row[other] = row[other], row[place]
        case 5 if place + 1 < len(row) and not (row[place].sub or row[place + 1].sub):
            row[place : place + 2] = [overlap(*row[place : place + 2])]
        case _:
            row[place] = anything(rng, row[place], schedule.shape)
    return changed(schedule, rows)


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_refused_is_refused_in_the_same_words(name):
    rng, whole, refused = random.Random(name), build(name), 0
    for _ in range(150):
        schedule = mutated(rng, whole)
        if rng.random() < 0.3:
            schedule = mutated(rng, schedule) if all(map(schedule.compute, range(schedule.shape.num_ranks))) else whole
        expected = told(action_by_action, schedule)
        assert told(checked_graph, schedule) == expected
        refused += bool(expected)
    assert 30 < refused < 150


def test_bound_weights_stay_where_they_are_without_a_placement():
    torn = Schedule(Shape(2, 1, 1), ((Action(Kind.F, 0, 0),), (Action(Kind.B, 0, 0),)))
    assert plain_rows(torn) is None
    assert plain_rows(Schedule(torn.shape, torn.rows, weights=Weights.STREAMED)) is not None


def test_a_holder_that_is_no_rank_holds_nothing():
    row = (Action(Kind.F, 0, 0), Action(Kind.B, 0, 0))
    for placement, holds in (((0,),), True), (((1,),), False), (((-1,),), False), (((0, 1),), True):
        assert (plain_rows(Schedule(Shape(1, 1, 1), (row,), placement=placement)) is not None) == holds


def test_steps_and_transfers_are_not_plain():
    shape = Shape(1, 1, 1)
    row = (Action(Kind.F, 0, 0), Action(Kind.B, 0, 0))
    assert plain_rows(Schedule(shape, ((*row, Action(Kind.STEP, 0, version=1)),))) is None
    assert plain_rows(Schedule(shape, ({"compute": row, "net": ()},))) is None


# --- what follows from it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_graph_and_versions_are_the_same_with_and_without_checks_of_actions(name):
    schedule = build(name, num_steps=2)
    analysis = checked_actions(Analysis(schedule))
    graph, versions = checked_graph(schedule)
    other = build_graph(analysis)
    for field in ("order", "previous", "pred_start", "pred", "crosses", "moves", "gradient", "slot"):
        assert (getattr(graph, field) == getattr(other, field)).all(), field
    assert graph.slots == other.slots
    assert versions == analysis.versions
    if schedule.shape.num_parts == 1:
        costs = unit_times(schedule.shape.num_stages).table(symmetric((1,) * schedule.shape.num_stages))
        assert simulate_graph(graph, costs).end == simulate_graph(other, costs).end
