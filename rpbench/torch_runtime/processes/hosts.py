"""Hosts: the torchrun command of each host of a run, from a scheduler's task."""

from collections.abc import Sequence

FIRST_PORT, NUM_PORTS = 20_000, 20_000  # above the ports that need rights, below those systems hand out


def torchrun_of_task(
    hostnames: Sequence[str], node_rank: int, job_id: str, ranks_per_host: int, overrides: Sequence[str]
) -> list[str]:
    """Arguments of `python -m` that a scheduler's task on one host runs.

    Jobs that share a host meet on different ports, which follow from their number.

    Args:
        hostnames: of the job's hosts; the first one is the meeting point (submitit's `JobEnvironment().hostnames`).
        node_rank: the place of this host in them.

    Raises:
        ValueError: if this host is not among them, or a host has no rank.
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
