"""SLURM: the cells of a sweep as jobs with a task for each host, which starts torchrun with the ranks of its host.

The command submits one job after another. The first rank of a job writes the record into the results folder, which all
hosts share, and prints it; the command alone writes the manifest.
"""

import importlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rpbench.config.choices import ConfigError, at_least_one, typed
from rpbench.config.request import Request
from rpbench.records.record import Record
from rpbench.sweep.worker import RunFailed

FIRST_PORT, NUM_PORTS = 20_000, 20_000  # above privileged ports, below ephemeral ones


def torchrun_of_task(
    hostnames: Sequence[str], node_rank: int, job_id: str, ranks_per_host: int, overrides: Sequence[str]
) -> list[str]:
    """Arguments of `python -m` for the task of one host, which is number `node_rank` of the job.

    The hosts meet at the first one, on a port that follows from the job's number, so that jobs can share a host. Raises
    ValueError for a host that is not among them, or without a rank.
    """
    if not 0 <= node_rank < len(hostnames):
        raise ValueError(f"node_rank={node_rank}: the job has {len(hostnames)} hosts, counted from 0")
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host}: at least 1")
    digits = "".join(filter(str.isdigit, job_id)) or "0"
    port = FIRST_PORT + int(digits) % NUM_PORTS
    return [
        "torch.distributed.run",
        f"--nnodes={len(hostnames)}",
        f"--nproc-per-node={ranks_per_host}",
        f"--node-rank={node_rank}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={hostnames[0]}:{port}",
        f"--rdzv-id={job_id}",
        "-m",
        "rpbench",
        *overrides,
    ]


ROOT = Path(__file__).parents[2]
TARGET = "rpbench.sweep.slurm.Slurm"
EXECUTORS = ("slurm", "local")
_LAST_LINES = 5
Answer = tuple[int, list[str], str]  # a task's exit status, its records, its last lines on stderr


@dataclass
class Slurm:
    """`hydra/launcher=slurm`."""

    _target_: str = TARGET
    executor: str = "slurm"  # or `local`: processes of this host instead of hosts
    num_hosts: int = 1
    ranks_per_host: int = 8
    timeout_min: int = 60
    partition: str | None = None
    account: str | None = None
    cpus_per_task: int | None = None
    gpus_per_host: int | None = None
    setup: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # other options of sbatch
    folder: str = MISSING

    def __post_init__(self) -> None:
        at_least_one(self, "hydra.launcher.", "num_hosts", "ranks_per_host", "timeout_min", "cpus_per_task")
        if self.executor not in EXECUTORS:
            raise ConfigError(f"hydra.launcher.executor={self.executor}: one of {', '.join(EXECUTORS)}")

    def run(self, request: Request) -> list[Record]:
        """The records of a request, run by a job, when it has ended.

        Raises ConfigError for a request without ranks or a host without SLURM, and RunFailed, with the last lines of
        the first failed task, if the job broke.
        """
        if request.backend is None or request.backend.name != "torch":
            raise ConfigError(
                "hydra/launcher=slurm starts ranks of torch's runtime: set backend=torch, or take "
                "hydra/launcher=submitit_slurm for runs of one process"
            )
        executor = self.executor_here()
        overrides = [*request.overrides, f"results_dir={request.results_dir.resolve()}"]
        job = executor.submit(run_task, self.ranks_per_host, overrides)
        print(f"rpbench: job {job.job_id} on {self.num_hosts} hosts, logs in {self.folder}", file=sys.stderr)
        try:
            answers: list[Answer] = job.results()
        except KeyboardInterrupt:
            job.cancel()
            raise
        except Exception as error:  # of submitit: killed, timed out, not pickled
            what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise RunFailed(f"job {job.job_id}: {what}; its logs are in {self.folder}") from None
        rows = [json.loads(line) for _, lines, _ in answers for line in lines]
        if not rows:
            host, words = next(((host, said) for host, (status, _, said) in enumerate(answers) if status), (0, ""))
            raise RunFailed(f"job {job.job_id} left no record; host {host} said last: {words}")
        return rows

    def executor_here(self) -> Any:
        """The executor that submits jobs; ConfigError without submitit or SLURM."""
        try:
            submitit = import_submitit()
        except ImportError:
            raise ConfigError(
                'hydra/launcher=slurm hands in jobs by submitit, which is not here: pip install -e ".[slurm]"'
            ) from None
        try:
            executor = submitit.AutoExecutor(folder=self.folder, cluster=self.executor)
        except RuntimeError:
            raise ConfigError(
                "hydra/launcher=slurm: this host has no srun, so it is on no SLURM cluster; give the command on a "
                "login node, or leave the launcher out and start torchrun on each host (docs/torch_runtime.md)"
            ) from None
        executor.update_parameters(**self.parameters())
        return executor

    def parameters(self) -> Mapping[str, Any]:
        """Parameters of submitit, with options of sbatch."""
        common = {"name": "rpbench", "timeout_min": self.timeout_min}
        if self.executor == "local":
            return common | {"tasks_per_node": self.num_hosts}
        found = {
            "nodes": self.num_hosts,
            "tasks_per_node": 1,
            "cpus_per_task": self.cpus_per_task,
            "gpus_per_node": self.gpus_per_host,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_setup": self.setup or None,
            "slurm_additional_parameters": self.more or None,
        }
        return common | {key: value for key, value in found.items() if value is not None}


def asked_for(launcher: Mapping[str, Any]) -> Slurm | None:
    """This launcher, if the configuration has chosen it; ConfigError for a wrong key or value."""
    return typed(Slurm, dict(launcher)) if launcher.get("_target_") == TARGET else None


def refuse_without_slurm(launcher: Mapping[str, Any]) -> None:
    """Raise ConfigError for Hydra's SLURM launcher on a host without SLURM."""
    if str(launcher.get("_target_")).endswith("submitit_launcher.SlurmLauncher") and shutil.which("srun") is None:
        raise ConfigError(
            "hydra/launcher=submitit_slurm: this host has no srun, so it is on no SLURM cluster; give the command on a "
            "login node, or take hydra/launcher=submitit_local for processes of this host"
        )
    if "submitit" in str(launcher.get("_target_")):
        with suppress(ImportError):  # Hydra reports it
            import_submitit()


def import_submitit() -> Any:
    """submitit, without its log handler on stdout; ImportError if it is not installed."""
    submitit = importlib.import_module("submitit")
    log = logging.getLogger("submitit")
    for handler in [handler for handler in log.handlers if handler.name == "submitit_out"]:
        log.removeHandler(handler)
    return submitit


def run_task(ranks_per_host: int, overrides: Sequence[str]) -> Answer:
    """The task of one host: torchrun with the host's ranks."""
    job = importlib.import_module("submitit").JobEnvironment()
    hosts = list(job.hostnames)
    if len(hosts) != job.num_tasks:  # executor=local: processes of this host
        hosts = ["127.0.0.1"] * job.num_tasks
    arguments = torchrun_of_task(hosts, job.global_rank, job.job_id, ranks_per_host, overrides)
    ended = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    print(ended.stderr, file=sys.stderr)  # to the job's log
    records = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    return ended.returncode, records, " | ".join(_last_words(ended.stderr))


def _last_words(text: str) -> list[str]:
    """The last lines, ours if there are any: torchrun's come behind them and say less."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("rpbench: ")]
    return (ours or lines)[-_LAST_LINES:]
