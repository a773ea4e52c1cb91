"""Homes: where a storage would be on a machine with devices; all of them are memory of the host in truth."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Home:
    """Where a storage is.

    Args:
        device: index of a device; None: the host.
        num_bytes: its size as an allocator counts it.
        pinned: whether devices can read it by themselves.
        number, machine: its number in the trace of a machine, and that machine's identity.
    """

    num_bytes: int
    device: int | None = None
    pinned: bool = False
    number: int = -1
    machine: int = 0


_homes: dict[int, Home] = {}  # address of a storage's object -> where it is; constants outlive the machine they are of
_lock = threading.RLock()


def home_of(tensor: torch.Tensor, freed: Callable[[Home], None]) -> Home:
    """The home of a tensor's storage; `freed` is called with it when nobody has it any more, if it is new."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    with _lock:
        found = _homes.get(key)
        if found is None:
            found = _homes[key] = Home(-(-storage.nbytes() // 512) * 512)
            weakref.finalize(storage, _forget, key, freed).atexit = False
        return found


def known_home(tensor: torch.Tensor) -> Home | None:
    """The home of a tensor's storage, if somebody has asked for it before."""
    return _homes.get(tensor.untyped_storage()._cdata)


def _forget(key: int, freed: Callable[[Home], None]) -> None:
    with _lock:
        found = _homes.pop(key)
    freed(found)
