"""Workers: long-lived threads that run jobs, one after another each."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Job = Callable[[], None]


class Workers:
    """As many threads as there were ever jobs at a time. They are daemons: the process may end without them.

    Args:
        prepare: what each thread does first.
    """

    def __init__(self, prepare: Job) -> None:
        self._prepare = prepare
        self._threads: list[threading.Thread] = []
        self._queues: list[SimpleQueue[Job | None]] = []

    def start(self, jobs: Sequence[Job], names: Sequence[str]) -> None:
        """Give job i to worker i; a job must not raise."""
        for number in range(len(self._threads), len(jobs)):
            queue: SimpleQueue[Job | None] = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(queue,), name=names[number], daemon=True)
            self._queues.append(queue)
            self._threads.append(thread)
            thread.start()
        for queue, job in zip(self._queues, jobs, strict=False):
            queue.put(job)

    def dead(self) -> list[int]:
        """The workers whose thread has ended."""
        return [number for number, thread in enumerate(self._threads) if not thread.is_alive()]

    def close(self, timeout_s: float) -> None:
        """End every worker that ends within the timeout, all together."""
        for queue in self._queues:
            queue.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._threads, self._queues = [], []

    def _work(self, queue: "SimpleQueue[Job | None]") -> None:
        self._prepare()
        while (job := queue.get()) is not None:
            job()
