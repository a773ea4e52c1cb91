"""A rank that goes wrong at an action: `python faulty_worker.py RANK TOKEN WHAT BOARD`."""

import os
import signal
import sys
import threading

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


def change(member: Member) -> None:
    rank, token, what = sys.argv[1:4]

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


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[4], change))
