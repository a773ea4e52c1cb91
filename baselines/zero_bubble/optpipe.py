"""OptPipe: the order of F, I and W, and which activations wait on the host, chosen together for given times.

A constraint program looks for the order with the shortest longest device-local span in which no device ever holds more
than the memory limit. Activations may be stored on the host once their forward has run (STORE:A, lane d2h) and loaded
before their backward (LOAD:A, lane h2d). An action that needs room waits for one that makes room: a FREE:A before a
forward or a LOAD names the activations that must be gone. With 2 ranks, 2 microbatches, F = I = W = 1, room for one
activation (memory_limit=1p) and transfers of half a forward (transfer=0.5), on rank 0:

    compute  0F0 0FREE:A0 0F1 0I0 0W0 0I1 0W1
    d2h      0STORE:A0 0FREE:A0 0STORE:A1 0FREE:A1
    h2d      0FREE:A1 0LOAD:A0 0FREE:A0 0LOAD:A1 0FREE:A1

which ends after 8 slots; without the host, one microbatch after another, it is 10. For small cases only; a record says
how far the order may be from the optimum.

Source: "OptPipe" (arXiv 2510.05186), its abstract: an integer program over order and offloading. The search begins with
the order of `zb_auto`.
"""

from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

from baselines.zero_bubble.zb_auto import read_limit, zb_auto
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape, check_one_stage
from rpbench.ordering.exact import Optimum, best_order, shifted
from rpbench.registry import schedule

LARGEST = 48  # forwards of a step that are searched: ranks times microbatches


@schedule("optpipe", source="OptPipe, arXiv 2510.05186", needs_costs=True, needs_transfers=True, extra="exact")
def optpipe(
    shape: Shape,
    costs: StageCosts,
    *,
    memory_limit: str | float = "1p",  # as in `zb_auto`: `1p`, `2p`, or a number of the fullest stage's activations
    offload: bool = True,  # whether activations may go to the host
    # time of a stage's activations one way, in forwards of that stage; None: what their bytes take
    transfer: float | None = None,
    time_limit_s: float = 60.0,  # of the search; that for fewer transfers has as much again
) -> Schedule:
    """The best order within a memory limit, activations on the host included."""
    _check(shape, transfer, time_limit_s)
    if transfer is not None:
        times = tuple(transfer * time for time in costs.forward)
        costs = replace(costs, store=times, load=times)
    limit = read_limit(str(memory_limit), shape.num_ranks)
    found = _search(replace(shape, num_steps=1), costs, limit, offload, time_limit_s)
    rows = tuple(
        {
            lane: tuple(action for batch in shape.batches for action in shifted(row, batch.start))
            for lane, row in lanes.items()
        }
        for lanes in found.schedule.lanes
    )
    told = {
        "order_proven": found.proven,
        "order_gap": found.span / found.bound - 1 if found.bound else None,
        "num_offloaded": found.num_moved * shape.num_steps,
    }
    return Schedule(shape, rows, name="optpipe", placement=found.schedule.placement, told=told)


def _check(shape: Shape, transfer: float | None, time_limit_s: float) -> None:
    p, m = shape.num_ranks, shape.num_microbatches
    check_one_stage("optpipe", shape)
    if p * m > LARGEST:
        raise ValueError(
            f"optpipe: {p} ranks with {m} microbatches have {p * m} forwards; for a search of all orders it must be at "
            f"most {LARGEST}: take fewer, or schedule=zb_auto"
        )
    if transfer is not None and not 0 <= transfer < float("inf"):
        raise ValueError(f"schedule.transfer={transfer}: a time in forwards, 0 or more; try 0.5")
    if not time_limit_s > 0:
        raise ValueError(f"schedule.time_limit_s={time_limit_s}: seconds above 0; try 60")
    if find_spec("ortools") is None:
        raise ValueError('schedule=optpipe: it needs OR-tools; pip install -e ".[exact]", or take schedule=zb_auto')


@lru_cache(maxsize=4)  # a partition search asks for the same order several times
def _search(shape: Shape, costs: StageCosts, limit: float, offload: bool, time_limit_s: float) -> Optimum:
    heuristic = zb_auto(shape, costs, memory_limit=str(limit))
    first = [[action.kind for action in heuristic.compute(rank)] for rank in range(shape.num_ranks)]
    return best_order(
        shape.num_microbatches,
        costs,
        limit * max(costs.activations),
        offload=offload,
        first=first,
        time_limit_s=time_limit_s,
    )
