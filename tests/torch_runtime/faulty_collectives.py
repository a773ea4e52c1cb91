"""A rank that goes wrong at a collective of an odd size: arguments are WHAT and its board."""

import os

from rpbench.torch_runtime import shards
from rpbench.torch_runtime.processes import worker
from tests.torch_runtime.faulty_worker import commit

MARKED = 4104  # bytes of the tensor at which rank 1 goes wrong


def main(what: str, board: str) -> int:
    timed = shards.timed

    def faulty(name: str, size: int, *others: object) -> object:
        if size == MARKED and name == "all_gather" and os.environ["RANK"] == "1":
            commit(what)
        return timed(name, size, *others)

    shards.timed = faulty
    return worker.main(board)
