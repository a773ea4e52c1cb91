"""What `rpbench.side_processes.start` starts in tests: it says who it is, and ends as the line it reads says."""

import json
import os
import signal
import sys

WITH = os.environ.get("WITH", "")  # when this was imported
IMPORTED_BY = os.getpid()


def main(word: str) -> int:
    about = {
        "word": word,
        "imported_here": os.getpid() == IMPORTED_BY,
        "leads": os.getsid(0) == os.getpid(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "with": [WITH, os.environ.get("WITH", ""), os.environ.get("RPBENCH_LATE", ""), os.environ["RANK"]],
    }
    print(json.dumps(about), flush=True)
    line = sys.stdin.readline().strip()
    if line == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if line == "raise":
        raise ValueError("went wrong")
    return int(line or "0")
