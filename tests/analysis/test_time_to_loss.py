"""Time to a loss: the goal is the flushed method's, and ratios are taken seed by seed."""

import numpy as np
import pandas as pd
import pytest

from analysis.exhibits.exhibit import ranged
from analysis.exhibits.figures.own.convergence import SHARE, SMOOTH, goal_of, reached, smoothed, spread, token_multiples

POINTS = 40


def curves(**slopes: float) -> pd.DataFrame:
    """Straight losses from 5 downwards, by method, for two seeds; a point is a thousand tokens and half a second."""
    tokens = 1000.0 * np.arange(1, POINTS + 1)
    rows = [
        {"method": method, "seed": seed, "losses": 5 - (slope + 0.001 * seed) * np.arange(POINTS), "tokens": tokens}
        for method, slope in slopes.items()
        for seed in (0, 1)
    ]
    return pd.DataFrame(rows).assign(seconds=[tokens / 2000] * len(rows))


def test_plain_training_comes_to_its_goal_after_its_share_of_the_tokens():
    data = curves(gpipe=0.05, one_by_one=0.1)
    found = reached(data, "tokens", goal_of(data))[:2]
    assert np.median(found) == pytest.approx(SHARE * 1000 * POINTS, abs=1000)
    losses = data["losses"].iloc[0]
    assert smoothed(losses)[0] == pytest.approx(losses[:SMOOTH].mean())


def test_half_the_slope_takes_twice_the_tokens_and_a_flat_curve_never_comes_there():
    data = curves(gpipe=0.05, late=0.04, flat=0.0, one_by_one=0.1, often=0.08)
    found = token_multiples(data, ["gpipe", "late", "flat"])
    assert found["gpipe"] == (1, 1, 1)
    assert found["late"].median == pytest.approx(0.05 / 0.04, rel=0.05)
    assert found["often"].median == pytest.approx(0.1 / 0.08, rel=0.05), "against the one that steps as often"
    assert ranged(found["flat"], ".2f", ["run"]).text == "not reached"
    assert ranged(spread([1.0, float("inf"), float("inf")]), ".2f", ["run"]).text == "1.00 or more, not reached by all"
    assert ranged(spread([1.0, 1.5, 2.0]), ".1f", ["run"]).text == "1.5 (1.0–2.0)"
