"""Worker: one rank of a run, started by `rpbench.torch_runtime.processes.ranks` or by torchrun.

A parent sends requests on stdin, one a line, and reads an answer to each on stdout. A thread watches stdin: a parent
that ends without a farewell was killed, and then every rank ends, even while it waits for a message, and removes the
folder that they share.

Several contenders may stay on the ranks and run one step each on request. Their weights, receive buffers and torch's
schedule objects are made once, so that two orders of the same work can alternate step by step in the same processes.
"""

import gc
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

import torch
import torch.distributed as dist

from baselines.systems.case import Case
from baselines.systems.worker import Cases
from rpbench.engine.backends.threads import one_thread
from rpbench.side_processes import answers_only
from rpbench.torch_runtime.processes.diagnosis import Phase, Place, RunFailed
from rpbench.torch_runtime.processes.member import Member
from rpbench.torch_runtime.recorded.gathering import Answer, gather
from rpbench.torch_runtime.request import TorchRequest
from rpbench.torch_runtime.shards import CollectiveRequest, run_collectives
from rpbench.torch_runtime.versions import load_runtime, newer_note


@dataclass(frozen=True)
class StepRequest:
    """One step of a resident on the first step's microbatches, without an update; its first request makes it."""

    name: str
    request: TorchRequest

    @property
    def num_ranks(self) -> int:
        return self.request.num_ranks

    @property
    def device(self) -> str:
        return self.request.device


