"""Calibration: what a machine's devices do, by operators of one kind and by layers of probes on the engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from rpbench.engine.measure.other_load import ForeignLoad
from rpbench.engine.measure.probes import (
    HALVED_ON_CORES,
    HALVED_ON_GPUS,
    ON_CORES,
    ON_GPUS,
    Probe,
    Shares,
    Times,
    halves_on_cores,
    halves_on_gpu,
    probe_on_cores,
    probe_on_gpu,
)
from rpbench.engine.measure.rates import Rates, measure_rates
from rpbench.engine.measure.stopwatch import CoreStopwatch, GpuStopwatch

Told = Callable[[str], None]

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Args:
        rates: of one device while all are busy.
        probes: with the seconds that the parts of the engine's work took.
        halves: what the two halves of a split backward take over the whole.
        foreign_cores: cores that other programs kept busy meanwhile; None where the system does not say.
    """

    rates: Rates
    probes: Sequence[tuple[Probe, Times]]
    halves: Shares
    foreign_cores: float | None


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ValueError: unless it is `cpu`, or `cuda` where torch sees a GPU.
    """
    if device not in DEVICES:
        raise ValueError(f"device={device}: one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no CUDA device; use device=cpu")


def calibrate_cores(num_devices: int, tell: Told, probes: Sequence[Probe] = ON_CORES, **sizes: int) -> Calibration:
    """Calibrate devices that are threads with one core each.

    Args:
        tell: told a line before each thing that is measured.
        sizes: of the operators, as `measure_rates` takes them.
    """
    with ForeignLoad() as foreign:
        tell(f"rates of {num_devices} cores at once")
        with CoreStopwatch(num_devices) as watch:
            rates = measure_rates(watch, **sizes)
        found = []
        for probe in probes:
            tell(f"layers of width {probe.model.hidden} on {probe.num_tokens} tokens")
            found.append((probe, probe_on_cores(probe, num_devices)))
        tell("backwards in halves")
        halves = _mean(halves_on_cores(probe, num_devices) for probe in HALVED_ON_CORES)
    return Calibration(rates, found, halves, foreign.cores)


def calibrate_gpu(
    tell: Told,
    watch: Any | None = None,
    probes: Sequence[Probe] = ON_GPUS,
    halved: Sequence[Probe] = HALVED_ON_GPUS,
    **sizes: int,
) -> Calibration:
    """Calibrate the first GPU.

    Args:
        watch: its stopwatch, if not that of torch.cuda.
    """
    with ForeignLoad() as foreign, watch or GpuStopwatch() as clock:
        tell("rates of the GPU and its link")
        rates, found = measure_rates(clock, **sizes), []
        for probe in probes:
            tell(f"layers of width {probe.model.hidden} on {probe.num_tokens} tokens")
            found.append((probe, probe_on_gpu(probe, clock)))
        tell("backwards in halves")
        halves = _mean(halves_on_gpu(probe, clock) for probe in halved)
    return Calibration(rates, found, halves, foreign.cores)


def _mean(shares: Iterable[Shares]) -> Shares:
    """Of both halves; a GPU that hides one behind the other may give next to nothing for it."""
    firsts, seconds = zip(*shares, strict=True)
    return max(0.0, mean(firsts)), max(0.0, mean(seconds))
