"""Cutting planes: the cut with the shortest makespan under a given order, if layers could be divided.

Under a fixed order the makespan is the longest of many paths, each linear in the layers of the stages, so it is convex.
Every point tried adds the path that is longest there; a linear program finds the next point, where the longest of all
known paths is shortest. A move of one layer gains nothing where several paths are equally long, and so a climb stops;
this does not.

Source: Kelley, "The Cutting-Plane Method for Solving Convex Programs", J. SIAM 8 (1960).
"""

from collections.abc import Iterator
from math import ceil, floor

import numpy as np

from rpbench.cost.arrays import Floats, Ints
from rpbench.plan.linear import prices
from rpbench.sim.batch import LinearTimes

ROUNDS = 40  # points tried at most
CLOSE = 0.003  # the search ends when the best point is at most this fraction above what the paths allow
ROUNDED = 3  # best points that are rounded
OFFSETS = (0.25, 0.5, 0.75)  # where between two layers a border moves to the later one
SPREAD = 1e-7  # makes the program's rows differ, or the simplex method would stall


def level_cuts(times: LinearTimes, start: Ints, least: Ints, num_forward: int = 0) -> tuple[Ints, int]:
    """Cuts near the best divided one, (cuts, stages), without repetition, and the points tried for them.

    Args:
        start: layers of each stage of the first cut.
        least: the fewest layers of each stage; a rounded cut may have one layer less than that.
        num_forward: as in `PlanBatch.linear`; if directions are cut apart, the last stage is of both.
    """
    parts = [slice(0, num_forward), slice(num_forward, -1)] if num_forward else [slice(0, len(start))]
    directions = np.zeros((len(parts), len(start)))
    for direction, part in zip(directions, parts, strict=True):
        direction[part] = 1
    directions[:, -1] = 1
    num_layers, free = int(directions[0] @ start), directions @ (start - least)
    point, slopes, rests = start.astype(float), list[Floats](), list[float]()
    tried = list[tuple[float, Floats]]()
    for number in range(ROUNDS):
        makespan, slope, rest = times.longest_path(point)
        tried.append((makespan, point))
        slopes.append(slope / tried[0][0])
        rests.append(max(0.0, rest + float(slope @ least)) / tried[0][0])
        best, at_best = min(tried, key=lambda each: each[0])
        found, bound = _shortest(np.array(slopes), np.array(rests), directions, free)
        if found is None or best <= bound * tried[0][0] * (1 + CLOSE):
            break
        point = _spread(found + least, parts, num_layers)
        point = point if number % 2 else (point + at_best) / 2  # far points alone would jump about
    cuts = dict.fromkeys(
        cut
        for _, each in sorted(tried, key=lambda each: each[0])[:ROUNDED]
        for last in ({floor(each[-1]), ceil(each[-1])} if num_forward else (None,))
        for cut in _rounded(each, parts, num_layers, last)
    )
    return np.array(list(cuts), np.int64).reshape(len(cuts), len(start)), len(tried)


def _shortest(slopes: Floats, rests: Floats, directions: Floats, free: Floats) -> tuple[Floats | None, float]:
    """Layers of each stage at which the longest of the paths is shortest, and that length; None if none was found.

    The dual program has a share of each path and a price of a layer in each direction; its prices of the stages are
    their layers.
    """
    num_paths, num_stages = slopes.shape
    rows = np.zeros((num_stages + 1, num_paths + len(directions)))
    rows[:-1, :num_paths], rows[:-1, num_paths:], rows[-1, :num_paths] = -slopes.T, directions.T, 1
    found = prices(rows, np.append(SPREAD * np.arange(1, num_stages + 1), 1), np.append(rests, free))
    return (found[:-1], float(found[-1])) if np.isfinite(found).all() else (None, 0.0)


def _spread(layers: Floats, parts: list[slice], num_layers: int) -> Floats:
    """The layers of each part, scaled so that those of a direction are all."""
    shared = min(float(layers[-1]), num_layers) if len(parts) > 1 else 0.0
    scaled = [layers[part] * (num_layers - shared) / max(layers[part].sum(), SPREAD) for part in parts]
    return np.concatenate([*scaled, [shared] * (len(parts) > 1)])


def _rounded(layers: Floats, parts: list[slice], num_layers: int, last: int | None) -> Iterator[tuple[int, ...]]:
    """Cuts into whole layers; `last` are those of a last stage of both directions, if there is one."""
    total = num_layers - (last or 0)
    ways = [_whole(layers[part] * total / max(layers[part].sum(), SPREAD), total) for part in parts]
    for way in zip(*ways, strict=True):
        yield (*(count for part in way for count in part), *([] if last is None else [last]))


def _whole(layers: Floats, total: int) -> Iterator[list[int]]:
    """Borders rounded in several ways; then the stages with the largest remainders raised."""
    ends = np.cumsum(layers)
    for offset in OFFSETS:
        whole = np.append(np.minimum(np.floor(ends[:-1] + offset), total), total)
        yield np.diff(whole, prepend=0).astype(int).tolist()
    whole = np.floor(layers).astype(int)
    whole[np.argsort(whole - layers, kind="stable")[: total - whole.sum()]] += 1
    yield whole.tolist()
