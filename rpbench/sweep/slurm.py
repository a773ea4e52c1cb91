"""SLURM: the cells of a sweep as jobs, a task a host, each of which starts torchrun with the ranks of its host.

The command stays where it was given and hands in one job after another; a job's first rank writes the record into the
results folder, which all hosts see, and says it, so that the sweep's manifest is written in one place.
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

FIRST_PORT, NUM_PORTS = 20_000, 20_000  # above the ports that need rights, below those systems hand out


def torchrun_of_task(
    hostnames: Sequence[str], node_rank: int, job_id: str, ranks_per_host: int, overrides: Sequence[str]
) -> list[str]:
    """Arguments of `python -m` that a scheduler's task runs on one host, by its place in the job's hosts.

    They meet at the first, jobs that share a host on different ports, which follow from their number. Raises ValueError
    if this host is not among them, or a host has no rank.
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
Answer = tuple[int, list[str], str]  # a task's exit status, its records, its last words


@dataclass
class Slurm:
    """`hydra/launcher=slurm`.

    Args:
        executor: `slurm`, or `local` for processes of this host in the place of hosts.
        gpus_per_host: asked of SLURM; none where it is left out.
        more: other options of sbatch.
    """

    _target_: str = TARGET
    executor: str = "slurm"
    num_hosts: int = 1
    ranks_per_host: int = 8
    timeout_min: int = 60
    partition: str | None = None
    account: str | None = None
    cpus_per_task: int | None = None
    gpus_per_host: int | None = None
    setup: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    folder: str = MISSING

    def __post_init__(self) -> None:
        at_least_one(self, "hydra.launcher.", "num_hosts", "ranks_per_host", "timeout_min", "cpus_per_task")
        if self.executor not in EXECUTORS:
            raise ConfigError(f"hydra.launcher.executor={self.executor}: one of {', '.join(EXECUTORS)}")

    def run(self, request: Request) -> list[Record]:
        """The records of a request, run by a job; this waits for its end.

        Raises ConfigError if the request has no ranks or there is no SLURM here, and RunFailed if the job broke, with
        the last words of its first failed task.
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
        except Exception as error:  # submitit's own kinds: killed, timed out, never pickled
            what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise RunFailed(f"job {job.job_id}: {what}; its logs are in {self.folder}") from None
        rows = [json.loads(line) for _, lines, _ in answers for line in lines]
        if not rows:
            host, words = next(((host, said) for host, (status, _, said) in enumerate(answers) if status), (0, ""))
            raise RunFailed(f"job {job.job_id} left no record; host {host} said last: {words}")
        return rows

    def executor_here(self) -> Any:
        """The executor that submits jobs; raises ConfigError without submitit, or without SLURM."""
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
    """The launcher of a composed configuration, if it is this one; ConfigError for a key or value of none."""
    return typed(Slurm, dict(launcher)) if launcher.get("_target_") == TARGET else None


def refuse_without_slurm(launcher: Mapping[str, Any]) -> None:
    """Refuse Hydra's launcher for SLURM on a host that is on no SLURM cluster: a ConfigError."""
    if str(launcher.get("_target_")).endswith("submitit_launcher.SlurmLauncher") and shutil.which("srun") is None:
        raise ConfigError(
            "hydra/launcher=submitit_slurm: this host has no srun, so it is on no SLURM cluster; give the command on a "
            "login node, or take hydra/launcher=submitit_local for processes of this host"
        )
    if "submitit" in str(launcher.get("_target_")):
        with suppress(ImportError):  # of which Hydra tells
            import_submitit()


def import_submitit() -> Any:
    """submitit, without its log's handler on stdout; ImportError if it is not installed."""
    submitit = importlib.import_module("submitit")
    log = logging.getLogger("submitit")
    for handler in [handler for handler in log.handlers if handler.name == "submitit_out"]:
        log.removeHandler(handler)
    return submitit


def run_task(ranks_per_host: int, overrides: Sequence[str]) -> Answer:
    """Run one task on its host: torchrun with the host's ranks."""
    job = importlib.import_module("submitit").JobEnvironment()
    hosts = list(job.hostnames)
    if len(hosts) != job.num_tasks:  # processes of one host stand for hosts
        hosts = ["127.0.0.1"] * job.num_tasks
    arguments = torchrun_of_task(hosts, job.global_rank, job.job_id, ranks_per_host, overrides)
    ended = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    print(ended.stderr, file=sys.stderr)  # to the job's log
    records = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    return ended.returncode, records, " | ".join(_last_words(ended.stderr))


def _last_words(text: str) -> list[str]:
    """Our own words if there are any; torchrun's come after them and say less."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("rpbench: ")]
    return (ours or lines)[-_LAST_LINES:]
