"""Collection is held off while tables are made, and circles of garbage still go in the end."""

import gc
import weakref

import pytest

from rpbench.run import scheduled
from rpbench.run.scheduled import collection_paused


class Circle:
    def __init__(self):
        self.itself = self


@pytest.mark.slow
def test_much_that_was_made_inside_is_set_aside_until_the_next_time(monkeypatch):
    monkeypatch.setattr(scheduled, "MANY", 1_000)
    gc.collect()
    with collection_paused():
        few = [[number] for number in range(10)]
    assert gc.get_freeze_count() == 0
    with collection_paused():
        many = [[number] for number in range(5_000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(many) + len(few)
    with collection_paused():
        pass
    assert gc.get_freeze_count() == 0


def test_a_circle_that_was_set_aside_is_collected_the_next_time(monkeypatch):
    monkeypatch.setattr(scheduled, "MANY", 1_000)
    with collection_paused():
        circle, many = Circle(), [[number] for number in range(5_000)]
    gone = weakref.ref(circle)
    del circle
    gc.collect()
    assert gone() is not None
    with collection_paused():
        assert gone() is None
    assert many
