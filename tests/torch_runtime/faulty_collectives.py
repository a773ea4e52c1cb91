"""A rank that goes wrong at a collective of an odd size: `python faulty_collectives.py WHAT BOARD`."""

import os
import sys

from faulty_worker import commit

from rpbench.torch_runtime import shards
from rpbench.torch_runtime.processes import worker

MARKED = 4104  # bytes of the tensor at which rank 1 goes wrong


def main() -> int:
    what, board = sys.argv[1:3]
    timed = shards.timed

    def faulty(name: str, size: int, *others: object) -> object:
        if size == MARKED and name == "all_gather" and os.environ["RANK"] == "1":
            commit(what)
        return timed(name, size, *others)

    shards.timed = faulty
    return worker.main(board)


if __name__ == "__main__":
    sys.exit(main())
