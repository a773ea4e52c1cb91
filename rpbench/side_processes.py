"""Side processes, which end when this process ends, also when it is killed."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from multiprocessing import Pipe, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TextIO

ROOT = Path(__file__).parents[1]
POLL_S = 1.0
GRACE_S = 5.0  # from the request to end until a process is killed
IMPORT_S = 300.0  # a busy host takes minutes to import torch
# Variables that change often, or that torch sets itself, and that no import reads.
READ_LATE = ("PYTEST_", "RPBENCH_", "TORCHINDUCTOR_CACHE_DIR")
_CALL = "import sys; from rpbench.side_processes import {0}; sys.exit({0}(sys.argv[1:]))"


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_first_rank() -> bool:
    """Whether this process writes the record: rank 0, or the only process there is."""
    return os.environ.get("RANK", "0") == "0" if under_torchrun() else True


def side_processes(
    number: int, start: Literal["fork", "spawn"], begin: Callable[..., None] | None = None, *arguments: Any
) -> ProcessPoolExecutor:
    """A pool whose processes first run `begin` with `arguments`, and end at once when this one does or is killed."""
    return ProcessPoolExecutor(number, get_context(start), _begin, (begin, arguments))


def forks(number: int, work: Callable[..., Any], begin: Callable[[], object] | None = None) -> ProcessPoolExecutor:
    """A pool of forks that first run `begin`. There `inherited` calls `work`, which need not be picklable."""

    def inherit() -> None:
        if begin is not None:
            begin()
        _inherited.append(work)

    return side_processes(number, "fork", inherit)


_inherited: list[Callable[..., Any]] = []  # of a fork


def inherited(*arguments: Any) -> Any:
    """The result of the work of this fork (`forks`)."""
    return _inherited[-1](*arguments)


@contextmanager
def in_fork(work: Callable[[], Any], *, apart: bool = True) -> Iterator[Callable[[], Any]]:
    """Work in a fork of this process; what is given waits for its result. Not `apart`: here, when it is asked for."""
    if not (apart and hasattr(os, "fork")):
        yield work
        return
    with forks(1, work) as pool:
        yield pool.submit(inherited).result


def answers_only() -> TextIO:
    """This process's stdout; all other prints go to stderr from now on."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


