"""Boundary lanes: what passes between stages as SEND and RECV on the links of the devices.

    through the host   SEND on lane d2h of the device that made it, RECV on lane h2d of the one that uses it
    directly           SEND on lane net, RECV on lane compute, right before the action that uses it

A device sends in the order in which it makes things and receives in the order in which it needs them, so that no
tensor waits behind one that is needed later; between two devices that order may differ. Where copies of a stage sum
their gradients over the same link, a sum goes behind what the last gradient in it makes. With 2 devices and through
the host:

    device 0   compute   0F0 0F1                      0B0
               d2h           0SEND_F0 0SEND_F1
               h2d                                 0RECV_B0
    device 1   h2d                    0RECV_F0 ...
               compute                         1F0 1B0
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from rpbench.ir.action import RECV, SEND, Action, Kind
from rpbench.ir.communication import hops
from rpbench.ir.index import Index, Lane
from rpbench.ir.schedule import Schedule, ScheduleError


def send_over_links(schedule: Schedule, *, direct: bool) -> Schedule:
    """Add the SEND and RECV of every tensor that crosses devices to the lanes of the links it goes over.

    Args:
        direct: between devices; otherwise through the host's memory.

    Raises:
        ScheduleError: if the schedule holds SEND or RECV already, or something else uses the links.
    """
    index = Index(schedule)
    if any(action.kind in SEND or action.kind in RECV for action in index.actions):
        raise ScheduleError("the schedule holds SEND or RECV already: add them once")
    leaving: dict[int, list[Action]] = defaultdict(list)
    coming: dict[int, list[Action]] = defaultdict(list)
    for hop in hops(index):
        leaving[hop.producer].append(hop.send)
        coming[hop.consumer].append(hop.receive)
    rows = [{name: list(row) for name, row in lanes} for lanes in schedule.rows]
    sends, receives = ("net", "compute") if direct else ("d2h", "h2d")
    for lane in index.lanes:
        numbers = range(lane.start, lane.stop)
        sent = [(number, send) for number in numbers for send in leaving.get(number, ())]
        if sent:
            rows[lane.device][sends] = _with_sums(sent, rows[lane.device].get(sends, []), index, lane)
        if receives == "compute" and lane.name != sends:
            rows[lane.device][lane.name] = [
                action for number in numbers for action in (*coming.get(number, ()), index.actions[number])
            ]
        received = [action for number in numbers for action in coming.get(number, ())]
        if received and receives != "compute":
            rows[lane.device][receives] = received
    return replace(schedule, rows=tuple({name: tuple(row) for name, row in lanes.items()} for lanes in rows))


def _with_sums(sent: list[tuple[int, Action]], sums: list[Action], index: Index, lane: Lane) -> list[Action]:
    """What a device sends, and the sums that its link has already, each behind what the last gradient in it makes.

    Args:
        sent: with the numbers of the actions on this lane that make them.

    Raises:
        ScheduleError: if the link has anything else.
    """
    placed: list[tuple[int, Action]] = []
    version = Counter[int]()
    for action in sums:
        version[action.stage] += 1
        own = [each for each in _gradients(action, version[action.stage], index) if lane.start <= each < lane.stop]
        if not own or (placed and max(own) < placed[-1][0]):
            raise ScheduleError(
                f"{index.schedule.name} moves other things on lane net of rank {lane.device}: which goes first there "
                "is not known"
            )
        placed.append((max(own), action))
    return [action for _, action in sorted([*sent, *placed], key=lambda item: item[0])]


def _gradients(action: Action, version: int, index: Index) -> Iterable[int]:
    """The actions whose gradients a sum adds up; none of what is no sum."""
    return index.gradients(action.stage, version) if action.kind is Kind.REDUCE_GRAD else ()
