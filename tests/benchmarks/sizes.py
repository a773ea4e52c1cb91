"""Sizes of the benchmarks: as large as what they say is about, or tiny, to see that they still run."""

import os
from typing import TypeVar

T = TypeVar("T")

TINY = bool(os.environ.get("RPBENCH_TINY_BENCHMARKS"))


def sized(full: T, tiny: T) -> T:
    """The size of a benchmark: `tiny` where RPBENCH_TINY_BENCHMARKS is set, as in CI."""
    return tiny if TINY else full
