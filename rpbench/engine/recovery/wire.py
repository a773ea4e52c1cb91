"""Wire: messages between the process that watches and the ranks, as bytes; tensors travel by value.

A tensor that multiprocessing passes by itself stays in memory that both ends map, and is gone with its sender. Here
everything is copied, because senders may be killed.
"""

import pickle
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from rpbench.engine.state.checkpoint import State


class Message(NamedTuple):
    """What is said.

    Args:
        word: what it is about.
        epoch: how many failures there had been; what is older is not heard.
        to: the rank it is for; -1: the process that watches.
        about: whatever belongs to the word, plain.
        body: tensors, packed.
    """

    word: str
    epoch: int = 0
    to: int = -1
    about: tuple[Any, ...] = ()
    body: bytes = b""


def say(connection: "Connection[Any, Any]", message: Message) -> None:
    """Send a message."""
    connection.send_bytes(pickle.dumps(tuple(message)))


def hear(connection: "Connection[Any, Any]") -> Message:
    """The next message.

    Raises:
        EOFError, OSError: if the other end is gone.
    """
    return Message(*pickle.loads(connection.recv_bytes()))


def packed(value: Any) -> bytes:
    """Tensors, or containers of them, by value."""
    return pickle.dumps(value)


def unpacked(body: bytes) -> Any:
    """What was packed by a process of this run."""
    return pickle.loads(body)


def bytes_of(state: State) -> int:
    """Bytes of a state's tensors."""
    moments = (value for found in state.moments.values() for value in found.values())
    tensors: list[torch.Tensor] = [*state.masters.values(), *moments]
    return sum(tensor.nbytes for tensor in tensors)
