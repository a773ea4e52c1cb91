"""Machine: one or more hosts (nodes), with their devices, links, memory, SSDs and price.

Figures of devices come from `conf/gpu/` where the machine names one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

from rpbench.cost.hardware.collective_rates import CollectiveRate, collective_rates
from rpbench.cost.hardware.device import IN_MACHINE, Device, Ssd, device, names, read, ssds_named, unknown_option
from rpbench.cost.hardware.measured import MEASURED
from rpbench.cost.rings import ring_hops
from rpbench.places import CONF
from rpbench.registry import check_known, unknown_name
from rpbench.untrusted import is_finite

_NO_NUMBERS = ("name", "published_name", "gpu", "ssd", "device_speeds", "measured", "collectives", "declared")
_MAY_BE_0 = ("transfer_latency_s", "intra_latency_s", "inter_latency_s", "domain")

COLLECTIVE_SHARE = 0.8  # of a direct link's bandwidth, reached by rings on the shipped machines
COPIED_SHARE = 0.66  # of the nominal link to the host, reached by copies there
# Assumed figures of a host for those not given, one way where it is a link: value, relative deviation, source.
_USUAL: Mapping[str, tuple[float, float, str]] = {
    "host_to_device_bytes_per_s": (32.0e9, 0.3, "PCIe 4.0 x16, nominal"),
    "host_bytes_per_s": (150.0e9, 0.5, "two sockets with eight channels of DDR4 each, under copies"),
    "inter_bytes_per_s": (25.0e9, 0.5, "one 200 Gb/s card for each device"),
    "reserved_memory_bytes": (1_000_000_000, 0.5, "context and libraries of one process"),
}


@dataclass(frozen=True)
class Machine:
    """Hosts and their devices, all of one kind. None: *without limit* for memory and rates, *not known* for others.

    Raises ValueError for a number that is not finite and above 0, a share above 1, or devices that do not fill nodes.
    """

    name: str  # as in `conf/cluster/`
    num_devices: int | None = None  # of all nodes; None: as many as a run asks for
    device_memory_bytes: int | None = None  # memory of one device
    matmul_flops_per_s: float | None = None  # peak rate of one device in the precision of the workload
    # one way, one device alone on its link; nominal where `copy_bytes_per_s` is known
    host_to_device_bytes_per_s: float | None = None
    price_usd_per_hour: float | None = None  # rent of the whole machine
    # of devices that differ, over that of the device on which costs were measured; None: all are equal. They divide
    # the time of work, not that of transfers
    device_speeds: tuple[float, ...] | None = None
    device_to_host_bytes_per_s: float | None = None  # the other way; None: as fast
    # between two devices of a domain, one way; None: through the host, as fast as to it
    intra_bytes_per_s: float | None = None
    transfer_latency_s: float = 0.0  # from the start of a transfer to its first byte
    devices_per_root_complex: int | None = None  # neighbours that share a PCIe root complex; None: each has its own
    root_complex_bytes_per_s: float | None = None  # of all its devices together, one way; None: without limit
    host_memory_bytes_per_s: float | None = None  # of all devices together, both ways; None: `host_bytes_per_s`
    published_name: str | None = None  # the machine's name in `analysis/published/`; None: without published numbers
    reserved_memory_bytes: int | None = None  # of a device's memory, for contexts and libraries of a process
    # peak where products are summed in fp32; lower than the other on consumer devices
    wide_matmul_flops_per_s: float | None = None
    # matmul_efficiency, wide_matmul_efficiency, attention_efficiency, memory_efficiency: shares of the peaks that
    # large products (of either kind), fused attention and element-wise kernels reach
    matmul_efficiency: float | None = None
    wide_matmul_efficiency: float | None = None
    attention_efficiency: float | None = None
    memory_bytes_per_s: float | None = None  # of a device's own memory, read and write together
    memory_efficiency: float | None = None
    copy_bytes_per_s: float | None = None  # reached by one device from or to pinned host memory, one way
    # reached by each device in a ring collective inside a domain ("bus bandwidth"); None: a share of the links, which
    # a framework's file gives
    collective_bytes_per_s: float | None = None
    # traffic of the host's memory under an optimizer or many copies, all devices together
    host_bytes_per_s: float | None = None
    host_memory_bytes: int | None = None  # memory of a host
    launch_s: float | None = None  # time of a layer on its device beside its operators: interpreter and launches
    gpu: Device | None = None  # kind of its devices; None where only figures are known, as of a calibrated machine
    ssd: Ssd | None = None  # the SSDs of a host; None: training may use none
    devices_per_node: int | None = None  # of one host; None: all
    domain: int = 0  # devices joined by the fast links; 0: those of a node
    inter_bytes_per_s: float | None = None  # a device's part of its node's network cards, one way
    # intra_latency_s, inter_latency_s: of one hop of a collective
    intra_latency_s: float = 3e-6
    inter_latency_s: float = 10e-6
    # constants of `cost=analytic` that replace the general ones (`rpbench.cost.hardware.measured`); empty where the
    # machine was not calibrated (`python -m rpbench calibrate`)
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    # rates that replace those of links (`rpbench.cost.hardware.collective_rates`), measured over several ranks of a
    # host by `python -m rpbench calibrate ranks=N`
    collectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    # for each number its origin; see `rpbench.cost.hardware.declared`
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"cluster.{name}={value!r}: a whole number of at least 1, or null for no limit")
        for name in NUMBERS:
            value = getattr(self, name)
            if name not in _COUNTS and value is not None and not (is_finite(value) and value > 0):
                why = "; a link of bandwidth 0 never ends a transfer" if name.endswith("bytes_per_s") else ""
                raise ValueError(f"cluster.{name}={value!r}: a finite number above 0, or null if there is none{why}")
        for name in _MAY_BE_0:
            if not (is_finite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"cluster.{name}={value!r}: 0 or more")
        if (room := self.usable_memory_bytes) is not None and room <= 0:
            raise ValueError(
                f"cluster.device_memory_bytes={self.device_memory_bytes}: bytes, such as 24e9; processes reserve "
                f"{self.reserved_memory_bytes:,} of them (cluster.reserved_memory_bytes)"
            )
        if not isinstance(self.published_name, str | None):
            raise ValueError(f"cluster.published_name={self.published_name!r:.80}: a paper's word for it, or null")
        self._check_mappings()
        for name in NUMBERS:
            if name.endswith("efficiency") and (getattr(self, name) or 0) > 1:
                raise ValueError(f"cluster.{name}={getattr(self, name)!r}: a share of the peak, at most 1")
        if (speeds := self.device_speeds) is not None:
            if not (isinstance(speeds, list | tuple) and speeds and all(is_finite(v) and v > 0 for v in speeds)):
                rule = "a list of finite numbers above 0, such as [1,1,0.5]; or null"
                raise ValueError(f"cluster.device_speeds={speeds!r}: {rule}")
            object.__setattr__(self, "device_speeds", tuple(speeds))
        if (self.devices_per_root_complex is None) != (self.root_complex_bytes_per_s is None):
            raise ValueError(
                f"cluster.devices_per_root_complex={self.devices_per_root_complex} with "
                f"cluster.root_complex_bytes_per_s={self.root_complex_bytes_per_s}: who shares, and how much; give "
                "both, or null for both"
            )
        each, count = self.devices_per_node, self.num_devices
        if each is not None and count is not None and count > each and count % each:
            nearest = count - count % each
            raise ValueError(f"num_devices={count} do not fill nodes of {each}; take {nearest} or {nearest + each}")
        if self.domain and each is not None and self.domain % each and self.num_nodes > 1:
            raise ValueError(f"cluster.domain={self.domain}: whole nodes of {each} devices, or 0 for one node")

    def _check_mappings(self) -> None:
        for name in ("measured", "collectives", "declared"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise ValueError(f"cluster.{name}={value!r:.80}: keys with values, or {{}} if there are none")
        for name, value in self.measured.items():
            if name not in MEASURED:
                raise ValueError(f"cluster.measured: {unknown_name('constant', name, list(MEASURED))}")
            if not (is_finite(value) and value >= 0):
                raise ValueError(f"cluster.measured.{name}={value!r}: a finite number of at least 0")
        collective_rates(self.collectives)

    @property
    def size(self) -> int:
        """Devices of all nodes; 1 where `num_devices` is None."""
        return self.num_devices or 1

    @property
    def node_devices(self) -> int:
        """Devices of one host."""
        return min(self.devices_per_node or self.size, self.size)

    @property
    def num_nodes(self) -> int:
        """Hosts."""
        return self.size // self.node_devices

    @property
    def num_apart(self) -> int:
        """Hosts, but 1 if links between hosts are as fast as those inside."""
        inside = self.intra_bytes_per_s or (self.gpu and self.gpu.link_bytes_per_s)
        return 1 if inside and (self.inter_bytes_per_s or 0) >= inside else self.num_nodes

    @property
    def domain_devices(self) -> int:
        """Devices joined by the fast links."""
        return min(self.domain or self.node_devices, self.size)

    def with_devices(self, num_devices: int) -> "Machine":
        """The machine with so many devices: whole nodes, or a part of one; the price changes in proportion.

        Of devices that differ in speed, the fastest are taken, in their order. Raises ValueError if the devices do not
        fill nodes.
        """
        if num_devices < 1:
            raise ValueError(f"num_devices={num_devices}: at least 1")
        alone = num_devices <= (self.devices_per_node or num_devices)  # a host, or a part of one
        price, size = self.price_usd_per_hour, self.num_devices
        if price is not None and size is not None:
            price = price * num_devices / size
        speeds = self.device_speeds
        if speeds is not None and num_devices < len(speeds):
            fastest = sorted(enumerate(speeds), key=lambda pair: -pair[1])[:num_devices]
            speeds = tuple(speed for _, speed in sorted(fastest))
        domain = 0 if alone else self.domain
        return replace(self, num_devices=num_devices, domain=domain, price_usd_per_hour=price, device_speeds=speeds)

    @cached_property
    def device(self) -> Device:
        """One of its devices; of a machine without `gpu`, with the rates that were measured.

        Without a memory of its own, a device has an equal part of its host's. Raises ValueError if neither the kind of
        device nor its figures are known, with the way out.
        """
        if self.gpu is not None:
            return self.gpu.with_figures({name: getattr(self, name) for name in IN_MACHINE})
        shared = (self.host_memory_bytes or 0) // (self.num_devices or 1)
        own = {
            "matmul_flops_per_s": "flops_16",
            "memory_bytes_per_s": "memory_bytes_per_s",
            "copy_bytes_per_s": "link_bytes_per_s",
        }
        figures: dict[str, Any] = {in_device: self.known(name) for name, in_device in own.items()}
        return Device(
            name=f"device of {self.name}",
            **figures,
            memory_bytes=self.device_memory_bytes or shared or 1,
            multiprocessors=1,
            sustained_16=self.known("matmul_efficiency"),
            attention_flops_per_s={
                "flash2": self.known("wide_matmul_flops_per_s") * self.known("attention_efficiency")
            },
            sustained_memory=self.known("memory_efficiency"),
            declared={in_device: self.declared[name] for name, in_device in own.items() if name in self.declared},
        )

    def known(self, name: str) -> float:
        """A figure; ValueError with the way out if it is not known."""
        found: float | None = getattr(self, name)
        if found is None:
            raise ValueError(
                f"cluster={self.name} has no {name}: give cluster.{name}=NUMBER, name its devices, as in "
                "cluster.gpu=rtx4090, or measure this machine: python -m rpbench calibrate ranks=2"
            )
        return found

    @cached_property
    def rates(self) -> Mapping[str, CollectiveRate]:
        """Measured rates of collectives, by name."""
        return collective_rates(self.collectives)

    @property
    def ring_bytes_per_s(self) -> float | None:
        """Bandwidth of collectives inside a domain, measured or given; None: a share of the links."""
        return self.rates["all_gather"].bytes_per_s if self.rates else self.collective_bytes_per_s

    @property
    def hop_latency_s(self) -> float:
        """Seconds of one hop of a collective inside a domain."""
        if not self.rates:
            return self.intra_latency_s
        gather = self.rates["all_gather"]
        return gather.latency_s / ring_hops(gather.num_ranks)

    @property
    def usable_memory_bytes(self) -> int | None:
        """Memory of one device less the reserved bytes, above 0; None: no limit."""
        if self.device_memory_bytes is None:
            return None
        return self.device_memory_bytes - (self.reserved_memory_bytes or 0)

    @property
    def room_bytes(self) -> int:
        """Memory of `device`, which has some where the machine names none, less the reserved bytes."""
        return self.device.memory_bytes - (self.reserved_memory_bytes or 0)

    def link_bytes_per_s(self, lane: str) -> float | None:
        """Bandwidth of one device's link on a lane (h2d, d2h or net); None: no limit."""
        other = {"d2h": self.device_to_host_bytes_per_s, "net": self.intra_bytes_per_s}
        return other.get(lane) or self.copy_bytes_per_s or self.host_to_device_bytes_per_s

    @property
    def shared_host_bytes_per_s(self) -> float | None:
        """Bandwidth of the host's memory for all devices and its optimizer together; None: no limit."""
        return self.host_memory_bytes_per_s or self.host_bytes_per_s

    @property
    def shares_links(self) -> bool:
        """Whether transfers of different devices share a bandwidth."""
        complexes = self.devices_per_root_complex is not None and self.root_complex_bytes_per_s is not None
        return complexes or self.shared_host_bytes_per_s is not None or self.ssd is not None

    def speeds_of(self, num_devices: int) -> tuple[float, ...]:
        """The speed of each device of a run, empty if all are equal; ValueError for another number of devices."""
        speeds = self.device_speeds
        if speeds is not None and len(speeds) != num_devices:
            way_out = "give one for each, or null if all are equal"
            raise ValueError(
                f"cluster.device_speeds has {len(speeds)} numbers, the run {num_devices} devices: {way_out}"
            )
        return () if speeds is None or set(speeds) == {1} else speeds


