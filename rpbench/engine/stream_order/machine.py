"""Machine: a simulated accelerator with some devices, for CPU tensors.

Every operation runs at once, on the processor, and is noted as if it were issued to a stream of a device. Inside
`with Machine(2) as machine:` torch shows two devices: `torch.accelerator`, `torch.Stream`, `torch.Event`,
`torch.Generator`, `torch.autocast`, a module of their kind, factories with `device=`, `Tensor.to`, `Tensor.device`,
pinned memory. Threads started inside see them too, and are ordered after the puts to a `queue.Queue` they get from.
Then `findings(machine.trace)` lists the races of the issued order, whatever the timing was.

Not modelled: kernels that read beyond their arguments; autograd's own thread, which on a device runs a backward on the
streams of its forward (here the caller runs it, on its stream); locks between threads.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from rpbench.engine.host_order import listening
from rpbench.engine.stream_order.happens_before import HappensBefore
from rpbench.engine.stream_order.notes import Notes, noting
from rpbench.engine.stream_order.recorder import Recorder
from rpbench.engine.stream_order.shown import Faces, shown
from rpbench.engine.stream_order.trace import Call, Storage, Timeline, Trace, Work

KIND = "privateuseone"  # torch's name for an unknown kind of device, for which the code has no special case


class Machine(Notes):
    """Devices for CPU tensors. Use it in a `with` block; one at a time.

    Args:
        num_devices: how many.
        kind: their device type in torch.
        keep_calls: keep every operation for a replay in another order; nothing is freed then.
        memory_bytes: memory of a device; None: no limit.
        lost: device -> entries until it is lost; later ones raise torch's error.
        seed: of the order in which the lanes of a run take turns.

    Raises:
        ValueError: for fewer than one device, or a kind that this machine really has.
    """

    def __init__(
        self,
        num_devices: int,
        kind: str = KIND,
        *,
        keep_calls: bool = False,
        memory_bytes: int | None = None,
        lost: Mapping[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        if num_devices < 1:
            raise ValueError(f"num_devices={num_devices}: a machine has at least one")
        here = torch.accelerator.current_accelerator()
        if here is not None and here.type == kind:
            raise ValueError(f"kind={kind}: this machine has real ones; leave it out to check the order alone")
        super().__init__(num_devices, kind, keeps_calls=keep_calls, memory_bytes=memory_bytes, lost=lost, seed=seed)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        noting.append(self)
        self._stack.callback(noting.remove, self)
        for target, name, value in shown(self, self._issuing):
            self._stack.enter_context(mock.patch.object(target, name, value, create=name == self.kind))
        self._stack.enter_context(listening(self))
        self._stack.enter_context(self._issuing())
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self.close()

    @contextmanager
    def _issuing(self) -> Iterator[None]:
        """The calling thread sees the machine inside."""
        with Recorder(self), Faces(self):
            yield

    def replay(self) -> "Replay":
        """The replay of all issued work; the machine must be closed."""
        return Replay(self.trace, self.calls, self.begun_with, self.storages)


# --- replay -----------------------------------------------------------------------------------------------------
#
# Every timeline does its work in order; the next timeline is drawn at random among those whose next work has all that
# the clocks say it waits for. Memory that was not there at the beginning begins as NaN. So a write or a read that the
# recorder has not seen, or an order that the clocks only seem to have, leaves other bits behind.

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
    """The work of a machine with `keep_calls`, to be run again in other orders.

    Args:
        begun_with: storage -> its bytes before the first work, if it existed.
        storages: every storage of the trace, as bytes.
    """

    def __init__(
        self,
        trace: Trace,
        calls: Mapping[int, Call],
        begun_with: Mapping[Storage, torch.Tensor],
        storages: Mapping[Storage, torch.Tensor],
    ) -> None:
        self._queues = _queues(trace, calls)
        self._begun_with, self._storages = begun_with, storages
        self._do_all(calls[id(entry)] for entry in trace.entries if isinstance(entry, Work))
        self.expected = {number: flat.clone() for number, flat in storages.items()}

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
        who = entry.thread if entry.stream is None else entry.stream
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
