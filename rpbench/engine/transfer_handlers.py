"""Transfer handlers: LOAD, STORE, FREE, SEND and RECV move the tensors of a training run.

SEND and RECV on lane compute or net need do nothing: all devices share the host, and a boundary tensor is where its
reader looks for it. On lanes d2h and h2d they are copies to the host and from it.
"""

from collections.abc import Callable, Mapping

import torch

from rpbench.engine.device_weights import Copy, DeviceWeights
from rpbench.engine.executor import Gate, Handler
from rpbench.engine.gradients import Gradients
from rpbench.engine.passes import Passes
from rpbench.engine.weights import Weights
from rpbench.ir.action import RECV, SEND, Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.moves import Moves, has_transfers
from rpbench.ir.schedule import Schedule


class Transfers:
    """The handlers of everything that moves.

    Args:
        copy: makes a tensor at the other end of a lane.
    """

    def __init__(self, schedule: Schedule, weights: Weights, gradients: Gradients, passes: Passes, copy: Copy) -> None:
        self._weights, self._gradients, self._passes, self._copy = weights, gradients, passes, copy
        self._index = Index(schedule)
        stored = Moves(self._index).transfers[Kind.STORE, "G"] if has_transfers(schedule) else []
        self._stores = {transfer.pieces[0]: transfer for transfer in stored}

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """One for each kind that moves something.

        Shards need do nothing: weights are at home in one piece, and gradients of replicas add up as they are made.
        """
        shards = dict.fromkeys((Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD), _in_one_piece)
        return (
            dict.fromkeys(SEND | RECV, self._hop)
            | shards
            | {
                Kind.LOAD: self._load,
                Kind.STORE: self._store,
                Kind.FREE: self._free,
            }
        )

    def _load(self, action: Action, number: int, gate: Gate) -> None:
        if action.object == "A":
            self._passes.load_kept(action, self._over_link(number))
        elif isinstance(self._weights, DeviceWeights) and action.object == "P":
            self._weights.load(action, number)

    def _store(self, action: Action, number: int, gate: Gate) -> None:
        if action.object == "A":
            self._passes.store_kept(action, self._over_link(number))
        elif action.object == "G":
            per_step = self._index.shape.num_microbatches
            for visit in self._stores[number].visits:
                microbatches = {
                    part.microbatch or 0
                    for found in visit.numbers
                    for part in (self._index.actions[found].sub or (self._index.actions[found],))
                    if part.stage == visit.stage and part.kind is not Kind.F
                }
                for version in sorted({microbatch // per_step + 1 for microbatch in microbatches}):
                    own = [microbatch for microbatch in sorted(microbatches) if microbatch // per_step + 1 == version]
                    self._gradients.store(action.stage, version, own, self._over_link(number))

    def _free(self, action: Action, number: int, gate: Gate) -> None:
        """Weights go; gradients and activations have gone with the action that took them."""
        if isinstance(self._weights, DeviceWeights) and action.object == "P":
            self._weights.free(number)

    def _hop(self, action: Action, number: int, gate: Gate) -> None:
        if self._lane(number) in ("h2d", "d2h"):
            self._passes.copy_boundary(action, self._over_link(number))

    def _over_link(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        device, lane = self._index.device(number), self._lane(number)
        return lambda tensor: self._copy(tensor, device, lane)

    def _lane(self, number: int) -> str:
        return self._index.lanes[self._index.lane_of[number]].name


def _in_one_piece(action: Action, number: int, gate: Gate) -> None:
    """What all share is where its reader looks for it."""
