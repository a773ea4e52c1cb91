"""`python -m rpbench`: run a configuration, or one of the verbs show, plan, compare, report."""

import sys

from rpbench.cli import dispatch


def main() -> None:
    """Entry point; the exit status is 0, 1 (a run failed) or 2 (the request was wrong)."""
    sys.exit(dispatch(sys.argv[1:]))


if __name__ == "__main__":
    main()
