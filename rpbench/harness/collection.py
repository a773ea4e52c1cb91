"""Garbage collection, held off while large tables are made.

A large schedule is millions of small tuples in no circle. Each time enough of them are new, the collector walks all
that are there: with 1,024 devices and as many microbatches this takes as long as the checks themselves.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Look for no circles of garbage inside; what nothing refers to is freed at once all the same."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
