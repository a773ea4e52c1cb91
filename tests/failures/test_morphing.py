"""Varuna's morphing: the form that is chosen, by hand, for devices that become fewer."""

import pytest

from rpbench.failures.morphing import NoForm, Varuna, best_form, candidates
from rpbench.failures.walk import Job, Progress

SIZES = (1, 2, 4, 8)


def simulate(stages, width, size, number):
    """(m + P - 1) microbatches' time on a P-th of 12 layers; layers and microbatch fill a memory of 8."""
    if 12 / stages + size > 8:
        return None
    step_s = (number + stages - 1) * size / stages
    return Job(stages, width, number, step_s, (0.0,) * number, (12 // stages,) * stages, restart_s=5.0)


def test_candidates_by_hand():
    # 32 sequences on 7 devices: widths 7, 3, 2, 1, 1; none for 12 stages.
    assert list(candidates(7, 12, 32)) == [(1, 7, 4), (2, 3, 10), (3, 2, 16), (4, 1, 32), (6, 1, 32)]
    assert list(candidates(4, 2, 3)) == [(2, 2, 1)]  # four pipelines would have no sequence each


# Devices -> stages, width, sequences of a microbatch, microbatches, seconds; worked out by hand for every P.
#   8   P=2: 2 sequences, 4 of them, 5 s; P=3: 4, 4, 8 s; P=4: 4, 4, 7 s; P=6: 4, 8, 8.7 s
#   7   P=2: 2, 5, 6 s; P=3: 4, 4, 8 s; P=4: 4, 8, 11 s; P=6: 8.7 s
#   3   P=2: 2, 16, 17 s; P=3: 4, 8, 13.3 s
FORMS = {8: (2, 4, 2, 4, 5.0), 7: (2, 3, 2, 5, 6.0), 3: (3, 1, 4, 8, 40 / 3)}


@pytest.mark.parametrize("num_devices", FORMS)
def test_the_fastest_form(num_devices):
    form = best_form(num_devices, 12, 32, SIZES, simulate)
    found = form.stages, form.width, form.microbatch, form.num_microbatches, form.job.step_s
    assert found == pytest.approx(FORMS[num_devices])


def test_fewer_devices_are_never_faster():
    steps = [best_form(number, 12, 32, SIZES, simulate).job.step_s for number in range(2, 25)]
    assert steps == sorted(steps, reverse=True)


def test_what_does_not_fit_is_said():
    with pytest.raises(NoForm, match="1 devices: no number of stages that divides 12 cut points"):
        best_form(1, 12, 32, SIZES, simulate)


def test_a_lost_device_means_a_restart_in_another_form():
    policy = Varuna.begin(lambda number: best_form(number, 12, 32, SIZES, simulate), 8, 4)
    assert policy.step_s(0) == 5.0
    found = policy.recover(frozenset({3}), Progress(6, 2.0))
    assert (found.source, found.lost_steps, found.restart_s) == ("store", 2, 5.0)
    assert found.fetched_bytes == {"store": 3 * 12}  # three pipelines of 12 bytes
    assert found.recompute_s == 2 * 6.0 + 2.0
    assert found.then.step_s(0) == 6.0
    assert found.then.living(frozenset({3, 4})) == frozenset({4})
