"""Figures of one accelerator, from `conf/gpu/`, and of SSDs, from `conf/ssd/`.

Every figure has an origin, a source and an uncertainty.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rpbench.cost.hardware.declared import declarations
from rpbench.places import CONF, file_of, files_of
from rpbench.registry import unknown_name
from rpbench.untrusted import is_finite
from rpbench.yaml_file import read_keys

KERNELS = ("flash1", "flash2", "flash3")  # generations of fused attention; flash3: the device's best in 2025
IN_MACHINE = {  # names of figures in a machine -> in a device
    "device_memory_bytes": "memory_bytes",
    "matmul_flops_per_s": "flops_16",
    "wide_matmul_flops_per_s": "flops_16",
    "matmul_efficiency": "sustained_16",
    "wide_matmul_efficiency": "sustained_16",
    "attention_efficiency": "attention_flops_per_s",
    "memory_bytes_per_s": "memory_bytes_per_s",
    "memory_efficiency": "sustained_memory",
    "intra_bytes_per_s": "link_bytes_per_s",
}
MAKERS = ("nvidia", "geforce", "quadro", "tesla", "rtx", "amd", "radeon", "instinct", "pro", "intel", "huawei")
_EFFICIENCIES = ("matmul_efficiency", "wide_matmul_efficiency", "attention_efficiency", "memory_efficiency")
EAGER = ("matmul_flops_per_s", *_EFFICIENCIES)
_NO_NUMBERS = ("name", "declared", "attention_flops_per_s", "peer_to_peer", "machine", "usual", "eager")
_OF_SSD = ("bytes", "read_bytes_per_s", "write_bytes_per_s", "endurance_bytes")
T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """One accelerator; peaks are dense. ValueError for a number that is not finite and above 0, or a share above 1."""

    name: str
    # flops_16, flops_8, flops_4: matrix peaks in 16, 8 and 4 bits; None: not supported
    flops_16: float
    memory_bytes: int  # by the driver where that is known, else by the data sheet
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to other devices of its domain, one way
    multiprocessors: int  # units that compute the tiles of a product
    # sustained_16, sustained_8, sustained_4: shares of the peaks that large products reach
    sustained_16: float
    # of fused attention, forward, by generation of the kernel
    attention_flops_per_s: Mapping[str, float] = field(hash=False)
    flops_8: float | None = None
    flops_4: float | None = None
    sustained_8: float = 0.6
    sustained_4: float = 0.5
    sustained_memory: float = 0.85  # share of the memory's bandwidth that element-wise kernels reach
    # to its host, one way, nominal; None: as machines have it where nothing is said
    host_link_bytes_per_s: float | None = None
    # of the memory of its own processor, under an optimizer or copies; None: it has none
    host_bytes_per_s: float | None = None
    peer_to_peer: bool = True  # whether devices copy to each other without the host in between
    machine: str | None = None  # its usual machine in `conf/cluster/`; None: no file has it
    usual: bool = False  # whether it is chosen where a name fits several devices of a chip
    # figures that differ under the eager kernels of the RoundPipe paper's systems, by their names in a machine
    # (`EAGER`): products may be summed in 16 bits there, at twice the rate on GeForce
    eager: Mapping[str, float] = field(default_factory=dict, hash=False)
    # for each number its origin; see `rpbench.cost.hardware.declared`
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_numbers(self, "gpu", [each.name for each in fields(self) if each.name not in _NO_NUMBERS])
        rates = self.attention_flops_per_s
        if not isinstance(rates, Mapping) or not rates or not set(rates) <= set(KERNELS):
            raise ValueError(f"gpu.attention_flops_per_s of {self.name}: rates of {', '.join(KERNELS)}, at least one")
        for name, value in self.eager.items():
            if name not in EAGER or not is_finite(value) or value <= 0:
                raise ValueError(f"gpu.eager.{name}={value!r} of {self.name}: a number above 0 of {', '.join(EAGER)}")
        declarations(self.declared)

    def figures(self) -> dict[str, Any]:
        """Its figures by their names in a machine."""
        found = {name: getattr(self, own) for name, own in IN_MACHINE.items()}
        found["attention_efficiency"] = min(1.0, self.attention_rate("flash2") / self.flops_16)
        if not self.peer_to_peer:
            found["intra_bytes_per_s"] = None
        if self.host_link_bytes_per_s is not None:
            found["host_to_device_bytes_per_s"] = self.host_link_bytes_per_s
        return {**found, **self.eager}

    def with_figures(self, given: Mapping[str, Any]) -> "Device":
        """The device with a machine's figures, by their names there; None: the device's own."""
        own, changed = self.figures(), dict[str, Any]()
        for name, field_name in IN_MACHINE.items():
            value = given.get(name)
            if value is None or value == own.get(name):
                continue
            if name == "attention_efficiency":
                scale = value / own[name]
                changed[field_name] = {kernel: rate * scale for kernel, rate in self.attention_flops_per_s.items()}
            elif name in self.eager:  # of kernels that sum in another precision: changed in proportion
                changed[field_name] = getattr(self, field_name) * value / own[name]
            else:
                changed[field_name] = value
        return replace(self, **changed) if changed else self

    def origins(self) -> dict[str, Any]:
        """Origins of `figures`, by the same names."""
        own = {name: name if name in self.eager else each for name, each in IN_MACHINE.items()}
        own |= {"host_to_device_bytes_per_s": "host_link_bytes_per_s", "host_bytes_per_s": "host_bytes_per_s"}
        return {name: self.declared[each] for name, each in own.items() if each in self.declared}

    def attention_rate(self, kernel: str) -> float:
        """FLOP/s of fused attention, forward; for a missing generation, of the one before, else of the oldest."""
        known = self.attention_flops_per_s
        older = [name for name in KERNELS[: KERNELS.index(kernel) + 1] if name in known]
        return known[older[-1]] if older else known[next(name for name in KERNELS if name in known)]

    def matmul_rate(self, bits: int) -> float:
        """FLOP/s that large products reach; ValueError if the device has no units of this precision."""
        peak = {16: self.flops_16, 8: self.flops_8, 4: self.flops_4}[bits]
        if peak is None:
            raise ValueError(f"{self.name} has no {bits}-bit matrix units; take precision=bf16")
        return peak * {16: self.sustained_16, 8: self.sustained_8, 4: self.sustained_4}[bits]


@dataclass(frozen=True)
class Ssd:
    """The SSDs of a host together, with evenly distributed data. They read or write, not both at a time.

    Raises ValueError for a number that is not finite and above 0.
    """

    name: str
    bytes: float  # capacity
    # read_bytes_per_s, write_bytes_per_s: sustained
    read_bytes_per_s: float
    write_bytes_per_s: float
    endurance_bytes: float | None = None  # that may be written in their lifetime; None: not known
    # for each number its origin; see `rpbench.cost.hardware.declared`
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_numbers(self, "ssd", _OF_SSD)
        declarations(self.declared)

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Seconds to read and write so many bytes, without other traffic."""
        return read_bytes / self.read_bytes_per_s + written_bytes / self.write_bytes_per_s

    def days(self, written_bytes: float, seconds: float) -> float | None:
        """Days until `endurance_bytes` are written, at `written_bytes` every `seconds`; None: not known, or never."""
        if self.endurance_bytes is None or not written_bytes:
            return None
        return self.endurance_bytes / written_bytes * seconds / 86_400