_COUNTS = tuple(each.name for each in fields(Machine) if each.type == int | None)
# Fields with one number above 0.
NUMBERS = tuple(each.name for each in fields(Machine) if each.name not in (*_NO_NUMBERS, *_MAY_BE_0))
OLD_NAMES = {"device_to_device_bytes_per_s": "intra_bytes_per_s", "nodes": "num_devices"}


def machine_of(values: Mapping[str, Any]) -> Machine:
    """The machine of a file's keys; missing values come from its devices' file, then from `_USUAL`.

    Raises ValueError for an unknown key or device, with the nearest, or a number that cannot be.
    """
    known = sorted(each.name for each in fields(Machine))
    for key in values:
        if key in OLD_NAMES:
            raise ValueError(f"cluster.{key} is now cluster.{OLD_NAMES[key]}")
        check_known("key of cluster", key, known)
    given = {key: value for key, value in values.items() if value is not None}
    if "ssd" in given:
        given["ssd"] = ssds_named(str(given["ssd"]))
    plain = Machine(**given | {"gpu": None})  # checks the given values before others are derived
    if "gpu" not in given:
        return plain
    own = device(str(given["gpu"]))
    usual = dict(_USUAL)
    found: dict[str, Any] = {name: row[0] for name, row in usual.items()} | own.figures() | given | {"gpu": own}
    if own.host_bytes_per_s is not None and "host_bytes_per_s" not in given:  # of the processors of a host together
        numbers = filter(None, (given.get("devices_per_node"), given.get("num_devices")))
        found["host_bytes_per_s"] = own.host_bytes_per_s * min(numbers, default=1)
    if "copy_bytes_per_s" not in given:
        found["copy_bytes_per_s"] = COPIED_SHARE * found["host_to_device_bytes_per_s"]
        usual["copy_bytes_per_s"] = (0, 0.2, f"{COPIED_SHARE} of the nominal link")
    origins: dict[str, Any] = {
        name: {"origin": "assumed", "within": within, "source": source} for name, (_, within, source) in usual.items()
    }
    origins |= own.origins() | dict(given.get("declared", {}))
    figures = found.keys() | plain.measured.keys()
    return Machine(**{**found, "declared": {name: row for name, row in origins.items() if name in figures}})


def devices_named(text: str) -> dict[str, Any] | None:
    """The keys of a machine from a text such as `4x_l40s`: devices in their usual machine. None for other texts.

    Raises ValueError for a kind of device that is not known.
    """
    found = re.fullmatch(r"([1-9]\d*) ?x[ _]?(.+)", text)
    if found is None:
        return None
    count, own = int(found[1]), device(found[2])
    keys: dict[str, Any] = read(CONF / "cluster" / f"{own.machine or 'local'}.yaml")
    price, usual = keys.get("price_usd_per_hour"), keys.get("num_devices")
    rent = {"price_usd_per_hour": price * count / usual} if price and usual else {}
    return keys | {"gpu": own.name, "name": text, "num_devices": count} | rent


@cache
def machine(name: str) -> Machine:
    """The machine of `conf/cluster/<name>.yaml`, or of a text such as `4x_l40s`; ValueError for another name."""
    known = names("cluster")
    keys = read(CONF / "cluster" / f"{name}.yaml") if name in known else devices_named(name)
    if keys is None:
        raise ValueError(unknown_option("cluster", name, known))
    return machine_of(keys)
