"""Garbage collection, held off while large tables are made.

A large schedule is millions of small tuples in no circle. Each time enough of them are new, the collector walks all
that are there: with 1,024 devices and as many microbatches this takes as long as the checks themselves. Afterwards
the first walk would still go through every one of them, so that many are set aside until the next tables are made.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# So many new objects are worth setting aside: a walk through them takes a tenth of a second.
MANY = 500_000


@contextmanager
def collection_paused() -> Iterator[None]:
    """Look for no circles of garbage inside, nor, where much was made inside, later in that.

    What nothing refers to is freed at once all the same. What was set aside before is looked through first.
    """
    was_on = gc.isenabled()
    gc.disable()
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY:
            gc.freeze()
        if was_on:
            gc.enable()