class Forked:
    """A child of a template, with the methods of `subprocess.Popen`."""

    def __init__(self, template: "Template", pid: int) -> None:
        self._template, self.pid = template, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process lives."""
        if self.returncode is None:
            try:
                self.returncode = self._template.ask(self.pid)
            except (EOFError, OSError):  # the template is gone, and with it the exit status
                self.kill()
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once there is one; `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


Started = Forked | subprocess.Popen[bytes]


class Template:
    """A process that imports modules and is forked for every child, so that children start with them loaded.

    Children share only environment and cores with this process. The template ends when this process does, or when
    neither this object nor a child is referenced any more.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._owner, self._environment, self._lock = os.getpid(), _early(environment), threading.Lock()
        self._here, there = Pipe()
        with there:
            process = subprocess.Popen(
                [sys.executable, "-c", _CALL.format("serve_forks"), str(there.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a failed import is reported by a child started without the template
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        weakref.finalize(self, _end_template, self._here, process)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether this process can get children with this environment from it."""
        # A fork of this process inherits the connection, and must not use it.
        mine = self._owner == os.getpid() and not self._here.closed
        return mine and self._environment == _early(environment)

    def fork(
        self, program: Sequence[str], imports: Sequence[str], environment: Mapping[str, str], handles: Sequence[int]
    ) -> Forked | None:
        """A child with a program, as of `start`; None if it needs a start without template.

        Raises EOFError or OSError if the template is gone.
        """
        pid = self.ask((program, imports, dict(environment), os.sched_getaffinity(0)), handles)
        return None if pid is None else Forked(self, pid)

    def ask(self, message: Any, handles: Sequence[int] = ()) -> int | None:
        """The template's answer: the exit status of a child's pid, or the pid of a program's child.

        Raises EOFError or OSError if the template is gone or silent; then it cannot be used again.
        """
        with self._lock:
            try:
                self._here.send(message)
                for handle in handles:
                    send_handle(self._here, handle, 0)
                if not self._here.poll(IMPORT_S):
                    raise TimeoutError(f"no answer within {IMPORT_S:g} s")
                answer: int | None = self._here.recv()
            except BaseException:
                self._here.close()  # a later question would get this answer
                raise
        return answer


_template: Template | None = None


def start(
    program: Sequence[str], own: Mapping[str, str], *, stdin: int, stdout: int, stderr: int, imports: Sequence[str] = ()
) -> Started:
    """A process with a session of its own that computes on one thread and runs `main` of a module.

    On Linux it is forked from a template that has imported the module. On macOS, and for a module that starts threads,
    it imports the module itself.

    Args:
        program: name of the module, and the arguments of its `main`, which returns the exit status.
        own: environment variables beside those of this process.
        imports: further modules to import before the fork.
    """
    global _template
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    shared = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    if sys.platform == "linux":
        if _template is None or not _template.serves(shared):
            _template = Template(shared)
        with suppress(EOFError, OSError):
            forked = _template.fork(program, imports, shared | dict(own), (stdin, stdout, stderr))
            if forked is not None:
                return forked
    return subprocess.Popen(
        [sys.executable, "-c", _CALL.format("run_main"), *program],
        cwd=ROOT,
        env=shared | dict(own),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def run_main(program: Sequence[str]) -> int:
    """The exit status of a program, as of `start`."""
    module, *arguments = program
    status: int = import_module(module).main(*arguments)
    return status


def serve_forks(arguments: Sequence[str]) -> int:
    """The main loop of a template; `arguments` is the handle of its connection."""
    asked = Connection(int(arguments[0]))
    while True:
        try:
            message = asked.recv()
        except EOFError:
            return 0
        if isinstance(message, int):
            found, status = os.waitpid(message, os.WNOHANG)
            asked.send(os.waitstatus_to_exitcode(status) if found else None)
            continue
        program, imports, environment, cores = message
        handles = [recv_handle(asked) for _ in range(3)]
        pid = _fork_with((program[0], *imports))
        if pid == 0:
            asked.close()
            _live(program, environment, cores, handles)
        for handle in handles:
            os.close(handle)
        asked.send(pid)


def _fork_with(modules: Iterable[str]) -> int | None:
    """As `os.fork`, with modules imported; None if that fails, or a child would lack threads."""
    try:
        for module in modules:
            import_module(module)
        gc.freeze()  # so that the garbage collector writes to no shared page
        return os.fork() if len(os.listdir("/proc/self/task")) == 1 else None
    except Exception:
        return None


def _live(program: Sequence[str], environment: Mapping[str, str], cores: set[int], handles: Sequence[int]) -> NoReturn:
    """Run a child. It exits without Python's cleanup, which would copy all shared pages."""
    status = 1
    try:
        os.setsid()
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(environment)
        for target, handle in enumerate(handles):
            os.dup2(handle, target)
            os.close(handle)
        sys.argv = list(program)
        status = run_main(program)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}


def _end_template(connection: "Connection[Any, Any]", process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_all(
    processes: Iterable[Started], inputs: Iterable[IO[bytes]], others: Iterable["IO[bytes] | Connection[Any, Any]"]
) -> None:
    """End processes by closing their stdins, the `inputs`; kill those that do not end in time."""
    for stdin in inputs:
        with suppress(BrokenPipeError):  # closing flushes input to a dead process
            stdin.close()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for each in others:
        each.close()


@cache
def end_with(parent: int) -> None:
    """End this process once its parent has ended; for children of other libraries."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _begin(begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    def end_with_parent() -> None:
        parent = parent_process()
        assert parent is not None  # a pool's processes have one
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    if begin is not None:
        begin(*arguments)
