"""Replay: the work of a simulated machine in another order that its waits allow.

Every timeline does its work in order; the next timeline is drawn at random among those whose next work has all that
the clocks say it waits for. Memory that was not there at the beginning begins as NaN. So a write or a read that the
recorder has not seen, or an order that the clocks only seem to have, leaves other bits behind.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from rpbench.engine.stream_order.happens_before import HappensBefore
from rpbench.engine.stream_order.machine import Machine
from rpbench.engine.stream_order.trace import Call, Storage, Timeline, Trace, Work

POISON = 0xFF  # every float of these bytes is NaN
_LEAVE_AS_IT_IS = frozenset(
    ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
)


class _Step(NamedTuple):
    """A piece of work on its timeline.

    Args:
        needs: timeline -> how many pieces of its work come before.
    """

    call: Call
    needs: Mapping[Timeline, int]


class Replay:
    """The work of a closed machine with `keep_calls`, to be run again in other orders."""

    def __init__(self, machine: Machine) -> None:
        self._queues = _queues(machine.trace, machine.calls)
        self._begun_with, self._storages = machine.begun_with, machine.storages
        self._do_all(machine.calls[id(entry)] for entry in machine.trace.entries if isinstance(entry, Work))
        self.expected = {number: flat.clone() for number, flat in self._storages.items()}

    @property
    def num_steps(self) -> int:
        """The number of pieces of work."""
        return sum(map(len, self._queues.values()))

    def differences(self, seed: int) -> list[Storage]:
        """The storages whose bits after a random order, drawn with a seed, differ from those after the issued order."""
        self._do_all(self._drawn(random.Random(seed)))
        return [number for number, flat in self._storages.items() if not torch.equal(flat, self.expected[number])]

    def _do_all(self, calls: Iterable[Call]) -> None:
        for number, flat in self._storages.items():
            if number in self._begun_with:
                flat.copy_(self._begun_with[number])
            else:
                flat.fill_(POISON)
        with torch._C._AutoDispatchBelowAutograd():
            for call in calls:
                _do(call)

    def _drawn(self, rng: random.Random) -> Iterator[Call]:
        """All work in a random order."""
        done = dict.fromkeys(self._queues, 0)
        waiting: dict[tuple[Timeline, int], list[Timeline]] = {}  # a piece of work -> timelines that wait for its end
        ready = [who for who in self._queues if self._is_ready(who, done, waiting)]
        while ready:
            place = rng.randrange(len(ready))
            who = ready[place]
            yield self._queues[who][done[who]].call
            done[who] += 1
            ready[place] = ready[-1]
            ready.pop()
            woken = (who, *waiting.pop((who, done[who]), ()))
            ready += [
                other
                for other in woken
                if done[other] < len(self._queues[other]) and self._is_ready(other, done, waiting)
            ]
        assert all(done[who] == len(queue) for who, queue in self._queues.items()), "the order has a circle"

    def _is_ready(
        self, who: Timeline, done: Mapping[Timeline, int], waiting: dict[tuple[Timeline, int], list[Timeline]]
    ) -> bool:
        for other, number in self._queues[who][done[who]].needs.items():
            if done[other] < number:
                waiting.setdefault((other, number), []).append(who)
                return False
        return True


def _queues(trace: Trace, calls: Mapping[int, Call]) -> dict[Timeline, list[_Step]]:
    """The work of every timeline, each piece with the work it waits for."""
    order, queues = HappensBefore(trace), dict[Timeline, list[_Step]]()
    ticks: dict[Timeline, list[int]] = {}
    known: dict[Timeline, dict[Timeline, int]] = {}
    for entry in trace.entries:
        order.take(entry)
        if not isinstance(entry, Work):
            continue
        who = entry.who
        clock, before = order.clocks[who], known.setdefault(who, {})
        needs = {}
        for other, found in ticks.items():
            if other == who:
                continue
            number = before.get(other, 0)
            while number < len(found) and found[number] <= clock[other]:
                number += 1
            if number > before.get(other, 0):
                needs[other] = before[other] = number
        ticks.setdefault(who, []).append(clock[who])
        queues.setdefault(who, []).append(_Step(calls[id(entry)], needs))
    return queues


def _do(call: Call) -> None:
    """Run an operation again and copy its results to their former storages."""
    func, args, kwargs, out = call
    if func._schema.name in _LEAVE_AS_IT_IS:
        return
    if kwargs.get("generator") is not None:
        kwargs = kwargs | {"generator": kwargs["generator"].clone_state()}
    for made, before in zip(_tensors(func(*args, **kwargs)), _tensors(out), strict=True):
        if made.untyped_storage()._cdata != before.untyped_storage()._cdata:
            before.copy_(made)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
