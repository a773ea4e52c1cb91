"""Cutting planes: the cut with the shortest makespan under a given order, if layers could be divided.

Under a fixed order the makespan is the longest of many paths, each linear in the layers of the stages, so it is convex.
Every point tried adds the path that is longest there; a linear program finds the next point, where the longest of all
known paths is shortest. A move of one layer gains nothing where several paths are equally long, and so a climb stops;
this does not.

Source: Kelley, "The Cutting-Plane Method for Solving Convex Programs", J. SIAM 8 (1960).
"""

from collections.abc import Iterator

import numpy as np

from rpbench.cost.arrays import Floats, Ints
from rpbench.plan.linear import prices
from rpbench.sim.batch import LinearTimes

ROUNDS = 40  # points tried at most
CLOSE = 0.003  # the search ends when the best point is at most this fraction above what the paths allow
ROUNDED = 3  # best points that are rounded
OFFSETS = (0.25, 0.5, 0.75)  # where between two layers a border moves to the later one
SPREAD = 1e-7  # makes the program's rows differ, or the simplex method would stall


def level_cuts(times: LinearTimes, num_layers: int, start: Ints) -> tuple[Ints, int]:
    """Cuts near the best divided one, (cuts, stages), without repetition, and the points tried for them.

    Args:
        start: layers of each stage of the first cut.
    """
    point, slopes, rests = start.astype(float), list[Floats](), list[float]()
    tried = list[tuple[float, Floats]]()
    for number in range(ROUNDS):
        makespan, slope, rest = times.longest_path(point)
        scale = tried[0][0] if tried else makespan
        slopes.append(slope / scale)
        rests.append(max(0.0, rest / scale))
        tried.append((makespan, point))
        best, at_best = min(tried, key=lambda each: each[0])
        found, least = _shortest(np.array(slopes), np.array(rests), num_layers)
        if found is None or best / scale <= least * (1 + CLOSE):
            break
        point = found if number % 2 else (found + at_best) / 2  # far points alone would jump about
    nearest = sorted(tried, key=lambda each: each[0])[:ROUNDED]
    cuts = dict.fromkeys(cut for _, each in nearest for cut in _rounded(each, num_layers))
    return np.array(list(cuts), np.int64).reshape(len(cuts), len(start)), len(tried)


def _shortest(slopes: Floats, rests: Floats, num_layers: int) -> tuple[Floats | None, float]:
    """Layers of each stage at which the longest of the paths is shortest, and that length; None if none was found.

    The dual program has a share of each path and a price of a layer; its prices of the stages are their layers.
    """
    num_paths, num_stages = slopes.shape
    rows = np.zeros((num_stages + 1, num_paths + 1))
    rows[:-1, :-1], rows[:-1, -1], rows[-1, :-1] = -slopes.T, 1, 1
    limits = np.append(SPREAD * np.arange(1, num_stages + 1), 1)
    *layers, least = prices(rows, limits, np.append(rests, num_layers)).tolist()
    total = sum(layers)
    return (np.array(layers) * num_layers / total, least) if 0 < total < np.inf else (None, 0.0)


def _rounded(layers: Floats, num_layers: int) -> Iterator[tuple[int, ...]]:
    """Cuts into whole layers: borders rounded, and the stages with the largest remainders raised."""
    ends = np.cumsum(layers)
    for offset in OFFSETS:
        whole = np.append(np.minimum(np.floor(ends[:-1] + offset), num_layers), num_layers)
        yield tuple(np.diff(whole, prepend=0).astype(int).tolist())
    whole = np.floor(layers).astype(int)
    most = np.argsort(whole - layers, kind="stable")
    whole[most[: num_layers - whole.sum()]] += 1
    yield tuple(whole.tolist())
