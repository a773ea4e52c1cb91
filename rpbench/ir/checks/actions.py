"""Checks of single actions: each field has a meaning, and the action stands on a device and lane that may run it.

version   STEP, VALIDATE, ROLLBACK and moves of O: the version that the step makes; STEP_REST: the one its window ends
          with; computations, LOAD:P and UNSHARD: the one that is read
object    LOAD of P, O and A; STORE of G, O and A; FREE of P, G, O and A; no other kind moves an object
peer      SEND and RECV: the rank at the other end; STORE:A and LOAD:A: the rank that holds them; any LOAD and
          STORE: the host
OVERLAP   holds computations; actions that change or move weights stand alone
"""

from collections.abc import Iterator
from operator import itemgetter

from rpbench.ir.action import COMPUTE, HEAD, MOVES, RECV, SEND, STEPPING, SUMS, Action, Kind, parts_of
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index, Lane
from rpbench.ir.schedule import ScheduleError, Weights

_MOVED = {Kind.LOAD: "POA", Kind.STORE: "GOA", Kind.FREE: "PGOA"}
_NAMES = itemgetter(0, 4, 5, 6, 7)  # kind, version, object, peer and what an OVERLAP holds


def check_fields(index: Index) -> None:
    """Check that every field that an action names has a meaning for it."""
    # A LOAD, STORE or FREE may lack its object; other actions that name nothing break no rule.
    moves = not MOVES.isdisjoint(index.schedule.kinds)
    numbers = range(len(index.actions)) if moves else index.marked
    distinct = set(map(_NAMES, map(index.actions.__getitem__, numbers)))  # few, where the actions are many
    wrong = {names for names in distinct if any(_rules(index, names))}
    if wrong:
        number = next(number for number in numbers if _NAMES(index.actions[number]) in wrong)
        rule = next(_rules(index, _NAMES(index.actions[number])))
        raise broken(index.schedule, f"{index.actions[number]}: {rule}", [number])
    if any(what == "A" and isinstance(peer, int) for _, _, what, peer, _ in distinct):
        _check_partners(index)
    if any(kind is Kind.STORE and what == "G" and isinstance(peer, int) for kind, _, what, peer, _ in distinct):
        _check_takers(index)


def _rules(index: Index, names: tuple) -> Iterator[str]:
    """The rules that an action of this kind, version, object, peer and parts breaks."""
    kind, version, what, peer, sub = names
    if any(part.kind not in COMPUTE for part in sub):
        yield "an OVERLAP holds computations; actions that change or move weights stand alone"
    if sub and index.shape.tensor_parallel:
        yield "devices with shares of a matrix meet inside every computation, which therefore runs by itself"
    yield from (rule for part in sub for rule in _rules(index, _NAMES(part)))
    if kind in _MOVED and (what is None or what not in _MOVED[kind]):
        yield f"a {kind.name} moves {', '.join(_MOVED[kind])}"
    has_version = kind in COMPUTE | STEPPING or kind is Kind.UNSHARD or what == "O" or (kind, what) == (Kind.LOAD, "P")
    if version is not None and not has_version:
        yield "it names a version, but neither reads weights nor makes them"
    if version is not None and version > index.shape.num_steps:
        yield f"version {version}: there are {index.shape.num_steps} steps"
    if peer is not None:
        yield from _peer_rules(index, kind, what, peer)


# Moves between ranks: activations wait with a partner, weights and gradients go on to another rank.
_BETWEEN_RANKS = ((Kind.STORE, "A"), (Kind.LOAD, "A"), (Kind.LOAD, "P"), (Kind.STORE, "G"))


def _peer_rules(index: Index, kind: Kind, what: str | None, peer: int | str) -> Iterator[str]:
    if isinstance(peer, str):
        if kind not in (Kind.LOAD, Kind.STORE) or peer != "host":
            yield f"peer {peer}: a LOAD or STORE names the host, a SEND or RECV a rank"
    elif kind not in SEND | RECV and (kind, what) not in _BETWEEN_RANKS:
        yield f"peer {peer}: only SEND, RECV, {', '.join(f'{k.name}:{o}' for k, o in _BETWEEN_RANKS)} name a rank"
    elif not 0 <= peer < index.shape.num_ranks:
        yield f"peer {peer}: ranks are 0 to {index.shape.num_ranks - 1}"


