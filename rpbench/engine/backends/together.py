"""Together: actions that wait for one another half-way, where one thread does all the others.

On a virtual clock, work is done at the moment it ends, an action at a time. The shares of a joint action end at the
same moment and each needs what the others have half-way; so none is done before the last one's moment comes, and then
all are, each on a thread of its own.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from rpbench.engine.executor import Gate, Perform, failed
from rpbench.engine.program import Program
from rpbench.engine.shards.collectives import Parted


class Together:
    """A way to perform a program's actions, joint ones together. Use it in a `with` block.

    Args:
        perform: does one action.
        prepare: what each thread does first.
    """

    def __init__(self, program: Program, perform: Perform, prepare: Callable[[], None]) -> None:
        self._program, self._perform = program, perform
        self._missing = {shares: len(shares) for shares in program.meets.values()}
        most = max((len(shares) for shares in self._missing), default=1)
        self._threads = ThreadPoolExecutor(most, "share", prepare)

    def perform(self, number: int, gate: Gate) -> None:
        """Do an action, or all shares of one if this is the last.

        Raises:
            ActionFailed: if a share raised.
        """
        shares = self._program.meets.get(number)
        if shares is None:
            self._perform(number, gate)
            return
        self._missing[shares] -= 1
        if not self._missing[shares]:
            self._all(shares, gate)

    def _all(self, shares: tuple[int, ...], gate: Gate) -> None:
        running = [self._threads.submit(self._one, share, gate) for share in shares]
        try:
            wait(running)
        except BaseException:
            self._program.stop()  # Ctrl-C: whoever waits for the others comes back
            raise
        errors = [(share, error) for share, done in zip(shares, running, strict=True) for error in _error(done)]
        for share, error in sorted(errors, key=lambda found: isinstance(found[1], Parted)):
            raise failed(self._program, share, error) from error

    def _one(self, share: int, gate: Gate) -> None:
        try:
            self._perform(share, gate)
        except BaseException:
            self._program.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()


def _error(done: "Future[None]") -> list[BaseException]:
    error = done.exception()
    return [] if error is None else [error]
