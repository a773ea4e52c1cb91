"""Launch: a request on ranks that torchrun has started, or on ranks of this host that are started for it."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rpbench.torch_runtime.processes.board import Phase, Place
from rpbench.torch_runtime.processes.diagnosis import RunFailed
from rpbench.torch_runtime.processes.node_run import NodeRequest, run_node
from rpbench.torch_runtime.processes.ranks import STALL_S, Ranks
from rpbench.torch_runtime.processes.sentinel import Sentinel
from rpbench.torch_runtime.processes.worker import Refused, run_request, start_group
from rpbench.torch_runtime.recorded.outcome import Outcome
from rpbench.torch_runtime.request import TorchRequest, check_request

_runs = 0


def under_torchrun() -> bool:
    """Whether this process is one of several that a launcher has started to run together."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_first_rank() -> bool:
    """Whether this process writes the record: rank 0, or the only process there is."""
    return os.environ.get("RANK", "0") == "0" if under_torchrun() else True


def run_on_torch(request: TorchRequest, *, stall_s: float = STALL_S) -> Outcome | None:
    """Run a request; what it came to, or None on ranks that torchrun has started beside rank 0.

    Args:
        stall_s: all ranks end when none has moved for so long; longer than any one action takes.

    Raises:
        ValueError: if the request cannot be; nothing has run.
        RunFailed: if a rank died, raised, hung or ran out of memory; none of them goes on.
    """
    check_request(request)
    if under_torchrun():
        return _run_here(request, stall_s)
    with Ranks(request.num_ranks, stall_s) as ranks:
        return ranks.run(request)


def run_nodes(request: NodeRequest, *, stall_s: float = STALL_S) -> dict[str, Any] | None:
    """Run a request of several nodes, on processes that torchrun has started, one a node, or that are started here.

    Returns:
        What `rpbench.torch_runtime.processes.node_run.run_node` answers, on node 0 alone.

    Raises:
        ValueError: if the request cannot be.
        RunFailed: if a node was lost, where they were started here; torchrun ends the others itself.
    """
    request.check()
    if not under_torchrun():
        with Ranks(request.num_ranks, stall_s) as ranks:
            return ranks.run_nodes(request)
    if not dist.is_initialized():
        start_group("cpu")
    with tempfile.TemporaryDirectory(prefix="rpbench-node-") as folder:
        answer = run_node(request, Place(Path(folder) / "board"))
        dist.barrier()
    return answer


def _run_here(request: TorchRequest, stall_s: float) -> Outcome | None:
    """This process is one of the ranks."""
    global _runs
    if not dist.is_initialized():
        _check_world(request)
        start_group(request.device)
    _runs += 1
    with tempfile.TemporaryDirectory(prefix="rpbench-rank-") as folder:
        place = Place(Path(folder) / "board")
        with Sentinel(request, place, f"run{_runs}", stall_s) as sentinel:
            before = signal.signal(signal.SIGTERM, lambda *_: _end(sentinel))
            try:
                answer = run_request(request, place)
                dist.barrier()
            except (Refused, RunFailed):
                raise
            except Exception as error:
                place.write(Phase.FAILED)
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
