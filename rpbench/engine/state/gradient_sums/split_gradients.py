"""Split gradients: what of a step's gradient stays on a device, which steps it at once, and what goes to the host."""

from collections.abc import Callable, Iterable, Mapping

import torch

from rpbench.engine.host_order import ToldLock
from rpbench.engine.state.gradient_sums.gradients import Place, Tensors, Window
from rpbench.engine.state.ownership import Pieces
from rpbench.engine.state.updates.important_columns import of_pieces


class SplitWindow:
    """A gradient that is there as soon as it is made, and of which a part is brought home.

    Args:
        made: the gradient on its devices.
        owners: device -> the elements it owns; empty where one device has all.
        device_of: microbatch -> the device that runs it.
        chosen: the masks of what devices step; asked for when the gradient is complete.
        goes_home: whether anything is brought home.

    Attributes:
        rest: owner -> what has come home of its elements, those that are not chosen, flat; None: of all.
    """

    def __init__(
        self,
        made: Window,
        owners: Mapping[int, Pieces],
        device_of: Mapping[int, int],
        chosen: Callable[[], Tensors],
        *,
        goes_home: bool,
    ) -> None:
        self._made, self._owners, self._device_of, self._chosen = made, owners, device_of, chosen
        self._lock, self._waits_for = ToldLock(), {"step"} | ({"store"} if goes_home else set())
        self.rest: dict[int | None, Tensors] = {}

    @property
    def is_complete(self) -> bool:
        return self._made.is_complete

    @property
    def total(self) -> Tensors:
        return self._made.total

    def share(self, device: int) -> Tensors:
        return self._made.share(device)

    def add(self, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        self._made.add(microbatch, gradients)

    def store(self, microbatches: Iterable[int], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Bring home what a device has of the rest."""
        if not self.is_complete:
            raise RuntimeError("a gradient is stored before it is complete: what is chosen follows from all of it")
        owner = self._device_of[next(iter(microbatches))] if self._owners else None
        made = self.total if owner is None else self.share(owner)
        masks = of_pieces(self._chosen(), None if owner is None else self._owners[owner])
        left = {place: value.reshape(-1)[~masks[place].reshape(-1)] for place, value in made.items()}
        self.rest[owner] = {place: copy(values) for place, values in left.items() if values.numel()}
        if self.is_stored:
            self._end("store")

    @property
    def is_stored(self) -> bool:
        """Whether every owner's part of the rest has come home."""
        return len(self.rest) == max(1, len(self._owners))

    def drop(self) -> None:
        """Let go of the total, unless a part of it is still to go home."""
        self._end("step")

    def _end(self, what: str) -> None:
        with self._lock:
            self._waits_for.discard(what)
            if not self._waits_for:
                self._made.drop()