class Residents:
    """Contenders that stay on this rank; `place` is its line on the board."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._members: dict[str, Member] = {}

    def step(self, asked: StepRequest) -> Answer | None:
        """One step: rank 0's answer, with every rank's processor seconds; ValueError if ranks differ."""
        torch.set_num_threads(1)
        member = self._members.get(asked.name) or self._made(asked)
        gc.collect()
        gc.disable()
        try:
            used = time.process_time()
            member.run_once()
            used = time.process_time() - used
        finally:
            gc.enable()
        return gather(member, {"cpu_s": used})

    def _made(self, asked: StepRequest) -> Member:
        member = self._members[asked.name] = Member(asked.request, self._place)
        member.run_once()  # torch looks at shapes in the first step
        gc.collect()
        gc.freeze()  # so that collecting before a step takes milliseconds
        return member


def cpu_s(answer: Any) -> float:
    """Processor seconds of all ranks in the step of an answer."""
    return float(sum(rank["cpu_s"] for rank in answer["ranks"]))


COLLECTIVE_TIMEOUT_S = 1800  # the watch of a run ends it sooner
JOIN_S = 55.0  # for every rank that a launcher starts to come, so that all has ended within a minute
START_S = 300.0  # for ranks that a parent starts and watches: a busy host takes minutes to import torch
FAREWELL = "end"  # the last line of a parent that lives

AnyRequest = TorchRequest | StepRequest | CollectiveRequest


class Refused(ValueError):
    """A request that cannot run; nothing has run."""


def start_group(device: str, join_s: float = JOIN_S) -> None:
    """Join the process group of the environment; ValueError without one, RunFailed if a rank does not come in time."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start ranks with torchrun, or let rpbench start them")
    load_runtime()
    backend = "gloo"
    if device != "cpu":
        local, num = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if local >= num:
            raise ValueError(f"LOCAL_RANK={local}: this host has {num} {device} devices; start as many ranks on it")
        torch.accelerator.set_device_index(local)
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend,
        store=_joined(rank, world, join_s),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def shared_store(name: str, **options: Any) -> dist.PrefixStore:
    """A named part of the store that all ranks of this run share; options are those of `TCPStore`."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    scope = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(f"rpbench/{scope}/{name}", dist.TCPStore(host, port, wait_for_workers=False, **options))


def _joined(rank: int, world: int, join_s: float) -> dist.Store:
    """The shared store, once every rank has come."""
    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    hosts_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + join_s
    try:
        store = shared_store("join", is_master=hosts_it, timeout=timedelta(seconds=join_s))
    except dist.DistError as error:
        what = "cannot be taken" if hosts_it else f"does not answer within {join_s:g} s"
        said = str(error).partition("\n")[0][:160]
        raise RunFailed(f"rank 0 has not come: {at} {what} ({said})", 0, "absent") from None
    store.set(f"here/{rank}", "")
    absent = list(range(world))
    while absent := [each for each in absent if not store.check([f"here/{each}"])]:
        if time.monotonic() > deadline:
            more = f", nor have {len(absent) - 1} more" if len(absent) > 1 else ""
            raise RunFailed(
                f"rank {absent[0]} has not come within {join_s:g} s of rank {rank}{more}; {world - len(absent)} of "
                f"{world} ranks are at {at}. Start as many processes as WORLD_SIZE says",
                absent[0],
                "absent",
            )
        time.sleep(0.1)
    return store


def run_request(request: TorchRequest, place: Place, change: Callable[[Member], None] | None = None) -> Answer | None:
    """This rank's part, with a member that `change` may alter; rank 0's answer. All raise Refused if it cannot run."""
    with one_thread():
        try:
            try:
                member = Member(request, place)
            except ValueError as error:
                raise Refused("; ".join(filter(None, (str(error), newer_note())))) from None
            if change is not None:
                change(member)
            member.run()
            answer = gather(member)
            member.save()
            return answer
        except Exception as error:
            if newer_note():
                error.add_note(newer_note())
            raise


_KINDS: Mapping[str, type[TorchRequest | CollectiveRequest | Case]] = {
    kind.__name__: kind for kind in (TorchRequest, CollectiveRequest, Case)
}


def to_line(request: AnyRequest | Case) -> str:
    """A request as one line of JSON."""
    return json.dumps((type(request).__name__, asdict(request)))


def from_line(line: str) -> AnyRequest | Case:
    """The inverse of `to_line`."""
    kind, fields = json.loads(line)
    if kind == StepRequest.__name__:
        return StepRequest(fields["name"], TorchRequest(**fields["request"]))
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return _KINDS[kind](**fields)


def _run(
    request: AnyRequest | Case,
    place: Place,
    residents: Residents,
    cases: Cases,
    change: Callable[[Member], None] | None,
) -> Answer | None:
    if isinstance(request, TorchRequest):
        return run_request(request, place, change)
    try:
        if isinstance(request, Case):
            place.write(Phase.COMPUTING)
            return cases.run(request)
        if isinstance(request, CollectiveRequest):
            return run_collectives(request, place)
        return residents.step(request)
    except ValueError as error:
        raise Refused(str(error)) from None


def main(board: str, change: Callable[[Member], None] | None = None) -> int:
    """Serve requests from stdin until it ends; arguments as in `run_request`, `board` being this rank's file."""
    out = answers_only()
    lines: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(lines, Path(board).parent), daemon=True).start()
    place = Place(Path(board))
    residents, cases = Residents(place), Cases()
    started = False
    for line in iter(lines.get, None):
        try:
            request = from_line(line)
            if isinstance(request, CollectiveRequest):
                place.write(Phase.WAITING)  # from here on a rank that stands still is noticed
            if not started:
                start_group(request.device, START_S)
                started = True
            answer = _run(request, place, residents, cases, change)
            place.write(Phase.DONE)
            _say(out, {"answer": answer})
        except Refused as error:  # every rank sees it alike
            _say(out, {"refused": str(error)})
        except RunFailed as error:
            _say(out, {"error": str(error), "absent": error.rank, "traceback": ""})
            return 1
        except BaseException as error:
            place.write(Phase.FAILED)
            _say(out, {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
            return 1
    if started:
        dist.destroy_process_group()
    return 0


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)


def _listen(lines: "SimpleQueue[str | None]", folder: Path) -> None:
    """Pass on stdin; when it ends while a request runs, this process ends at once."""
    pass_on(sys.stdin, lines, folder)
    threading.Event().wait(5.0)  # an idle rank has left by then
    os._exit(1)


def pass_on(source: TextIO, lines: "SimpleQueue[str | None]", folder: Path) -> None:
    """Queue a parent's requests, then None; without a farewell remove the folder of boards."""
    line = ""
    for line in filter(None, map(str.strip, source)):
        if line != FAREWELL:
            lines.put(line)
    if line != FAREWELL:
        shutil.rmtree(folder, ignore_errors=True)
    lines.put(None)
