"""Ranks: long-lived processes of a system on this host, fed with cases over pipes.

Whatever goes wrong in one ends all of them with an error that holds its last words; a rank that does not answer in
time is killed. Processes that lose this one see the end of their stdin and leave.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from baselines.systems.case import Case
from rpbench.side_processes import end_all

ROOT = Path(__file__).parents[2]

Answer = dict[str, Any]


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer."""


class Ranks:
    """Processes that run cases together. Use it in a `with` block, or close it.

    Args:
        num_ranks: how many.
        timeout_s: what a case may take.

    Attributes:
        pids: of the processes.
    """

    def __init__(self, num_ranks: int = 2, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        self._words = [tempfile.TemporaryFile() for _ in range(num_ranks)]  # noqa: SIM115  closed by close()
        common = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "baselines.systems", "-"],
                cwd=ROOT,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                start_new_session=True,  # Ctrl-C is this process's to handle
            )
            for rank, words in enumerate(self._words)
        ]
        self.pids = [process.pid for process in self._processes]

    def run(self, case: Case) -> list[Answer]:
        """What every rank says of a case.

        Raises:
            ValueError: if they refuse it; they go on living.
            RankFailed: if one does not say anything, or says that it failed.
        """
        return self._ask(case.to_json())

    def again(self) -> list[Answer]:
        """The last case once more, from the same weights."""
        return self._ask("again")

    def close(self) -> None:
        """End the processes."""
        end_all(self._processes, self._words)
        self._processes, self._words = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, line: str) -> list[Answer]:
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()
            answers = self._listen()
        except (OSError, RankFailed) as error:
            words = self._last_words()
            self._kill()
            raise RankFailed(f"{error}{words}") from None
        for answer in answers:
            if "error" in answer:
                self._kill()
                raise RankFailed(f"{answer['error']}\n{answer['traceback']}")
        if "refused" in answers[0]:
            raise ValueError(answers[0]["refused"])
        return answers

    def _listen(self) -> list[Answer]:
        """A line of every rank, or an error as soon as one has failed: the others may wait for it for long."""
        deadline = time.monotonic() + self._timeout_s
        heard: dict[int, bytes] = dict.fromkeys(range(len(self._processes)), b"")
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(heard):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = [rank for rank in heard if rank not in answers]
                    raise RankFailed(f"rank {silent[0]} has not answered within {self._timeout_s:g} s")
                for key, _ in ready:
                    rank = key.data
                    piece = os.read(key.fd, 1 << 16)
                    if not piece:
                        raise RankFailed(f"rank {rank} has died")
                    heard[rank] += piece
                    if heard[rank].endswith(b"\n"):
                        answers[rank] = json.loads(heard[rank])
                        if "error" in answers[rank]:
                            return [answers[rank]]
        return [answers[rank] for rank in sorted(answers)]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def _last_words(self) -> str:
        said = []
        for rank, words in enumerate(self._words):
            words.seek(0)
            lines = words.read().decode(errors="replace").strip().splitlines()
            said += [f"\nrank {rank}: {line}" for line in lines[-5:]]
        return "".join(said)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
