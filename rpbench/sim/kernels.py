"""The loops over orders and longest paths, written once: plain Python on lists, or compiled by numba on arrays.

Both give the same bits: the compiled form neither reorders nor contracts arithmetic. Compilation takes half a second
(a fraction of that from the cache), which only large graphs save again, so numba is imported when first needed.
"""

import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

Array = Any  # list, or numpy array under numba


def order_lanes(
    lane_start: Array,
    pred_start: Array,
    pred: Array,
    order: Array,
    done: Array,
    heads: Array,
    waiter: Array,
    next_waiter: Array,
) -> int:
    """Write a topological order of all actions into `order`; return how many could be ordered.

    Lanes run as far as they can. A lane whose next action waits is queued at the action it waits for, and goes on when
    that is done. `heads` ends as each lane's next action.
    """
    num_lanes = len(lane_start) - 1
    stack = [0] * num_lanes
    depth = 0
    for lane in range(num_lanes - 1, -1, -1):
        stack[depth] = lane
        depth += 1
    count = 0
    while depth > 0:
        depth -= 1
        lane = stack[depth]
        head = heads[lane]
        while head < lane_start[lane + 1]:
            blocker = -1
            for edge in range(pred_start[head], pred_start[head + 1]):
                if not done[pred[edge]]:
                    blocker = pred[edge]
                    break
            if blocker >= 0:
                next_waiter[lane] = waiter[blocker]
                waiter[blocker] = lane
                break
            done[head] = True
            order[count] = head
            count += 1
            woken = waiter[head]
            while woken >= 0:
                stack[depth] = woken
                depth += 1
                woken = next_waiter[woken]
            head += 1
        heads[lane] = head
    return count


def relax(
    previous: Array,
    pred_start: Array,
    pred: Array,
    delay: Array,
    late: Array,
    slot: Array,
    pre_of: Array,
    main_of: Array,
    start: Array,
    main: Array,
    end: Array,
    exposed: Array,
) -> None:
    """Longest path: times of every action, in one pass over actions in topological order.

    Positions are topological. `previous` is the action before in the same lane (-1: none). An edge holds back the
    whole action, or only its main phase if it is `late`; `pre` then ends where main begins. `delay` is the hop time of
    an edge; `exposed` is how much later main starts than it would if this action's hops took no time.
    """
    for i in range(len(previous)):
        before = previous[i]
        free = end[before] if before >= 0 else 0 * pre_of[0]
        early, early_free = free, free
        behind, behind_free = free, free
        for edge in range(pred_start[i], pred_start[i + 1]):
            bare = end[pred[edge]]
            ready = bare + delay[edge]
            if late[edge]:
                behind = max(behind, ready)
                behind_free = max(behind_free, bare)
            else:
                early = max(early, ready)
                early_free = max(early_free, bare)
        pre = pre_of[slot[i]]
        begin = early
        at = early + pre
        if behind > at:
            at = behind
            begin = at - pre
        start[i] = begin
        main[i] = at
        end[i] = at + main_of[slot[i]]
        exposed[i] = at - max(early_free + pre, behind_free)


def relax_batch(
    previous: Array,
    pred_start: Array,
    pred: Array,
    delay: Array,
    late: Array,
    slot: Array,
    pre_of: Array,
    main_of: Array,
    idle: Array,
    behind: Array,
    end: Array,
    makespan: Array,
) -> None:
    """Makespan of many plans that share one graph; `pre_of` and `main_of` have a row a slot, a column a plan.

    The arithmetic is that of `relax`, for as many plans at a time as `end` has columns. The innermost loops run over
    plans, so that the compiled form works on vectors. `idle` holds zeros; `behind` and `end` are workspace.
    """
    width = len(idle)
    for first in range(0, len(makespan), width):
        num = min(width, len(makespan) - first)
        for i in range(len(previous)):
            at = end[i]
            free = end[previous[i]] if previous[i] >= 0 else idle
            for j in range(num):
                at[j] = free[j]
                behind[j] = free[j]
            for edge in range(pred_start[i], pred_start[i + 1]):
                producer = end[pred[edge]]
                hop = delay[edge]
                held = behind if late[edge] else at
                for j in range(num):
                    ready = producer[j] + hop
                    held[j] = ready if ready > held[j] else held[j]
            pre = pre_of[slot[i]]
            main = main_of[slot[i]]
            for j in range(num):
                early = at[j] + pre[first + j]
                begin = early if early > behind[j] else behind[j]
                last = begin + main[first + j]
                at[j] = last
                ended = last if last > begin - pre[first + j] else 0.0  # an action without duration ends no run
                makespan[first + j] = ended if ended > makespan[first + j] else makespan[first + j]


def trace_path(
    previous: Array,
    pred_start: Array,
    pred: Array,
    delay: Array,
    late: Array,
    slot: Array,
    pre_of: Array,
    main_of: Array,
    end: Array,
    num_pre: Array,
    num_main: Array,
) -> None:
    """Count the pre and main phases of each slot on one longest path; `end` is that of `relax`."""
    i = 0
    for k in range(len(end)):
        if end[k] > end[i]:
            i = k
    while i >= 0:
        num_main[slot[i]] += 1
        pre = pre_of[slot[i]]
        latest, free = previous[i], end[previous[i]] if previous[i] >= 0 else 0 * pre_of[0]
        reached, with_pre = free + pre, True
        for edge in range(pred_start[i], pred_start[i + 1]):
            ready = end[pred[edge]] + delay[edge]
            if not late[edge]:
                ready = ready + pre
            if ready > reached:
                latest, reached, with_pre = pred[edge], ready, not late[edge]
        if with_pre:
            num_pre[slot[i]] += 1
        i = latest


def is_warm() -> bool:
    """Whether numba is loaded already, so that compiling one more kernel takes little time."""
    return "numba" in sys.modules


@cache
def compiled(kernel: Callable[..., Any], *parts: Callable[..., Any], allocates: bool = True) -> Callable[..., Any]:
    """The kernel compiled for arrays; the plain function if numba cannot be imported.

    `parts` are functions of the same module that it or other parts call, callees first. If none of them `allocates`
    lists or arrays, references to arrays are not counted; that took seven eighths of the time of a loop over thirty.
    """
    try:
        from numba import njit
    except ImportError:
        return kernel
    names, made = dict(kernel.__globals__), kernel  # a namespace of its own: the module keeps its plain functions
    compile_one: Any = njit(cache=True, nogil=True, _nrt=allocates)  # type: ignore[call-overload]
    for function in (*parts, kernel):
        made = compile_one(FunctionType(function.__code__, names, function.__name__))
        names[function.__name__] = made
    return made


def run(kernel: Callable[..., None], *given: Any) -> None:
    """Run a kernel that writes into arrays: compiled, or plain on lists that are then copied back."""
    quick = compiled(kernel)
    if quick is not kernel:
        quick(*given)
        return
    plain = [each.tolist() if hasattr(each, "tolist") else each for each in given]
    kernel(*plain)
    for array, found in zip(given, plain, strict=True):
        if found is not array:
            array[...] = found


@cache
def compile_orders() -> None:
    """Use compiled loops for orders under given times from now on, if numba can be imported."""
    import numpy as np

    from rpbench.ordering import loops

    if compiled(loops.pull, *loops.PULL_PARTS) is not loops.pull:
        loops.use(
            loops.Means(
                compiled,
                lambda values: np.array(values, dtype=np.int64),
                lambda number: np.zeros(number, np.int64),
                lambda number, value: np.full(number, value),
                lambda column, places: column[places],
                lambda column: np.asarray(column).tolist(),
            )
        )