def _check_numbers(own: "Device | Ssd", group: str, names: Sequence[str]) -> None:
    for name in names:
        if (value := getattr(own, name)) is None:
            continue
        if not is_finite(value) or value <= 0:
            raise ValueError(f"{group}.{name}={value!r} of {own.name}: a finite number above 0")
        if name.startswith("sustained") and value > 1:
            raise ValueError(f"{group}.{name}={value!r} of {own.name}: a share of the peak, at most 1")


def ssds_named(text: str) -> Ssd:
    """SSDs of a file in ssd/, such as `samsung_990_pro_4tb`, or several: `2x_samsung_990_pro_4tb`.

    Raises ValueError for an unknown name, with the nearest, or a user's file that describes no SSD.
    """
    count, name = found.groups() if (found := re.fullmatch(r"([1-9]\d*) ?x[ _]?(.+)", text)) else ("1", text)
    path = file_of("ssd", name)
    if path is None:
        raise ValueError(unknown_option("ssd", name, [each.stem for each in files_of("ssd")]))
    one = _of_file(path, Ssd, "ssd")
    several = {key: value and int(count) * value for key in _OF_SSD for value in (getattr(one, key),)}
    return replace(one, name=text, **several)


def device(name: str) -> Device:
    """The accelerator of a file in gpu/, by its name as people write it: `L40S`, `RTX 4090`, `A100 SXM4 80GB`.

    Raises ValueError for a name that fits several files, with these, or none, with the nearest, or a user's file that
    describes no accelerator.
    """
    known = [path.stem for path in files_of("gpu")]
    fitting = [name] if name in known else [each for each in known if _fits(name, each)]
    if len(fitting) > 1:
        fitting = [each for each in fitting if device(each).usual] or fitting
    if not fitting:
        raise ValueError(unknown_option("gpu", name, known))
    if len(fitting) > 1:
        raise ValueError(f"gpu={name}: there are {len(fitting)} of them; say which: {', '.join(fitting)}")
    path = file_of("gpu", fitting[0])
    assert path is not None
    return _of_file(path, Device, "gpu")


