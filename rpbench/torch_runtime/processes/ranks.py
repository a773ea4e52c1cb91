"""Ranks: processes of this host that run requests together, started, watched and ended here.

A failure of one ends all of them, with an error that names the rank at fault
(`rpbench.torch_runtime.processes.diagnosis`). The board shows a rank that hangs: no rank has moved for `stall_s`.
"""

import json
import os
import selectors
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import torch.distributed as dist

from baselines.systems.case import Case
from rpbench.side_processes import Started, end_all, start
from rpbench.torch_runtime.processes.diagnosis import Evidence, Phase, RunFailed, Standing, diagnose, read_file
from rpbench.torch_runtime.processes.worker import FAREWELL, START_S, AnyRequest, StepRequest, to_line
from rpbench.torch_runtime.recorded.outcome import Outcome
from rpbench.torch_runtime.request import TorchRequest, check_request
from rpbench.torch_runtime.shards import CollectiveRequest

WORKER = ("rpbench.torch_runtime.processes.worker",)
POLL_S = 0.25
LAST_WORDS_S = 1.5  # what others have to say after the first failure
REFUSALS_S = 20.0  # a request that one refuses, all refuse
STALL_S = 40.0  # so that all has ended within a minute

Answer = dict[str, Any]


class Ranks:
    """Processes that run requests together, with their `pids`. Use it in a `with` block, or close it.

    A rank may stand still for `stall_s` while another waits: longer than any one action takes. Each process runs
    `program` (`rpbench.side_processes.start`), to which its board's path is added.
    """

    def __init__(self, num_ranks: int, stall_s: float = STALL_S, program: Sequence[str] = WORKER) -> None:
        self._stall_s = stall_s
        self._folder = tempfile.TemporaryDirectory(prefix="rpbench-ranks-")
        self._boards = [Path(self._folder.name) / f"rank{rank}" for rank in range(num_ranks)]
        self._words = [open(f"{board}.err", "w+b") for board in self._boards]  # noqa: SIM115  closed by close()
        # The store lives here, so that it outlives any rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Started] = []
        self._stdins: list[IO[bytes]] = []
        self._stdouts: list[IO[bytes]] = []
        for rank in range(num_ranks):
            self._start(rank, num_ranks, program)
        self.pids = [process.pid for process in self._processes]

    def _start(self, rank: int, num_ranks: int, program: Sequence[str]) -> None:
        own = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for a store that no rank hosts
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        (stdin, requests), (answers, stdout) = os.pipe(), os.pipe()
        self._stdins.append(os.fdopen(requests, "wb"))
        self._stdouts.append(os.fdopen(answers, "rb"))
        try:
            words = self._words[rank].fileno()
            process = start((*program, str(self._boards[rank])), own, stdin=stdin, stdout=stdout, stderr=words)
        finally:
            os.close(stdin)
            os.close(stdout)
        self._processes.append(process)

    def run(self, request: TorchRequest) -> Outcome:
        """The outcome of a request. ValueError if it cannot run: the ranks live on. RunFailed if a rank died, raised,
        hung or ran out of memory: all of them have ended.
        """
        check_request(request)
        return Outcome(request, self._ask(request))

    def step(self, request: StepRequest) -> Outcome:
        """The outcome of one step of a resident; raises as `run` does."""
        return Outcome(request.request, self._ask(request))

    def time_collectives(self, request: CollectiveRequest) -> Answer:
        """Seconds of collectives, as rank 0 answers (`rpbench.torch_runtime.shards`); raises as `run` does."""
        request.check()
        return self._ask(request)

    def run_case(self, case: Case) -> list[Answer]:
        """The answers of all ranks to a case of another system; a repeated case starts from the same weights.

        Raises as `run` does; a case that takes longer than `stall_s` counts as hung.
        """
        return self._answers([case] * len(self._processes))

    def _ask(self, request: AnyRequest) -> Answer:
        if request.num_ranks != len(self._processes):
            raise ValueError(
                f"{len(self._processes)} processes for a request of {request.num_ranks} ranks: start as many as it has"
            )
        return self._answers([request] * len(self._processes))[0]

    def _answers(self, requests: Sequence[AnyRequest | Case]) -> list[Answer]:
        """The answers to one request for each rank; the ranks refuse them unless all are equal."""
        try:
            self._tell(list(map(to_line, requests)))
            answers = self._listen(requests[0])
        except BaseException:
            self._kill()
            raise
        refused = next((answer["refused"] for answer in answers.values() if "refused" in answer), None)
        if refused is not None:
            if len(answers) < len(self._processes):  # the others wait for the one that refused
                self._kill()
            raise ValueError(refused)
        return [answers[rank]["answer"] for rank in sorted(answers)]

    def _tell(self, lines: Sequence[str]) -> None:
        for stdin, line in zip(self._stdins, lines, strict=True):
            with suppress(BrokenPipeError):  # it has died, which `_listen` finds and explains
                stdin.write(line.encode() + b"\n")
                stdin.flush()

    def _listen(self, request: AnyRequest | Case) -> dict[int, Answer]:
        """The answers of all ranks, or of those that answer soon after the first failure or refusal."""
        heard: dict[int, bytes] = dict.fromkeys(range(len(self._processes)), b"")
        answers: dict[int, Answer] = {}
        stop_at = float("inf")
        watch = _Watch(self._boards, self.pids, self._stall_s)
        with selectors.DefaultSelector() as selector:
            for rank, stdout in enumerate(self._stdouts):
                selector.register(stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(heard) and time.monotonic() < stop_at:
                for key, _ in selector.select(POLL_S):
                    piece = os.read(key.fd, 1 << 16)
                    heard[key.data] += piece
                    if not piece:
                        selector.unregister(key.fileobj)
                    elif piece.endswith(b"\n"):
                        answers[key.data] = json.loads(heard[key.data])
                failed = any("error" in answer for answer in answers.values())
                lost = any(process.poll() is not None for process in self._processes)
                refused = any("refused" in answer for answer in answers.values())
                if (failed or lost or refused) and stop_at == float("inf"):
                    stop_at = time.monotonic() + (LAST_WORDS_S if failed or lost else REFUSALS_S)
                if watch.stalled():
                    break
        if all("answer" in answer or "refused" in answer for answer in answers.values()) and (
            len(answers) == len(heard) or any("refused" in answer for answer in answers.values())
        ):
            return answers
        raise self._failure(request, answers)

    def _failure(self, request: AnyRequest | Case, answers: dict[int, Answer]) -> RunFailed:
        missed = next((answer for answer in answers.values() if "absent" in answer), None)
        if missed is not None:
            return RunFailed(missed["error"], missed["absent"], "absent", words=self._last_words(missed["absent"]))
        exits = {rank: process.poll() for rank, process in enumerate(self._processes)}
        evidence = Evidence(
            [read_file(board) or Standing() for board in self._boards],
            {rank: answer["error"] for rank, answer in answers.items() if "error" in answer},
            {rank: status for rank, status in exits.items() if status is not None},
            {},
            frozenset(rank for rank, pid in enumerate(self.pids) if exits[rank] is None and is_stopped(pid)),
        )
        run = request.request if isinstance(request, StepRequest) else request
        if isinstance(run, TorchRequest):
            error = diagnose(run.lowered, evidence, run.ranks_each)
        else:
            error = diagnose(None, evidence)
        error.words = answers.get(error.rank, {}).get("traceback") or self._last_words(error.rank)
        return error

    def _last_words(self, rank: int) -> str:
        words = self._words[rank]
        words.seek(0)
        return "\n".join(words.read().decode(errors="replace").strip().splitlines()[-20:])

    def close(self) -> None:
        self._tell([FAREWELL] * len(self._processes))
        end_all(self._processes, self._stdins, (*self._stdouts, *self._words))
        self._processes, self._stdins, self._stdouts, self._words = [], [], [], []
        self._folder.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Watch:
    """Whether ranks have stopped moving while at least one is in a step, or one has not come at all."""

    def __init__(self, boards: Sequence[Path], pids: Sequence[int], stall_s: float) -> None:
        self._boards, self._pids, self._stall_s = boards, pids, stall_s
        self._last: list[Standing] = []
        self._began = self._since = time.monotonic()

    def stalled(self) -> bool:
        found = [read_file(board) or Standing() for board in self._boards]
        if found != self._last or not any(standing.phase in (Phase.WAITING, Phase.COMPUTING) for standing in found):
            self._last, self._since = found, time.monotonic()
        return time.monotonic() - self._since > self._stall_s or self._one_has_not_come(found)

    def _one_has_not_come(self, found: Sequence[Standing]) -> bool:
        """Whether a process is stopped before its first action, or has no board after minutes."""
        waited_s = time.monotonic() - self._began
        starting = [pid for pid, standing in zip(self._pids, found, strict=True) if standing.phase is Phase.STARTING]
        if waited_s > self._stall_s and any(map(is_stopped, starting)):
            return True
        return waited_s > START_S and any(standing.at_s == 0.0 for standing in found)


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by a signal; False where the system does not say."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"
