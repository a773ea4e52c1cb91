"""Communication: the tensors that cross devices, and the SEND and RECV that move each of them."""

from collections.abc import Iterator
from typing import NamedTuple

from rpbench.ir.action import RECV, SEND, Action, Kind, receive_of
from rpbench.ir.excerpt import broken
from rpbench.ir.index import USERS, Index


class Hop(NamedTuple):
    """A tensor made on one device and used on another, with the actions that move it."""

    producer: int
    consumer: int
    send: Action
    receive: Action


def hops(index: Index) -> Iterator[Hop]:
    """Every tensor that crosses devices, whether or not the schedule holds actions to move it."""
    above_all, device_of = index.shape.num_stages, [lane.device for lane in index.lanes]
    for number, producer, part, moved in _crossing(index):
        kind, stage, microbatch, of = part[:4]
        user, maker = device_of[index.lane_of[number]], device_of[index.lane_of[producer]]
        if moved == "gradient":
            send = Action(Kind.SEND_B, stage + 1, microbatch, of, None, None, user)
            receive = Action(Kind.RECV_B, stage, microbatch, of, None, None, maker)
        else:
            above = stage if kind is Kind.F else above_all
            send = Action(Kind.SEND_F, above - 1, microbatch, of, None, None, user)
            receive = Action(Kind.RECV_F, above, microbatch, of, None, None, maker)
        yield Hop(producer, number, send, receive)


def _crossing(index: Index) -> Iterator[tuple[int, int, Action, str]]:
    """Consumer, producer, the plain action that uses the tensor, and what it is."""
    if Kind.OVERLAP not in index.schedule.kinds:
        for number, producer, moved in index.tensors_between_devices():
            yield number, producer, index.actions[number], moved
        return
    for number, action in enumerate(index.actions):
        for part in action.sub or (action,):
            for producer, moved in index.waits_for(part, receives=False) if part.kind in USERS else ():
                if moved != "order" and index.device(producer) != index.device(number):
                    yield number, producer, part, moved


def local_hops(index: Index) -> Iterator[Hop]:
    """Every tensor that stays on its device and is not used by the very next action there: it may wait on the host."""
    for number, action in enumerate(index.actions):
        for producer, moved in index.waits_for(action, receives=False) if not action.sub else ():
            device = index.device(number)
            if (
                moved == "order"
                or action.kind is Kind.STEP
                or index.device(producer) != device
                or producer == number - 1
            ):
                continue
            kind, stage = _sender(index, action, moved)
            send = Action(kind, stage, action.microbatch, action.part, peer=device)
            yield Hop(producer, number, send, receive_of(send)._replace(peer=device))


def _sender(index: Index, consumer: Action, moved: str) -> tuple[Kind, int]:
    """Kind and stage of the SEND that feeds an action."""
    if moved == "gradient":
        return Kind.SEND_B, consumer.stage + 1
    return Kind.SEND_F, (consumer.stage if consumer.kind is Kind.F else index.shape.num_stages) - 1


def check_communication(index: Index, *, required: bool = False) -> None:
    """Every tensor that crosses devices has one SEND and one RECV, in the right places, and nothing else has.

    Args:
        required: refuse a schedule without any; otherwise such a schedule is one that is not lowered yet.

    Raises:
        ScheduleError: naming the first action that is missing, misplaced or superfluous.
    """
    kinds = [kind for kind in (*SEND, *RECV) if index.holds(kind)]
    if not kinds and not required:
        return
    present = {number for kind in kinds for number in index.numbers(kind) if number >= 0}
    for hop in hops(index):
        for action, user in ((hop.send, hop.producer), (hop.receive, hop.consumer)):
            number = index.find(action)
            if number < 0:
                source, target = index.device(hop.producer), index.device(hop.consumer)
                raise broken(
                    index.schedule,
                    f"{action} is missing: {index.actions[hop.consumer]} on rank {target} uses what "
                    f"{index.actions[hop.producer]} makes on rank {source}",
                    [hop.producer, hop.consumer],
                    way_out="lower_communication adds every SEND and RECV to a schedule without any",
                )
            found = index.actions[number]
            if index.device(number) != index.device(user) or found.peer != action.peer:
                raise broken(
                    index.schedule,
                    f"{found} on rank {index.device(number)} must be {action} on rank {index.device(user)}, "
                    f"the rank of {index.actions[user]}",
                    [number, user],
                )
            present.discard(number)
    present -= set(_waiting_on_host(index, present))
    if present:
        number = min(present)
        rule = f"{index.actions[number]} moves nothing: what it names does not cross from one rank to another"
        raise broken(index.schedule, rule, [number], way_out="take it out")


def _waiting_on_host(index: Index, numbers: set[int]) -> Iterator[int]:
    """Of some SENDs and RECVs, those of tensors that go to the host and come back to the same device."""
    for number in numbers:
        action, lane = index.actions[number], index.lanes[index.lane_of[number]]
        if action.kind in SEND and action.peer == lane.device and lane.name == "d2h":
            other = index.find(receive_of(action))
            place = None if other < 0 else index.lanes[index.lane_of[other]]
            if place and (place.device, place.name) == (lane.device, "h2d"):
                yield from (number, other)


def check_pair_order(index: Index) -> None:
    """Between two ranks, tensors are received in the order they are sent; NCCL, for one, matches no names.

    Raises:
        ScheduleError: naming the first pair out of order.
    """
    sent: dict[tuple[object, object], list[int]] = {}
    received: dict[tuple[object, object], list[int]] = {}
    for number, action in enumerate(index.actions):
        if action.kind in SEND:
            sent.setdefault((index.device(number), action.peer), []).append(number)
        elif action.kind in RECV:
            received.setdefault((index.device(number), action.peer), []).append(number)
    for (source, target), numbers in sent.items():
        for number, other in zip(numbers, received[target, source], strict=True):
            expected = receive_of(index.actions[number])
            if index.find(expected) != other:
                raise broken(
                    index.schedule,
                    f"rank {source} sends {index.actions[number]} while rank {target} waits to receive "
                    f"{index.actions[other]}: between two ranks tensors keep their order",
                    [number, other],
                )
