"""Kept state: what a step is taken back by, a copy of the masters and of all that the optimizer knows of them.

A copy gives back every bit. Undoing the arithmetic of a step (an inverse Adam) needs no copy and gives back nearly the
same; `tests/engine/test_speculation.py` has the difference.
"""

import torch

from rpbench.engine.state.owned_masters import Part


class KeptState:
    """Masters, moments and count of a part as they are when this is made."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._masters = {place: master.clone() for place, master in part.masters.items()}
        self._state = {
            place: {name: _copied(value) for name, value in part.optimizer.state[master].items()}
            for place, master in part.masters.items()
            if master in part.optimizer.state
        }

    def give_back(self) -> None:
        """Make all as it was; what the optimizer knew nothing of, it knows nothing of again."""
        optimizer = self._part.optimizer
        for place, master in self._part.masters.items():
            with torch.no_grad():
                master.copy_(self._masters[place])
            optimizer.state.pop(master, None)
            if place in self._state:
                optimizer.state[master] = self._state[place]

    @property
    def num_bytes(self) -> int:
        """What the copy takes."""
        values = (value for state in self._state.values() for value in state.values())
        tensors = [*self._masters.values(), *(value for value in values if isinstance(value, torch.Tensor))]
        return sum(tensor.nbytes for tensor in tensors)


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
