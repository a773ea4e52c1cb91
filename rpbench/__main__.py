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
    if find_spec("fcntl") is None:  # file locks, for sweeps and measurements
        print("rpbench runs on Linux and macOS, not on this system; on Windows run it in WSL", file=sys.stderr)
        sys.exit(2)
    _open_streams()
    gc.set_threshold(COLLECT_AFTER)
    restart_tuned(sys.argv[1:])
    register(VERBS)
    status = dispatch(sys.argv[1:])
    if status == INTERRUPTED:
        # A worker may be in the middle of a long operation, for which Python's exit would wait, or on which it would
        # abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _open_streams() -> None:
    """Open closed standard streams on /dev/null; otherwise a later file would take their place."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # as long as the process


if __name__ == "__main__":
    main()
