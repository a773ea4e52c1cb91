"""The verb calibrate: measure this machine, and write what was found as a cluster file that `cluster=` takes."""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpbench.config.choices import ConfigError
from rpbench.places import CONF, home
from rpbench.records.provenance import now
from rpbench.records.record import check_writable, write_atomically

if TYPE_CHECKING:
    from rpbench.cost.collective_rates import CollectiveRate

DEFAULT_NAME = "this_machine"
OPTIONS = "name=NAME, device=cpu|cuda, num_devices=NUMBER, ranks=NUMBER and out=FOLDER"
BUSY = 0.15  # cores that other programs may have before it is worth a warning

_MARK = "python -m rpbench calibrate"  # in the first line of what this has written


class RanksFailed(RuntimeError):
    """A rank between which collectives were measured died or hung."""


def calibrate(arguments: Sequence[str]) -> dict[str, Any]:
    """Measure the machine and write `NAME.yaml`; says where it is and what it holds.

    Args:
        arguments: `name=`, `device=cpu|cuda`, `num_devices=` (cores that work at the same time; default: all this
            process may use), `ranks=` (processes between which collectives are measured, for meshes; default: none),
            `out=FOLDER` (default: where `cluster=` looks, in the user's nearest place if there is one).

    Raises:
        ConfigError: for an unknown option, a name that is no name, or one that would replace a shipped file.
        ValueError: for a device that is not there, or fewer of them than ranks.
        RanksFailed: if a rank died, or hung for half a minute; all have ended, and nothing is written.
    """
    options = _options(arguments)
    name, folder = options.get("name", DEFAULT_NAME), Path(options.get("out", (home() or CONF) / "cluster"))
    if folder.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"calibrate out={folder}: it takes a folder, where it writes {name}.yaml; name the file by name="
        )
    device, path = options.get("device", "cpu"), folder / f"{name}.yaml"
    _check_name(name, path)
    from rpbench.engine.measure.calibration import calibrate_cores, calibrate_gpu, check_device  # torch
    from rpbench.run.cluster_file import cluster_of, to_text

    check_device(device)
    num_devices = _num_devices(options, device)
    check_writable(folder, "out")
    began, tell = time.monotonic(), _teller()
    collectives = _collectives(options["ranks"], device, num_devices, tell) if "ranks" in options else []
    found = calibrate_gpu(tell) if device == "cuda" else calibrate_cores(num_devices, tell)
    cluster = cluster_of(name, found, _devices(device, num_devices), collectives)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_text(cluster, f"{_MARK} name={name} device={device}, {now()}", found.foreign_cores))
    if (found.foreign_cores or 0.0) > BUSY:
        _say(f"other programs kept {found.foreign_cores:.2f} cores busy meanwhile: run it again on a quiet machine")
    return {
        "cluster": name,
        "path": str(path),
        "num_devices": cluster.num_devices,
        "matmul_flops_per_s": cluster.matmul_flops_per_s,
        "memory_bytes_per_s": cluster.memory_bytes_per_s,
        "copy_bytes_per_s": cluster.copy_bytes_per_s,
        "host_bytes_per_s": cluster.host_bytes_per_s,
        "launch_s": cluster.launch_s,
        "collectives": {each.name: each.plain() for each in collectives},
        "foreign_cores": found.foreign_cores,
        "seconds": round(time.monotonic() - began, 1),
    }


def _options(arguments: Sequence[str]) -> dict[str, str]:
    options = dict(item.partition("=")[::2] for item in arguments)
    for key, value in options.items():
        if key not in ("name", "device", "num_devices", "ranks", "out"):
            raise ConfigError(f"calibrate takes {OPTIONS}, not {key!r}")
        if not value:
            raise ConfigError(f"{key}= has no value; calibrate takes {OPTIONS}")
    return options


def _check_name(name: str, path: Path) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ConfigError(f"name={name!r}: letters, digits and underscores, such as name={DEFAULT_NAME}")
    if path.exists() and _MARK not in path.read_text(encoding="utf-8").partition("\n")[0]:
        raise ConfigError(f"name={name}: {path} was not written by calibrate; take another name")


def _num_devices(options: dict[str, str], device: str) -> int:
    """Devices that work at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "num_devices" not in options:
        return cores
    asked = options["num_devices"]
    if device == "cuda":
        raise ConfigError(f"num_devices={asked}: with device=cuda the GPUs are counted; leave it out")
    if not asked.isdecimal() or not 1 <= int(asked) <= cores:
        raise ConfigError(f"num_devices={asked}: a whole number from 1 to the {cores} cores this process may use")
    return int(asked)


def _collectives(asked: str, device: str, num_devices: int, tell: Callable[[str], None]) -> "list[CollectiveRate]":
    """Rates of the collectives between several ranks of this host."""
    from rpbench.cost.collective_rates import fit_rate
    from rpbench.torch_runtime.collectives import STALL_S, CollectiveRequest
    from rpbench.torch_runtime.diagnosis import RunFailed
    from rpbench.torch_runtime.ranks import Ranks

    if not asked.isdecimal():
        raise ConfigError(f"ranks={asked}: a whole number of at least 2")
    request = CollectiveRequest(int(asked), device=device)
    request.check()
    if device == "cpu" and request.num_ranks > num_devices:
        raise ConfigError(f"ranks={asked}: at most one for each of the {num_devices} cores that are devices here")
    tell(f"collectives of {asked} ranks")
    try:
        with Ranks(request.num_ranks, STALL_S) as ranks:
            seconds = ranks.time_collectives(request)["seconds"]
    except RunFailed as error:
        raise RanksFailed(f"ranks={asked}: {error}\nnothing was written; try again, or leave ranks= out") from None
    return [
        fit_rate(name, request.num_ranks, {int(size): each for size, each in found.items()})
        for name, found in seconds.items()
    ]


def _devices(device: str, num_devices: int) -> dict[str, int]:
    if device == "cpu":
        return {"num_devices": num_devices}
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    return {"num_devices": torch.cuda.device_count(), "device_memory_bytes": memory}


def _teller() -> Callable[[str], None]:
    return lambda line: _say(f"measuring {line}")


def _say(line: str) -> None:
    print(f"calibrate: {line}", file=sys.stderr, flush=True)
