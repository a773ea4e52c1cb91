"""A rank that goes wrong at an action: arguments are RANK TOKEN WHAT, and its board."""

import os
import signal
import threading
from functools import partial

import torch

from rpbench.torch_runtime.processes import worker
from rpbench.torch_runtime.processes.member import Member


def commit(what: str) -> None:
    if what == "exit":
        os._exit(3)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        threading.Event().wait()
    elif what == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
    else:
        raise RuntimeError(f"{what} went wrong")


def change(member: Member, rank: str, token: str, what: str) -> None:
    def before(found: str) -> None:
        if found == token:
            commit(what)

    if os.environ["RANK"] == rank:
        if token == "gradient":  # a wrong one, which only the comparison can see
            add_up = member.groups.add_up

            def wrong(parameters: dict[object, torch.Tensor]) -> None:
                add_up(parameters)
                next(iter(parameters.values())).grad[0] += 1e-9

            member.groups.add_up = wrong
        else:
            member.recorder.before = before


def main(rank: str, token: str, what: str, board: str) -> int:
    return worker.main(board, partial(change, rank=rank, token=token, what=what))
