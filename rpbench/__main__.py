"""`python -m rpbench`: run a configuration, or one of the verbs show, plan, compare, report."""

import gc
import os
import sys
from importlib.util import find_spec

from analysis.verbs import VERBS
from rpbench.cli import COLLECT_AFTER, INTERRUPTED, dispatch, register
from rpbench.run.allocator import restart_tuned


def main() -> None:
    """Entry point; the exit status is 0, 1 (a run failed), 2 (the request was wrong) or 130 (interrupted)."""
    if find_spec("fcntl") is None:  # locks on files, which sweeps and measurements share
        print("rpbench runs on Linux and macOS, not on this system; on Windows run it in WSL", file=sys.stderr)
        sys.exit(2)
    gc.set_threshold(COLLECT_AFTER)
    restart_tuned(sys.argv[1:])
    register(VERBS)
    status = dispatch(sys.argv[1:])
    if status == INTERRUPTED:
        # A worker may be in the middle of a long operation. Python, on its way out, would wait for it or abort over it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
