"""The verb calibrate: rates of this machine, written as a cluster file that `cluster=` takes."""

import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rpbench.cost.analytic import PARTS, analytic_times
from rpbench.cost.basis import make_basis
from rpbench.cost.hardware import NUMBERS, Cluster
from rpbench.harness.config import CONF, ConfigError, load
from rpbench.harness.provenance import hardware, now
from rpbench.harness.record import write_atomically

DEFAULT_NAME = "this_machine"


def calibrate(arguments: Sequence[str]) -> Path:
    """Measure the machine and write `NAME.yaml`; returns where it is.

    Args:
        arguments: `name=`, `device=cpu|cuda`, `out=FOLDER` (default: where `cluster=` looks).

    Raises:
        ConfigError: for an unknown option, a name that is no name, or one that would replace a shipped file.
        ValueError: for a device that is not there.
    """
    options = dict(item.partition("=")[::2] for item in arguments)
    unknown = set(options) - {"name", "device", "out"}
    if unknown:
        raise ConfigError(f"calibrate takes name=NAME, device=cpu|cuda and out=FOLDER, not {sorted(unknown)[0]!r}")
    name, folder = options.get("name", DEFAULT_NAME), Path(options.get("out", CONF / "cluster"))
    _check_name(name, folder)
    from rpbench.engine.calibration import measure_machine  # torch

    device = options.get("device", "cpu")
    measured = {
        field.name: getattr(found, field.name) for found in [measure_machine(device)] for field in fields(found)
    }
    path = folder / f"{name}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _yaml(name, device, measured))
    return path


def _check_name(name: str, folder: Path) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ConfigError(f"name={name!r}: letters, digits and underscores, such as name={DEFAULT_NAME}")
    path = folder / f"{name}.yaml"
    if path.exists() and "python -m rpbench calibrate" not in path.read_text(encoding="utf-8").splitlines()[0]:
        raise ConfigError(f"name={name}: {path} was not written by calibrate; take another name")


def _yaml(name: str, device: str, measured: dict[str, float]) -> str:
    figures = _figures(device, measured)
    made = Cluster(name=name, **figures, corrections={})  # type: ignore[arg-type]
    corrections = _corrections(made, measured)
    machine = ", ".join(f"{key} {value}" for key, value in hardware().items() if isinstance(value, str | int))
    lines = [f"# python -m rpbench calibrate name={name} device={device}, {now()}", f"# {machine}", f"name: {name}"]
    lines.append("published_name: null")
    lines += [f"{key}: {_number(figures.get(key))}" for key in NUMBERS]
    lines.append("corrections:   # measured over counted time of a probe model's parts")
    lines += [f"  {part}: {value:.4f}" for part, value in corrections.items()]
    lines.append("declared:")
    source = f"python -m rpbench calibrate on this machine, device={device}"
    lines += [
        f'  {key}: {{origin: measured, within: 0.05, source: "{source}"}}'
        for key, value in figures.items()
        if value is not None
    ]
    return "\n".join(lines) + "\n"


def _figures(device: str, measured: dict[str, float]) -> dict[str, float | int | None]:
    """The fields of a cluster; rates are as achieved, so the shares of the peaks are 1."""
    figures: dict[str, float | int | None] = {
        key: measured[key]
        for key in (
            "matmul_flops_per_s",
            "wide_matmul_flops_per_s",
            "memory_bytes_per_s",
            "copy_bytes_per_s",
            "host_bytes_per_s",
            "launch_s",
        )
    }
    share = measured["attention_flops_per_s"] / measured["wide_matmul_flops_per_s"]
    figures |= {
        "matmul_efficiency": 1.0,
        "wide_matmul_efficiency": 1.0,
        "attention_efficiency": min(1.0, share),
        "memory_efficiency": 1.0,
        "host_to_device_bytes_per_s": measured["copy_bytes_per_s"],
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if device == "cuda":
        import torch

        figures["num_devices"] = torch.cuda.device_count()
        figures["device_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    else:
        figures["num_devices"] = len(os.sched_getaffinity(0))
    return figures


def _corrections(made: Cluster, measured: dict[str, float]) -> dict[str, float]:
    from rpbench.engine.calibration import PROBE, PROBE_SEQUENCES

    cost = load(["cost=analytic"]).cost
    basis = make_basis(made, cost["constants"], cost["declared"])
    times = analytic_times(PROBE, PROBE_SEQUENCES * PROBE.seq_len, basis)
    launch = measured["launch_s"]
    counted = (times.forward[0] - launch, times.backward[0] - launch, times.head_forward, times.head_backward)
    spare = (launch, launch, 0.0, 0.0)
    return {
        part: max(0.0, measured[f"{part}_s"] - extra) / value
        for part, value, extra in zip(PARTS, counted, spare, strict=True)
    }


def _number(value: float | int | None) -> str:
    if value is None:
        return "null"
    return str(value) if isinstance(value, int) else f"{value:.6g}" if value < 1e5 else f"{value:.6e}"
