"""Garbage collection, held off while large tables are made.

A large schedule is millions of small tuples in no circle. Each time enough of them are new, the collector walks all
that are there: with 1,024 devices and as many microbatches this takes as long as the checks themselves. Afterwards
the first walk would still go through every one of them, so they are set aside until the next tables are made.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Look for no circles of garbage inside, nor later in what was made inside, until this is entered again.

    What nothing refers to is freed at once all the same.
    """
    was_on = gc.isenabled()
    gc.disable()
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