@cache
def _of_file(path: Path, kind: type[T], group: str) -> T:
    values = _numbers(read_keys(path))
    each = fields(kind)  # type: ignore[arg-type]  # a dataclass
    known = [own.name for own in each]
    for key in values:
        if key not in known:
            raise ValueError(f"{path}: {unknown_name(f'key of {group}', key, known)}")
    needed = [own.name for own in each if own.default is MISSING and own.default_factory is MISSING]
    if missing := [own for own in needed if values.get(own) is None]:
        way = "`rpbench new gpu NAME` writes an example of each" if group == "gpu" else "see those of conf/ssd/"
        raise ValueError(f"{path} has no {', '.join(missing)}; {way}")
    return kind(**values)


def _fits(asked: str, name: str) -> bool:
    """Whether a file's name fits the name asked for: the chip in full (an L40 is no L40S), other words by prefix."""
    chip, *others = name.split("_")
    words = [word for word in re.split(r"[^a-z0-9]+", asked.lower()) if word]
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            spelled = "".join(words[start:end])
            if spelled == chip or (start == 0 and f"rtx{spelled}" == chip):
                return all(any(other.startswith(word) for other in others) for word in words[end:])
        if words[start] not in MAKERS:
            break
    return False


def unknown_option(what: str, name: str, known: list[str]) -> str:
    """The message for an unknown name, with the known ones that begin like it, or else the nearest."""
    same = [each for each in known if each.startswith(name.lower())]
    if not same:
        return unknown_name(what, name, known)
    return f"unknown {what} {name!r}; did you mean {' or '.join(same)}? Known: {', '.join(known)}"


def names(folder: str) -> list[str]:
    """The options of a folder of `conf/`."""
    return sorted(path.stem for path in (CONF / folder).glob("*.yaml"))


def read(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file; texts such as 312.0e12 become numbers."""
    found: dict[str, Any] = _numbers(yaml.safe_load(path.read_text()))
    return found


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    if isinstance(value, str) and value[:1].isdigit():
        try:
            return float(value)  # YAML 1.1 asks for a sign in the exponent
        except ValueError:
            return value
    return value
