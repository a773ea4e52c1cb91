"""Launch: a request on ranks that torchrun has started, or on ranks of this host that are started for it.

Under NCCL a rank waits for a dead one until a timeout that does not say whose fault it is. So ranks share a store: each
publishes every second where it stands, and any error it has raised. When one has failed, or none has moved for too
long, every rank finds the one at fault and ends.
"""

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from rpbench.side_processes import under_torchrun
from rpbench.torch_runtime.processes import diagnosis
from rpbench.torch_runtime.processes.ranks import STALL_S, Ranks
from rpbench.torch_runtime.processes.worker import Refused, run_request, shared_store, start_group
from rpbench.torch_runtime.recorded.outcome import Outcome
from rpbench.torch_runtime.request import TorchRequest, check_request

PERIOD_S = 1.0
LAST_WORDS_S = 2.5  # what others have to say after the first failure
SILENT_S = 6.0  # a process whose thread says nothing for so long runs nothing
MOVING = (diagnosis.Phase.WAITING, diagnosis.Phase.COMPUTING)


class Sentinel:
    """Watches one rank in a `with` block around a run, whose name tells runs on one store apart.

    No rank may stand still for longer than `stall_s` while another waits.
    """

    def __init__(self, request: TorchRequest, place: diagnosis.Place, name: str, stall_s: float) -> None:
        self._request, self._place, self._stall_s = request, place, stall_s
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._store = shared_store(name)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._set(f"board/{self._rank}", f"{socket.gethostname()}:{place.path}".encode())
        self._set(f"pid/{self._rank}", str(os.getpid()).encode())
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def failure(self, error: BaseException | None) -> diagnosis.RunFailed:
        """The error to raise here, once the other ranks have had time to publish theirs."""
        if error is not None:
            self._set(f"error/{self._rank}", f"{type(error).__name__}: {error}".encode())
        self._set(f"standing/{self._rank}", self._place.pack())
        self._set("failed", b"1")
        time.sleep(LAST_WORDS_S)
        self._stop.set()
        return self._verdict()

    def _verdict(self) -> diagnosis.RunFailed:
        """The rank at fault as the first rank found it; later errors only follow from it."""
        found = diagnosis.diagnose(self._request.lowered, self._evidence(), self._request.ranks_each)
        said = json.dumps([str(found), found.rank, found.cause, found.action])
        try:
            with self._lock:
                first = self._store.compare_set("verdict", "", said)
        except dist.DistError:  # the store is gone
            return found
        return diagnosis.RunFailed(*json.loads(first))

    def _watch(self) -> None:
        """Publish and look, until the run is over; end this process if the main thread cannot."""
        try:
            self._publish_and_look()
        except dist.DistError as error:
            if not self._stop.wait(4 * LAST_WORDS_S):
                print(f"the host that keeps the ranks' store is gone ({error})", file=sys.stderr, flush=True)
                os._exit(1)

    def _publish_and_look(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._set(f"standing/{self._rank}", self._place.pack())
            self._set(f"alive/{self._rank}", repr(time.time()).encode())
            if self._get("failed") is not None:
                # The main thread comes to it by itself, unless it waits for what will never come.
                if not self._stop.wait(4 * LAST_WORDS_S):
                    self._leave()
            elif self._stalled():
                self._set("failed", b"1")
                self._stop.wait(LAST_WORDS_S)
                self._leave()

    def _stalled(self) -> bool:
        own = self._place.read()
        if own.phase not in MOVING or time.time() - own.at_s < self._stall_s:
            return False
        return all(time.time() - at.at_s > self._stall_s for at in self._standings())

    def _leave(self) -> None:
        """Print the verdict and end this process, whose main thread waits in torch."""
        error = self._verdict()
        if error.rank == self._rank or self._rank == 0:
            print(error, file=sys.stderr, flush=True)
        if error.cause == "hung" and error.rank != self._rank:
            self._end(error.rank)
        shutil.rmtree(self._place.path.parent, ignore_errors=True)  # which no `with` does any more
        os._exit(1)

    def _end(self, rank: int) -> None:
        """A rank of this host that hangs may not hear torchrun's SIGTERM, and would outlast it by half a minute."""
        host, pid = (self._get(f"board/{rank}") or b"").decode().partition(":")[0], self._get(f"pid/{rank}")
        if host == socket.gethostname() and pid is not None:  # else the store is gone
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)

    def _standings(self) -> list[diagnosis.Standing]:
        return [diagnosis.read_standing(self._get, rank) for rank in range(self._world)]

    def _evidence(self) -> diagnosis.Evidence:
        boards = {rank: (self._get(f"board/{rank}") or b"").decode() for rank in range(self._world)}
        errors = {rank: found.decode() for rank in boards if (found := self._get(f"error/{rank}")) is not None}
        hosts = {rank: board.partition(":")[0] for rank, board in boards.items() if board}
        gone = {rank: None for rank, host in hosts.items() if host == socket.gethostname() and not self._lives(rank)}
        latest = time.time() - SILENT_S  # clocks of hosts agree better than that
        there = boards.keys() - gone.keys() - errors.keys()
        silent = {rank for rank in there if float(self._get(f"alive/{rank}") or "0") < latest}
        return diagnosis.Evidence(self._standings(), errors, gone, hosts, frozenset(silent))

    def _lives(self, rank: int) -> bool:
        pid = self._get(f"pid/{rank}")
        try:
            if pid is not None:  # else the store is gone, and nothing is known
                os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process
            pass
        return True

    def _set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken, and what `get` gives

    def _get(self, key: str) -> bytes | None:
        with self._lock:
            try:
                return self._store.get(key) if self._store.check([key]) else None
            except dist.DistError:  # the store is gone, and with it the host that had it
                return None


