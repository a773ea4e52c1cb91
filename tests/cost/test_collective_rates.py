"""Collective rates: latency and bandwidth are found again, with intervals that hold them; bad figures are refused."""

import numpy as np
import pytest

from rpbench.cost.hardware.collective_rates import COLLECTIVES, CollectiveRate, collective_rates, fit_rate
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.rings import volume

SIZES = [2**power for power in range(12, 25, 2)]
ROW = {
    "num_ranks": 4,
    "bytes_per_s": 2e9,
    "bytes_per_s_low": 1.5e9,
    "bytes_per_s_high": 2.5e9,
    "latency_s": 1e-4,
    "latency_s_low": 0.5e-4,
    "latency_s_high": 2e-4,
}


def test_volumes_are_those_of_rings():
    """NCCL tests, PERFORMANCE.md: 2 (n - 1) / n for an all-reduce, (n - 1) / n for the others."""
    assert volume("all_reduce", 8) == 2 * 7 / 8
    assert {volume(name, 8) for name in COLLECTIVES[1:]} == {7 / 8}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_latency_and_bandwidth_are_found_again(name):
    """8 ranks, 2 GB/s, 50 us: seconds by hand, without noise."""
    sent = {"all_reduce": 1.75}.get(name, 0.875)
    found = fit_rate(name, 8, {size: [50e-6 + sent * size / 2e9] * 3 for size in SIZES})
    assert found.bytes_per_s == pytest.approx(2e9)
    assert found.latency_s == pytest.approx(50e-6)
    assert found.seconds(1e6, 8) == pytest.approx(50e-6 + sent * 1e6 / 2e9)


def test_intervals_hold_what_was_put_in_for_about_nine_of_ten():
    rng, held, held_latency = np.random.default_rng(3), [], []
    for _ in range(40):
        noisy = {size: ((50e-6 + 0.5 * size / 2e9) * rng.lognormal(0, 0.1, 15)).tolist() for size in SIZES}
        found = fit_rate("all_gather", 2, noisy)
        held.append(found.bytes_per_s_low <= 2e9 <= found.bytes_per_s_high)
        held_latency.append(found.latency_s_low <= 50e-6 <= found.latency_s_high)
        assert found.latency_s_low <= found.latency_s <= found.latency_s_high
    assert 0.75 <= np.mean(held) <= 1.0
    assert 0.75 <= np.mean(held_latency) <= 1.0


def test_no_latency_is_below_zero():
    found = fit_rate("all_reduce", 2, {1000: [1e-6], 2000: [3e-6], 4000: [9e-6]})
    assert found.latency_s == 0.0
    assert found.bytes_per_s > 0


@pytest.mark.parametrize("samples", [{4096: [1e-3]}, {4096: [0.0], 8192: [1e-3]}, {4096: [float("nan")], 8192: [1.0]}])
def test_samples_that_say_nothing_are_refused(samples):
    with pytest.raises(ValueError, match=r"all_reduce: (a latency and a bandwidth need|seconds that are not)"):
        fit_rate("all_reduce", 2, samples)


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"bytes_per_s": 0.0, "bytes_per_s_low": 0.0}, "finite and above 0"),
        ({"bytes_per_s_low": 3e9}, "is not between its ends"),
        ({"latency_s_low": -1.0}, "finite"),
        ({"num_ranks": 1}, "at least 2"),
        ({"speed": 3.0}, "speed"),
    ],
)
def test_a_cluster_with_wrong_collectives_is_refused(change, rule):
    with pytest.raises(ValueError, match=rule):
        Machine("mine", collectives={"all_reduce": ROW | change})


def test_a_collective_that_nobody_knows_is_refused_by_name():
    with pytest.raises(ValueError, match="did you mean all_gather"):
        collective_rates({"all_gathr": ROW})


def test_latency_grows_with_hops_and_bytes_with_the_ring():
    rate = CollectiveRate("all_gather", **ROW)
    assert rate.seconds(0.0, 4) == pytest.approx(1e-4)
    assert rate.seconds(0.0, 2) == pytest.approx(1e-4 / 3)  # 1 of 3 hops
    assert rate.seconds(1e9, 1) == 0.0
