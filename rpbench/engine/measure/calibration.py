"""Calibration: what a machine's devices do, by operators of one kind and by layers of probes on the engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from rpbench.engine.measure.other_load import ForeignLoad
from rpbench.engine.measure.probes import (
    DRY,
    HALVED_DRY,
    HALVED_ON_ACCELERATORS,
    HALVED_ON_CORES,
    ON_ACCELERATORS,
    ON_CORES,
    Probe,
    Shares,
    Times,
    halves_on_accelerator,
    halves_on_cores,
    probe_on_accelerator,
    probe_on_cores,
)
from rpbench.engine.measure.rates import OF_ACCELERATORS, OF_CORES, Rates, Sizes, measure_rates, peer_rate
from rpbench.engine.measure.stopwatch import AcceleratorStopwatch, CoreStopwatch

Told = Callable[[str], None]

DEVICES = ("cpu", "accelerator")


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Args:
        rates: of one device while all are busy.
        probes: with the seconds that the parts of the engine's work took.
        halves: what the two halves of a split backward take over the whole.
        foreign_cores: cores that other programs kept busy meanwhile; None where the system does not say.
        peer_bytes_per_s: from one accelerator to another; None where there is no other.
        issues_ahead: whether the host issues work ahead of the devices.
    """

    rates: Rates
    probes: Sequence[tuple[Probe, Times]]
    halves: Shares
    foreign_cores: float | None
    peer_bytes_per_s: float | None = None
    issues_ahead: bool = False


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ValueError: unless it is `cpu`, or `accelerator` where torch finds one.
    """
    if device not in DEVICES:
        raise ValueError(f"device={device}: one of {', '.join(DEVICES)}")
    if device == "accelerator" and not torch.accelerator.is_available():
        raise ValueError("device=accelerator: torch finds no accelerator on this machine; use device=cpu, or dry=1")


def calibrate_cores(
    num_devices: int, tell: Told, probes: Sequence[Probe] = ON_CORES, sizes: Sizes = OF_CORES
) -> Calibration:
    """Calibrate devices that are threads with one core each.

    Args:
        tell: told a line before each thing that is measured.
        sizes: of the operators.
    """
    with ForeignLoad() as foreign:
        tell(f"rates of {num_devices} cores at once")
        with CoreStopwatch(num_devices) as watch:
            rates = measure_rates(watch, sizes)
        found = []
        for probe in probes:
            tell(f"layers of width {probe.model.hidden} on {probe.num_tokens} tokens")
            found.append((probe, probe_on_cores(probe, num_devices)))
        tell("backwards in halves")
        halves = _mean(halves_on_cores(probe, num_devices) for probe in HALVED_ON_CORES)
    return Calibration(rates, found, halves, foreign.cores)


def calibrate_accelerators(
    tell: Told,
    probes: Sequence[Probe] = ON_ACCELERATORS,
    halved: Sequence[Probe] = HALVED_ON_ACCELERATORS,
    sizes: Sizes = OF_ACCELERATORS,
) -> Calibration:
    """Calibrate the first accelerator, and its link to the second.

    Args:
        sizes: of the operators.
    """
    with ForeignLoad() as foreign, AcceleratorStopwatch() as clock:
        tell("rates of the accelerator and its links")
        rates, peer, found = measure_rates(clock, sizes), peer_rate(clock, sizes.copy_bytes), []
        for probe in probes:
            tell(f"layers of width {probe.model.hidden} on {probe.num_tokens} tokens")
            found.append((probe, probe_on_accelerator(probe, clock)))
        tell("backwards in halves")
        halves = _mean(halves_on_accelerator(probe, clock) for probe in halved)
    return Calibration(rates, found, halves, foreign.cores, peer, issues_ahead=True)


def calibrate_dry(tell: Told) -> Calibration:
    """The same at tiny sizes, for accelerators that are made up: its numbers are of no use."""
    return calibrate_accelerators(tell, DRY, HALVED_DRY, Sizes(64, 2**14))


def _mean(shares: Iterable[Shares]) -> Shares:
    """Of both halves; a device that hides one behind the other may give next to nothing for it."""
    firsts, seconds = zip(*shares, strict=True)
    return max(0.0, mean(firsts)), max(0.0, mean(seconds))
