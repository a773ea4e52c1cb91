"""Tasks that share links, a host's memory and an interpreter: closed forms, and the times of schedules as data."""

import numpy as np
import pytest
from fairness import fair_rates
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.sim.fair_shares import Queues, Shared, share
from rpbench.sim.shared_links import COPY, HOST, LOOP, NOTHING, Capacity, Tasks, run


def timed(needs, capacity=None, edges=(), ports=(), urgent=()):
    """Ends of tasks, each with needs of its own: (seconds, amount, what serves it)."""
    tasks = Tasks()
    for number in range(len(needs)):
        port = dict(enumerate(ports)).get(number, -1)
        tasks.add(number, *(a for a, b in edges if b == number), port=port, urgent=number in urgent)
    own, amount, server = zip(*needs, strict=True)
    return run(tasks, own, amount, server, capacity or Capacity())


def test_copies_share_the_memory_and_go_on_alone():
    # 10 B at 4 B/s alone; while all three run each has a third of 6 B/s
    _, end = timed([(0, 10, COPY), (0, 2, COPY), (0, 2, COPY)], Capacity(copy_bytes_per_s=4, host_bytes_per_s=6))
    assert end == pytest.approx([3, 1, 1])


def test_the_host_takes_what_copies_leave_and_a_fair_share_at_least():
    _, end = timed([(0, 4, COPY), (0, 12, HOST)], Capacity(copy_bytes_per_s=2, host_bytes_per_s=8))
    assert end == pytest.approx([2, 12 / 6])
    _, end = timed([(0, 4, COPY), (0, 8, HOST)], Capacity(host_bytes_per_s=8))
    assert end == pytest.approx([1, 4 / 4 + 4 / 8])


def test_a_root_complex_holds_back_its_own_copies_alone():
    capacity = Capacity(copy_bytes_per_s=4, group_bytes_per_s=4)
    _, end = timed([(0, 8, COPY), (0, 8, COPY), (0, 8, COPY + 1)], capacity)
    assert end == pytest.approx([4, 4, 2])


def test_an_interpreter_takes_turns_and_runs_beside_the_devices():
    _, end = timed([(3, 1, LOOP), (0, 2, LOOP)])
    assert end == pytest.approx([3, 3])  # the first has its device for longer than the loop; both loops in turns
    _, end = timed([(0, 2, LOOP), (0, 4, HOST)], Capacity(host_bytes_per_s=4, loop_share=0.5))
    assert end == pytest.approx([2.5, 1])


@pytest.mark.parametrize("seed", range(3))
def test_many_tasks_with_nothing_in_common_each_last_their_own_time(seed):
    lasts = np.random.default_rng(seed).integers(1, 99, 40)
    _, end = timed([(int(each), 0, NOTHING) for each in lasts])
    assert list(end) == list(lasts)


def test_a_port_takes_urgent_tasks_first_and_one_at_a_time():
    begin, end = timed([(2, 0, NOTHING), (1, 0, NOTHING), (1, 0, NOTHING)], ports=(0, 0, 0), urgent={2}, edges=[(0, 1)])
    assert sorted(end) == [1, 3, 4]
    tasks = Tasks()
    tasks.add(0, port=0)
    tasks.add(1, tasks.add(2))  # 1: an idle task of half a second, then one that needs the port
    late = tasks.add(3, 1, port=0)
    soon = tasks.add(4, 1, port=0, urgent=True)
    begin, _ = run(tasks, [2, 0, 0.5, 1, 1], [0] * 5, [NOTHING] * 5, Capacity())
    assert begin[soon] == 2
    assert begin[late] == 3


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2)), min_size=1, max_size=12),
    pace=st.integers(1, 9),
    memory=st.integers(1, 40),
    complex_=st.integers(1, 20),
)
def test_rates_are_those_of_max_min_fairness(sizes, pace, memory, complex_):
    num = COPY + 3
    busy = [0, 1, 1, *(sum(group == each for _, group in sizes) for each in range(3))]
    capacity = Capacity(pace, memory, complex_, loop_share=0.5)
    links = [capacity.links(num, beside_host=beside).tolist() for beside in (False, True)]
    rate = [0.0] * num
    share(Queues([], [], [0] * num, busy), capacity.servers(num), Shared(*links, [0.0] * 5, [0] * 5, [0.0] * 5), rate)
    found = dict(enumerate(rate[COPY:]))
    uses = {number: [number, "memory", ("complex", group)] for number, (_, group) in enumerate(sizes)}
    capacity = dict.fromkeys(range(len(sizes)), pace) | {"memory": memory}
    uses["host"] = ["memory"]  # the host's threads are one more that uses the memory, with no pace of its own
    rates = fair_rates(uses, capacity | {("complex", group): complex_ for group in range(3)})
    assert [found[group] for _, group in sizes] == pytest.approx([rates[number] for number in range(len(sizes))])
    assert rate[HOST] == pytest.approx(rates["host"])
    assert rate[LOOP] == 0.5


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num=st.integers(1, 25))
def test_nothing_begins_before_what_it_waits_for_and_work_is_conserved(data, num):
    afters = [after for after in range(1, num) for _ in range(data.draw(st.integers(0, 2)))]
    edges = [(data.draw(st.integers(0, after - 1)), after) for after in afters]
    need = st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from([HOST, LOOP, COPY]))
    needs = data.draw(st.lists(need, min_size=num, max_size=num))
    begin, end = timed(needs, Capacity(copy_bytes_per_s=2, host_bytes_per_s=3), edges)
    for before, after in edges:
        assert begin[after] >= end[before] - 1e-9
    for (seconds, amount, server), start, stop in zip(needs, begin, end, strict=True):
        fastest = {HOST: 3, LOOP: 1, COPY: 2}[server]
        assert stop - start >= max(seconds, amount / fastest) - 1e-9
    moved = sum(amount for _, amount, server in needs if server != LOOP)
    assert max(end) >= moved / 3 - 1e-9
