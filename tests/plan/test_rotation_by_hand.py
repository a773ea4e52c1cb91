"""A rotation's step, microbatch by microbatch and visit by visit; what devices get of links that they share."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from rpbench.cost.footprint.sizes import LayerSize, ModelBytes
from rpbench.cost.hardware.machine import Machine
from rpbench.plan.rotation import Links, Rotation, share_links
from rpbench.plan.rotation_program import _descend, _moves, _plain, solve, step_times

LAYERS = 9


def drawn(seed, **changes):
    """Nine layers of all sizes on two or three devices, with everything that a step has."""
    chance = np.random.default_rng(seed)
    ranks = int(chance.integers(2, 4))

    def some(least, most, number=LAYERS):
        return [float(each) for each in chance.integers(least, most + 1, number)]

    def size():
        return LayerSize(*(int(each) for each in chance.integers(1, 20, 4)))

    layers, ends = tuple(size() for _ in range(LAYERS)), (size(), size())
    sizes = ModelBytes(layers, *ends, boundary=int(chance.integers(0, 4)), logits=0, logits_chunk=5)
    flow = tuple(zip(some(0, 6, ranks), some(0, 9, ranks), strict=True))
    paces = [tuple(each / 4 for each in some(1, 9, ranks)) for _ in range(4)]
    links = Links(paces[0], 0.5, paces[1], paces[2], 0.125, 0.25, paces[3], flow)
    found = Rotation(
        ranks, int(chance.integers(1, 7)), some(1, 5), some(2, 9), (4.0, 9.0), some(0, 2), sizes, links, 0.5,
        bool(chance.integers(2)),
    )  # fmt: skip
    return replace(found, **changes)


def visited(ready, times, flow, sources, hop):
    """Starts of every microbatch of a visit, and its end: in turn, as they come, and no faster than their tensors."""
    starts = []
    for number in range(len(sources)):
        before = ready if not starts else starts[-1] + max(times, flow)
        starts.append(max(before, sources[number] + hop))
    return starts, starts[-1] + times


def reference(rotation, counts):
    """The step of a cut."""
    size, num, last = rotation.num_ranks, rotation.num_microbatches, len(counts) - 1
    links, ends = rotation.links, np.cumsum([0, *counts])
    parts = [range(ends[j], ends[j + 1]) for j in range(len(counts))]

    def held(j, name):
        layers = [rotation.sizes.layers[layer] for layer in parts[j]]
        layers += [rotation.sizes.embedding] * (j == 0) + [rotation.sizes.head] * (j == last)
        return sum(getattr(layer, name) for layer in layers)

    def times(j, column):
        return sum(column[layer] for layer in parts[j])

    def arrives(j, tensors):
        return num * tensors * links.boundary[j % size]

    def next_ready(j, starts, end, tensors, upload):
        if not rotation.prefetches:
            return end + upload
        return max(end, starts[0] + arrives(j, tensors) + upload)

    forth, back, step = [], {}, 0.0
    for j in range(len(counts)):
        took, place = times(j, rotation.forward) + rotation.head[0] * (j == last), j % size
        sources = [-inf] * num if j == 0 else [start + forth[-1][2] for start in forth[-1][0]]
        if j < size:
            extra = rotation.sizes.embedding.weights * (j == 0) + rotation.sizes.head.weights * (j == last)
            ready = (held(j, "weights") - extra) * links.first_load[place] + extra * links.alone
        else:
            ready = next_ready(j - size, *forth[j - size][:2], int(j > size), held(j, "weights") * links.load[place])
        forth.append((*visited(ready, took, links.flow[place][0], sources, links.hop), took))
    for j in reversed(range(len(counts))):
        took, place = times(j, rotation.backward), j % size
        took += (rotation.head[1] - times(j, rotation.spared)) * (j == last)
        sources = [-inf] * num if j == last else [start + back[j + 1][2] for start in back[j + 1][0]]
        other, visit, tensors = (
            (j + size, back[j + size], 1 + (j + size < last)) if j + size in back else (j, forth[j], int(j > 0))
        )
        ready = next_ready(other, *visit[:2], tensors, held(j, "weights") * links.load[place])
        back[j] = (*visited(ready, took, links.flow[place][1], sources, links.hop), took)
        updates = sum(held(i, "optimizer") for i in range(j + 1)) * rotation.optimizer
        tensors = 3 * num * rotation.sizes.boundary
        moved = sum(held(i, "weights") + held(i, "gradients") + tensors for i in range(j - size + 1)) * links.host
        step = max(step, back[j][1] + held(j, "gradients") * links.store[place] + updates + moved)
    return step


def peak(rotation, counts):
    """The most bytes of any visit: its weights and those that come ahead, and what its backward makes."""
    size, last, most = rotation.num_ranks, len(counts) - 1, 0
    ends = np.cumsum([0, *counts])

    def held(j, *names):
        layers = list(rotation.sizes.layers[ends[j] : ends[j + 1]])
        layers += [rotation.sizes.embedding._replace(activations=0)] * (j == 0)
        layers += [rotation.sizes.head._replace(activations=0)] * (j == last)
        return sum(getattr(layer, name) for layer in layers for name in names)

    for device in range(size):
        stages = list(range(device, len(counts), size))
        visits = [(j, False) for j in stages] + [(j, True) for j in reversed(stages)]
        ahead = [j for j, _ in visits[1:]] + ([stages[0]] if rotation.repeats else [None])
        for (j, backward), coming in zip(visits, ahead, strict=True):
            found = held(j, "weights") + 4 * rotation.sizes.boundary + rotation.sizes.logits_chunk * (j == last)
            found += held(j, "gradients", "activations") if backward else 0
            found += held(coming, "weights") if rotation.prefetches and coming is not None else 0
            most = max(most, found)
    return most


def cuts_of(seed, num_stages):
    chance = np.random.default_rng([seed, num_stages])
    ends = sorted(chance.choice(np.arange(1, LAYERS + 1), num_stages - 1, replace=False))
    return tuple(np.diff([0, *ends, LAYERS]).tolist())


@pytest.mark.parametrize("seed", range(12))
def test_a_step_is_that_of_its_microbatches_one_by_one(seed):
    rotation = drawn(seed)
    for number in range(rotation.num_ranks, 9):
        cut = cuts_of(seed, number)
        found = step_times(rotation, np.array([cut, cut]))
        assert found.tolist() == pytest.approx([reference(rotation, cut)] * 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("weights_alone", [False, True])
def test_a_cut_fits_if_its_fullest_visit_does(seed, repeats, weights_alone):
    """Where backward makes nothing, the fullest may be the last visit forth, with its own weights for the way back."""
    rotation = drawn(seed, repeats=repeats)
    if weights_alone:
        layers = tuple(layer._replace(gradients=0, activations=0) for layer in rotation.sizes.layers)
        ends = (each._replace(gradients=0) for each in (rotation.sizes.embedding, rotation.sizes.head))
        embedding, head = ends
        rotation = replace(rotation, sizes=replace(rotation.sizes, layers=layers, embedding=embedding, head=head))
    for number in range(rotation.num_ranks, 9):
        cut = cuts_of(seed, number)
        most = peak(rotation, cut)
        fits = [
            np.isfinite(step_times(replace(rotation, limit_bytes=limit), np.array([cut]))[0])
            for limit in (most - 1, most)
        ]
        assert fits == [False, True]


def test_a_descent_ends_where_no_single_layer_helps():
    for seed in range(4):
        rotation = drawn(seed)
        counts, step = _descend(rotation, 5)
        assert step == pytest.approx(reference(rotation, counts))
        moved = _moves(np.array(counts))
        assert len(moved) == len({tuple(row) for row in moved.tolist()})
        for row in moved.tolist():
            assert sum(row) == LAYERS
            assert min(*row[:-1], row[-1] + 1) >= 1
            assert sorted(a - b for a, b in zip(row, counts, strict=True)) == [-1, 0, 0, 0, 1]
            assert reference(rotation, row) >= step * (1 - 1e-9)
        assert solve(rotation, (5,)).step <= step * (1 + 1e-9)


def test_a_descent_starts_from_even_cuts_and_from_the_head_alone():
    assert _plain(6, 3) == [(2, 2, 2), (3, 3, 0)]
    assert _plain(6, 7) == [(*(1,) * 6, 0)]
    assert _plain(6, 1) == [(6,)]
    assert _plain(6, 8) == []


def test_too_few_layers_have_no_cut():
    assert _descend(drawn(0), LAYERS + 2) is None
    assert _descend(drawn(0), LAYERS + 1)[0] == (*(1,) * LAYERS, 0)
    assert solve(drawn(0), (LAYERS + 2,)) == ((), inf, True)


# --- shared links ----------------------------------------------------------------------------------------------


def links(num_microbatches=9, devices=(0, 1, 2, 3), boundary=10, unit=1, **figures):
    figures = {"host_to_device_bytes_per_s": 8.0, "device_to_host_bytes_per_s": 4.0, **figures}
    return share_links(Machine("x", 4, **figures), devices, num_microbatches, boundary, unit)


def test_devices_with_links_of_their_own_share_nothing():
    found = links()
    assert found.load == found.first_load == (1 / 8,) * 4
    assert found.store == (1 / 4,) * 4
    assert (found.alone, found.host) == (1 / 8, 0)
    assert found.boundary == (10 / 8,) * 4
    assert found.hop == pytest.approx(10 / 4 + 10 / 8)  # down to the host and up again
    # Forward one tensor comes and two go, backward the other way round.
    assert found.flow == ((max(10 / 8, 20 / 4), max(20 / 8, 10 / 4)),) * 4
    milliseconds = links(unit=1000, transfer_latency_s=2.0)
    assert milliseconds.load == (125,) * 4
    assert milliseconds.hop == pytest.approx(3750 + 4000)


@pytest.mark.parametrize("devices, first", [((0, 1, 2, 3), 2), ((0, 2, 1, 3), 2)])
def test_devices_of_one_root_complex_halve_its_rate_while_both_load(devices, first):
    figures = {"devices_per_root_complex": 2, "root_complex_bytes_per_s": 6.0}
    found = links(devices=devices, **figures)
    assert found.first_load == pytest.approx((first / 6,) * 4)
    assert found.load == pytest.approx((2 / 6,) * 4)  # as many microbatches as devices: always beside each other
    assert found.store == pytest.approx((2 / 6,) * 4)
    wide = links(devices=devices, devices_per_root_complex=2, root_complex_bytes_per_s=100.0)
    assert wide.load == (1 / 8,) * 4  # its own link is the narrow one


def test_cross_mapping_puts_devices_of_a_complex_apart_where_few_microbatches_run():
    """Two microbatches on four devices: neighbours overlap by half of a visit, those two places away do not."""
    figures = {"devices_per_root_complex": 2, "root_complex_bytes_per_s": 8.0}
    near, far = (links(2, devices, **figures) for devices in ((0, 1, 2, 3), (0, 2, 1, 3)))
    assert near.load == pytest.approx((1.5 / 8,) * 4)
    assert far.load == pytest.approx((1 / 8,) * 4)
    assert near.first_load == far.first_load == (2 / 8,) * 4


def test_all_devices_share_the_memory_of_their_host():
    found = links(host_bytes_per_s=16.0)
    assert found.load == pytest.approx((4 / 16,) * 4)
    assert found.host == 1 / 16
    assert found.boundary == pytest.approx((10 * 4 / 16,) * 4)
    # Three tensors of each of four devices pass the memory; over its own link a device moves one and two.
    assert found.flow[0] == pytest.approx((10 * max(20 / 40, 3 * 4 / 16), 10 * max(2 / 8, 3 * 4 / 16)))
    few = links(2, host_bytes_per_s=16.0)
    assert few.load == pytest.approx((max(1 / 8, (1 + 2 * 0.5) / 16),) * 4)
    assert few.first_load == pytest.approx((4 / 16,) * 4)