def _check_partners(index: Index) -> None:
    """Check that activations which a STORE:A leaves with another rank are loaded from that rank."""
    holder: dict[tuple[int, int | None, int], tuple[int, Action]] = {}
    for number, action in enumerate(index.actions):
        if action.object != "A" or action.kind is Kind.FREE:
            continue
        if action.peer == index.device(number):
            raise broken(index.schedule, f"{action} stands on rank {action.peer}: its peer is another one", [number])
        first, other = holder.setdefault((action.stage, action.microbatch, action.part), (number, action))
        if other.peer != action.peer:
            rule = f"{other} and {action} name different peers: activations come back from where they went"
            raise broken(index.schedule, rule, [first, number])


def _check_takers(index: Index) -> None:
    """Check that all gradients of a stage go from rank to rank, or all to the host."""
    stores = [
        number for number, action in enumerate(index.actions) if (action.kind, action.object) == (Kind.STORE, "G")
    ]
    handed = {index.actions[number].stage: number for number in stores if isinstance(index.actions[number].peer, int)}
    for number in stores:
        action = index.actions[number]
        if action.stage in handed and not isinstance(action.peer, int):
            other = handed[action.stage]
            rule = f"{index.actions[other]} hands gradients to a rank and {action} to the host: one of both for a stage"
            raise broken(index.schedule, rule, sorted((other, number)))


# --- placement ---

_SHARED = (COMPUTE | SUMS) - {Kind.OVERLAP}  # kinds of which every device runs its shard


def check_placement(index: Index) -> None:
    """Check that computations stand on lane compute of a device that may hold the stage, backward with forward."""
    _check_lanes(index)
    if index.schedule.placement:
        _check_holders(index)
    if index.shape.tensor_parallel:
        _check_shares(index)
    if index.schedule.weights is Weights.STREAMED:
        _check_streamed(index)
    if index.schedule.weights is Weights.BOUND:
        _check_bound(index)
        _check_bound_steps(index)


def _check_lanes(index: Index) -> None:
    for lane in index.lanes:
        if lane.name != "compute":
            for number in range(lane.start, lane.stop):
                if index.actions[number].kind in COMPUTE:
                    rule = f"{index.actions[number]} stands on lane {lane.name}, it belongs on lane compute"
                    raise broken(index.schedule, rule, [number])


def _check_holders(index: Index) -> None:
    placement, shape = index.schedule.placement, index.shape
    if shape.separate_cuts or len(placement) != shape.num_stages:
        raise ScheduleError(
            f"placement lists {len(placement)} stages, the shape has {shape.num_stages} forward and "
            f"{shape.num_backward_stages} backward: one list serves stages that are the same both ways"
        )
    for lane in index.lanes:
        row = index.actions[lane.start : lane.stop]
        names = set(map(itemgetter(0, 1), row))  # kind and stage: few, where the actions are many
        if any(kind is Kind.OVERLAP or lane.device not in _holders(index, kind, stage) for kind, stage in names):
            _find_misplaced(index, lane)


def _holders(index: Index, kind: Kind, stage: int) -> tuple[int, ...]:
    """The devices that may run an action of a kind and stage."""
    if kind in HEAD:
        return (stage,)
    placed = kind in COMPUTE or kind in (Kind.STEP, Kind.ROLLBACK)
    return index.schedule.placement[stage] if placed else tuple(range(index.shape.num_ranks))


def _find_misplaced(index: Index, lane: Lane) -> None:
    for number in range(lane.start, lane.stop):
        for part in parts_of(index.actions[number]):
            holders = _holders(index, part.kind, part.stage)
            if lane.device not in holders:
                what = f"share {part.stage} of the head" if part.kind in HEAD else f"stage {part.stage}"
                ranks = " or ".join(map(str, holders))
                rule = f"{part} stands on rank {lane.device}, but {what} is placed on rank {ranks}"
                raise broken(index.schedule, rule, [number], way_out="move it, or change the placement")