_runs = 0


def run_on_torch(request: TorchRequest, *, stall_s: float = STALL_S) -> Outcome | None:
    """Run a request; its outcome, or None on ranks that torchrun has started beside rank 0.

    All ranks end when none has moved for `stall_s`: longer than any one action takes. Raises ValueError if the request
    cannot be, with nothing run, and RunFailed if a rank died, raised, hung or ran out of memory.
    """
    check_request(request)
    if under_torchrun():
        return _run_here(request, stall_s)
    with Ranks(request.num_ranks, stall_s) as ranks:
        return ranks.run(request)


def _run_here(request: TorchRequest, stall_s: float) -> Outcome | None:
    """This process is one of the ranks."""
    global _runs
    if not dist.is_initialized():
        _check_world(request)
        start_group(request.device)
    _runs += 1
    with tempfile.TemporaryDirectory(prefix="rpbench-rank-") as folder:
        place = diagnosis.Place(Path(folder) / "board")
        with Sentinel(request, place, f"run{_runs}", stall_s) as sentinel:
            before = signal.signal(signal.SIGTERM, lambda *_: _end(sentinel))
            try:
                answer = run_request(request, place)
                dist.barrier()
            except (Refused, diagnosis.RunFailed):
                raise
            except Exception as error:
                place.write(diagnosis.Phase.FAILED)
                raise sentinel.failure(error) from error
            finally:
                signal.signal(signal.SIGTERM, before)
    return None if answer is None else Outcome(request, answer)


def _end(sentinel: Sentinel) -> Any:
    """torchrun ends this rank because another one has failed."""
    raise sentinel.failure(None)


def _check_world(request: TorchRequest) -> None:
    """Refuse a number of processes that does not fit before any of them waits for another."""
    world = int(os.environ["WORLD_SIZE"])
    if world != request.num_ranks:
        raise ValueError(
            f"WORLD_SIZE={world}: {request.lowered.table.name} has {request.num_pipeline_ranks} pipeline ranks, with "
            f"data and tensor parallelism {request.num_ranks} processes; start torchrun with as many (nnodes times "
            "nproc-per-node), or change num_devices"
        )
