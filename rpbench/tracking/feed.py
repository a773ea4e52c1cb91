"""Feed: hands rows from the threads of a run to a listener on a thread of its own, so that no device waits for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

Row = dict[str, Any]
Listener = Callable[[Row], None]


@dataclass
class StepFeed:
    """What a run tells while it is carried out.

    Args:
        listener: takes each row; None: nobody listens, and the run is not watched.
    """

    listener: Listener | None = None
    _rows: "SimpleQueue[Row | None]" = field(default_factory=SimpleQueue)

    def put(self, row: Row) -> None:
        """Tell; returns at once."""
        self._rows.put(row)

    @contextmanager
    def heard_by(self, listener: Listener | None) -> Iterator[None]:
        """Rows go to a listener until the block ends, all of them by then."""
        if listener is None:
            yield
            return
        self.listener = listener
        thread = threading.Thread(target=self._hand_on, args=(listener,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._rows.put(None)
            thread.join()

    def _hand_on(self, listener: Listener) -> None:
        while (row := self._rows.get()) is not None:
            listener(row)