def _check_shares(index: Index) -> None:
    """Check that a device works on its own shard of every matrix: the part of its number."""
    for lane in index.lanes:
        found = set(map(itemgetter(0, 3), index.actions[lane.start : lane.stop]))
        elsewhere = {(kind, part) for kind, part in found if kind in _SHARED and part != lane.device}
        if elsewhere:
            numbers = range(lane.start, lane.stop)
            number = next(number for number in numbers if itemgetter(0, 3)(index.actions[number]) in elsewhere)
            rule = f"{index.actions[number]} is of share {index.actions[number].part}, which is on another rank"
            raise broken(index.schedule, rule, [number])
    if index.holds(Kind.B):
        _check_meetings(index)


def _check_meetings(index: Index) -> None:
    """Check that all shards of a backward are B, or all are I and W: the devices meet inside each of them."""
    numbers, parts = index.numbers(Kind.B), index.shape.num_parts
    for first in range(0, len(numbers), parts):
        shares = [number for number in numbers[first : first + parts] if number >= 0]
        if 0 < len(shares) < parts:
            rule = f"{index.actions[shares[0]]} meets the shares of {parts} devices, and {len(shares)} come to it"
            raise broken(index.schedule, rule, shares, way_out="let all devices run it in one piece, or all in two")


def _check_streamed(index: Index) -> None:
    """Refuse segments and a head in shards: their tensors would bind streamed weights to a device."""
    if index.shape.num_segments > 1 or index.shape.num_head_shards:
        what = "keys and values of segments" if index.shape.num_segments > 1 else "shares of the head"
        raise ScheduleError(f"weights=streamed: {what} stay on their devices, and so does their stage; use bound")


def _check_bound(index: Index) -> None:
    """Check that forward, recompute and backward of a stage and microbatch run on one device, which has the weights."""
    if index.shape.separate_cuts:
        first = next(number for number, action in enumerate(index.actions) if action.kind in COMPUTE)
        rule = f"{index.actions[first]} is of a stage whose layers are others in backward, and bound weights stay"
        raise broken(index.schedule, rule, [first], way_out="declare weights=streamed")
    placement = index.schedule.placement
    if placement and all(len(holders) == 1 for holders in placement) and not index.shape.num_head_shards:
        return  # each stands on the only holder of its stage
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, *HEAD)  # shard d of the head is stepped with stage d
    # The parts of a sequence meet on one rank; shards of a matrix are on different ones.
    parts = 1 if index.shape.tensor_parallel else index.shape.num_parts
    rank_of = [index.lanes[place].device for place in index.lane_of]
    home: list[int] = []  # by stage and microbatch, the first action found, or -1
    for kind in kinds:
        if not index.holds(kind):
            continue
        numbers = index.numbers(kind)
        home = home or [-1] * (len(numbers) // parts)
        for part in range(parts):
            for place, (number, first) in enumerate(zip(numbers[part::parts], home, strict=True)):
                if number < 0:
                    continue
                if first < 0:
                    home[place] = number
                elif rank_of[first] != rank_of[number]:
                    raise _torn(index, first, number)


def _torn(index: Index, first: int, number: int) -> ScheduleError:
    rule = (
        f"{index.actions[number]} on rank {index.device(number)} needs the weights that "
        f"{index.actions[first]} uses on rank {index.device(first)}: bound weights stay on one rank"
    )
    return broken(index.schedule, rule, [first, number], way_out="move one of them, or declare weights=streamed")


def _check_bound_steps(index: Index) -> None:
    for (stage, version), step in index.steps.items():
        gradients = index.gradients(stage, version)
        if index.device(step) not in map(index.device, gradients):
            rank = index.device(step)
            rule = f"{index.actions[step]} stands on rank {rank}, which has no gradient of stage {stage}"
            raise broken(index.schedule, rule, [step, *gradients[:1]])
