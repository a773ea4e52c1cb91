"""The verb calibrate: measure this machine, and write what was found as a cluster file that `cluster=` takes."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpbench.config.choices import ConfigError
from rpbench.places import CONF, files_of, home, places
from rpbench.records.describe import BUSY
from rpbench.records.provenance import now, usable_cores
from rpbench.records.record import check_writable, write_atomically

if TYPE_CHECKING:
    from rpbench.cost.hardware.collective_rates import CollectiveRate
    from rpbench.cost.hardware.machine import Machine

DEFAULT_NAME = "this_machine"
OPTIONS = "name=NAME, device=cpu|accelerator, num_devices=NUMBER, ranks=NUMBER, out=FOLDER and dry=NUMBER"
SAID = (
    *("matmul_flops_per_s", "wide_matmul_flops_per_s", "memory_bytes_per_s"),
    *("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "copy_bytes_per_s", "intra_bytes_per_s"),
    *("host_bytes_per_s", "launch_s"),
)

_MARK = "python -m rpbench calibrate"  # in the first line of what this has written


class RanksFailed(RuntimeError):
    """A rank between which collectives were measured died or hung."""


def calibrate(arguments: Sequence[str]) -> dict[str, Any]:
    """Measure the machine and write `NAME.yaml`; its path and contents. `usages.yaml` explains the words.

    Raises ConfigError for an unknown option, an invalid name, or one that would replace a shipped file; ValueError for
    a device that is not there, or fewer of them than ranks; RanksFailed if a rank died, or hung for half a minute: all
    have ended, and nothing is written.
    """
    options = _options(arguments)
    name, folder = options.get("name", DEFAULT_NAME), Path(options.get("out", (home() or CONF) / "cluster"))
    if folder.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"calibrate out={folder}: it takes a folder, where it writes {name}.yaml; name the file by name="
        )
    device, path = _device(options), folder / f"{name}.yaml"
    dry = _dry(options, device)
    _check_name(name, path)
    began, tell = time.monotonic(), lambda line: _say(f"measuring {line}")
    if dry:
        return {"cluster": name} | _dry_run(options, device, dry, tell)
    from rpbench.run.cluster_file import to_text

    num_devices = _num_devices(options, device)
    check_writable(folder, "out")
    cluster, answer = _measured(options, device, num_devices, tell)
    foreign_cores, within = answer["foreign_cores"], answer["within"]
    worst = max(within, key=within.get)
    _say(
        f"parts of a layer are known within {min(within.values()):.0%} to {within[worst]:.0%} ({worst}), one deviation"
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_text(cluster, f"{_MARK} name={name} device={device}, {now()}", foreign_cores))
    if (foreign_cores or 0.0) > BUSY:
        _say(f"other programs kept {foreign_cores:.2f} cores busy meanwhile: run it again on a quiet machine")
    return {"cluster": name, "path": str(path), **answer, "seconds": round(time.monotonic() - began, 1)}


def _measured(
    options: dict[str, str], device: str, num_devices: int, tell: Callable[[str], None], dry: int = 0
) -> "tuple[Machine, dict[str, Any]]":
    """The machine, and its rates, collectives, layers and load of other programs as JSON-ready data."""
    from rpbench.cost.hardware.measured import PARTS, factor_name
    from rpbench.engine.measure import calibration  # torch
    from rpbench.run.cluster_file import cluster_of, layers_of

    collectives = _collectives(options["ranks"], device, num_devices, dry, tell) if "ranks" in options else []
    devices = {"num_devices": num_devices}
    if device == "cpu":
        found = calibration.calibrate_cores(num_devices, tell)
    else:
        import torch

        found = (calibration.calibrate_dry if dry else calibration.calibrate_accelerators)(tell)
        devices["device_memory_bytes"] = torch.accelerator.get_memory_info(0)[1]
    cluster = cluster_of(options.get("name", DEFAULT_NAME), found, devices, collectives)
    return cluster, {
        "num_devices": cluster.num_devices,
        **{name: getattr(cluster, name) for name in SAID},
        "collectives": dict(cluster.collectives),
        "within": {part: cluster.declared[factor_name(part, each)]["within"] for part, (each, *_) in PARTS.items()},
        "layers": layers_of(found, devices),
        "foreign_cores": found.foreign_cores,
    }


def _dry_run(options: dict[str, str], device: str, dry: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """`_measured` on simulated accelerators: faults in its order of streams, without the meaningless numbers."""
    from rpbench.engine.stream_order.machine import Machine as Accelerators
    from rpbench.run.cluster_file import to_text
    from rpbench.run.training.on_accelerators import order_found

    with Accelerators(dry) as machine:
        cluster, answer = _measured(options, device, _num_devices(options, device), tell, dry)
    to_text(cluster, _MARK, answer["foreign_cores"])
    blank: dict[str, Any] = _blank(answer)
    return blank | order_found(machine.trace)


def _blank(value: Any) -> Any:
    """A value without its measured numbers, which are the floats."""
    if isinstance(value, dict):
        return {key: _blank(each) for key, each in value.items() if not isinstance(each, float | None)}
    return [_blank(each) for each in value] if isinstance(value, list) else value


def _options(arguments: Sequence[str]) -> dict[str, str]:
    options = dict(item.partition("=")[::2] for item in arguments)
    for key, value in options.items():
        if key not in ("name", "device", "num_devices", "ranks", "out", "dry"):
            raise ConfigError(f"calibrate takes {OPTIONS}, not {key!r}")
        if not value:
            raise ConfigError(f"{key}= has no value; calibrate takes {OPTIONS}")
    return options


def _device(options: dict[str, str]) -> str:
    device = options.get("device", "cpu")
    if device == "cuda":
        _say("device=cuda is now called device=accelerator")
        return "accelerator"
    return device


def _dry(options: dict[str, str], device: str) -> int:
    """How many accelerators to simulate; 0: none."""
    asked = options.get("dry")
    if asked is None:
        return 0
    if not asked.isdecimal() or not int(asked):
        raise ConfigError(f"dry={asked}: how many accelerators to make up, 1 or more")
    if device != "accelerator":
        raise ConfigError(f"dry={asked}: accelerators are made up with device=accelerator alone; add it")
    return int(asked)


def _check_name(name: str, path: Path) -> None:
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):  # 4x_l40s is so many devices
        raise ConfigError(f"name={name!r}: letters, digits and underscores, a letter first, as in name={DEFAULT_NAME}")
    found = [each for each in files_of("cluster") if each.parent.resolve() != path.parent.resolve()]
    others = [each for each in found if each.stem == name]
    if others and path.parent.parent.resolve() in (CONF, *places()):  # cluster= takes neither of two of one name
        raise ConfigError(
            f"name={name}: {others[0]} has this name; take another, so that cluster={name} stays that one"
        )
    if path.exists() and _MARK not in path.read_text(encoding="utf-8").partition("\n")[0]:
        raise ConfigError(f"name={name}: {path} was not written by calibrate; take another name")


def _num_devices(options: dict[str, str], device: str) -> int:
    from rpbench.engine.measure.calibration import check_device  # torch

    check_device(device)
    asked = options.get("num_devices")
    if device != "cpu":
        if asked is not None:
            raise ConfigError(f"num_devices={asked}: with device={device} they are counted; leave it out")
        import torch

        return torch.accelerator.device_count()
    cores = usable_cores()
    if asked is None:
        return cores
    if not asked.isdecimal() or not 1 <= int(asked) <= cores:
        raise ConfigError(f"num_devices={asked}: a whole number from 1 to the {cores} cores this process may use")
    return int(asked)


def _collectives(
    asked: str, device: str, num_devices: int, dry: int, tell: Callable[[str], None]
) -> "list[CollectiveRate]":
    """Rates of the collectives between several ranks of this host; on its cores where accelerators are made up."""
    from rpbench.cost.hardware.collective_rates import fit_rate
    from rpbench.engine.backends import accelerator
    from rpbench.torch_runtime.processes.diagnosis import RunFailed
    from rpbench.torch_runtime.processes.ranks import Ranks
    from rpbench.torch_runtime.shards import STALL_S, CollectiveRequest

    if not asked.isdecimal():
        raise ConfigError(f"ranks={asked}: a whole number of at least 2")
    request = CollectiveRequest(int(asked), device="cpu" if device == "cpu" or dry else accelerator.kind())
    request.check()
    if request.num_ranks > num_devices:
        raise ConfigError(f"ranks={asked}: at most one for each of the {num_devices} devices here")
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


def _say(line: str) -> None:
    print(f"calibrate: {line}", file=sys.stderr, flush=True)
