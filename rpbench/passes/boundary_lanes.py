"""Boundary lanes: what passes between stages as SEND and RECV on the links of the devices.

    through the host   SEND on lane d2h of the device that made it, RECV on lane h2d of the one that uses it
    directly           SEND on lane net, RECV on lane compute, right before the action that uses it

A device sends in the order in which it makes things and receives in the order in which it needs them, so that no
tensor waits behind one that is needed later; between two devices that order may differ. With 2 devices and through
the host:

    device 0   compute   0F0 0F1                      0B0
               d2h           0SEND_F0 0SEND_F1
               h2d                                 0RECV_B0
    device 1   h2d                    0RECV_F0 ...
               compute                         1F0 1B0
"""

from collections import defaultdict
from dataclasses import replace

from rpbench.ir.action import RECV, SEND, Action
from rpbench.ir.communication import hops
from rpbench.ir.index import Index
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
        sent = [send for number in numbers for send in leaving.get(number, ())]
        if sent and sends in rows[lane.device]:
            raise ScheduleError(
                f"{schedule.name} moves other things on lane {sends} of rank {lane.device}: which goes first there is "
                "not known"
            )
        if sent:
            rows[lane.device][sends] = sent
        if receives == "compute":
            rows[lane.device][lane.name] = [
                action for number in numbers for action in (*coming.get(number, ()), index.actions[number])
            ]
        elif received := [action for number in numbers for action in coming.get(number, ())]:
            rows[lane.device][receives] = received
    return replace(schedule, rows=tuple({name: tuple(row) for name, row in lanes.items()} for lanes in rows))
