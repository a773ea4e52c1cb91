"""Fields: which object, version and peer an action of a kind may name, and what may run together.

version   STEP, VALIDATE, ROLLBACK and what moves O: the one the step makes; STEP_REST: the one its window ends with;
          what computes, LOAD:P and UNSHARD: the one that is read
object    LOAD of P, O and A; STORE of G, O and A; FREE of P, G, O and A: nothing else is ever moved
peer      SEND and RECV: the rank at the other end; STORE:A and LOAD:A: the rank that holds them; any LOAD and
          STORE: the host
OVERLAP   holds computations: what changes or moves weights stands in a place of its own
"""

from collections.abc import Iterator
from operator import itemgetter

from rpbench.ir.action import COMPUTE, MOVES, RECV, SEND, STEPPING, Action, Kind
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index

_MOVED = {Kind.LOAD: "POA", Kind.STORE: "GOA", Kind.FREE: "PGOA"}
_NAMES = itemgetter(0, 4, 5, 6, 7)  # kind, version, object, peer and what an OVERLAP holds


def check_fields(index: Index) -> None:
    """Every field that an action names means something.

    Raises:
        ScheduleError: naming the first action with one that does not.
    """
    # A LOAD, STORE or FREE may lack an object; others that name nothing break no rule.
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
        yield "an OVERLAP holds computations; what changes or moves weights stands in a place of its own"
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


# Activations that wait with a partner, weights and gradients that go from rank to rank.
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
    """What a STORE:A leaves with another rank, the LOAD:A gets from there."""
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
    """Gradients of a stage go from rank to rank all the way, or all to the host."""
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
