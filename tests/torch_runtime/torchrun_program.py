"""What torchrun starts in a test: `torchrun_program.py SCHEDULE NUM_RANKS [RANK:TOKEN:WHAT]`."""

import json
import sys
from functools import partial

from faulty_worker import change
from torch_cases import request_for  # found by PYTHONPATH

from rpbench.torch_runtime.processes import launch, worker


def main(name: str, num_ranks: int, fault: str = "") -> int:
    if fault:
        rank, token, what = fault.split(":")
        changed = partial(change, rank=rank, token=token, what=what)
        launch.run_request = lambda request, place: worker.run_request(request, place, changed)
    try:
        outcome = launch.run_on_torch(request_for(name, num_ranks), stall_s=15.0)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    if outcome is not None:
        print("FIELDS", json.dumps(outcome.fields()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:4]))
