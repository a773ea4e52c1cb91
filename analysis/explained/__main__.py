"""Make `explained.csv` and `all_pairs.csv`; see the package."""

import sys

from analysis.explained.pairs import write

if __name__ == "__main__":
    print(write(), file=sys.stderr)
