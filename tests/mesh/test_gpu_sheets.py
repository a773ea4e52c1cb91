"""Figures of devices against their data sheets: golden values, ranges that sheets leave open, relations."""

from dataclasses import replace
from itertools import product

import pytest

from rpbench.cost.hardware.declared import declarations
from rpbench.cost.hardware.device import device as gpu
from rpbench.cost.hardware.device import names
from rpbench.cost.hardware.machine import machine, machine_of

# Dense TFLOP/s in 16 and 8 bits, HBM TB/s, GB, GB/s to other devices one way, multiprocessors: by hand, as the vendors'
# data sheets print them; two numbers are the ends of what the sheets of one device say.
SHEETS = {
    "v100_sxm2_16gb": (125, None, 0.9, 16, 150, 80),
    "v100_sxm2_32gb": (125, None, 0.9, 32, 150, 80),
    "a100_sxm4_40gb": (312, None, 1.56, 40, 300, 108),
    "a100_sxm4_80gb": (312, None, 2.04, 80, 300, 108),
    "a800_sxm4_80gb": (312, None, 2.04, 80, 200, 108),
    "h100_sxm5_80gb": (989, 1979, 3.35, 80, 450, 132),
    "h800_sxm5": (989, 1979, 3.35, 80, 200, 132),
    "h100_sxm5_96gb": (989, 1979, (2.0, 3.35), 96, 450, 132),
    "h200_sxm": (989, 1979, 4.8, 141, 450, 132),
    "b200": (2250, 4500, (7.7, 8), 180, 900, 148),
    "gb200": ((2450, 2500), (4900, 5000), 8, 186, 900, 152),
    "b300": ((2250, 2500), (4500, 5000), (7.7, 8), (270, 288), 900, (148, 152)),
    "gb300": ((2250, 2500), (4500, 5000), 8, (270, 288), 900, (148, 152)),
    "mi300x": (1307, 2614, 5.3, 192, 7 * 64, 304),
    "mi325x": (1307, 2614, 6.0, 256, 7 * 64, 304),
    "mi355x": (2500, 5000, 8.0, 288, 7 * 77, 256),
    "rtx3090ti": (80, None, 1.008, 24, (25, 32), 84),
    "rtx4080": (97.5, 195, 0.717, 16, (25, 32), 76),
    "rtx5080": (112.6, 225, 0.96, 16, (50, 64), 84),
    "a10": (125, None, 0.6, 24, 32, 72),
    "a10g": (70, None, 0.6, 24, 32, (72, 80)),
    "a30": (165, None, 0.933, 24, 32, 56),
    "a40": (149.7, None, 0.696, 48, 32, 84),
    "a6000": (154.8, None, 0.768, 48, 32, 84),
    "rtx6000_ada": (364, 728, 0.96, 48, 32, 142),
    "rtxpro6000_blackwell": (504, 1008, 1.79, 96, 64, 188),
    "l4": (121, 242, 0.3, 24, 32, 58),
    "l40": (181, 362, 0.864, 48, 32, 142),
    "l40s": (362, 733, 0.864, 48, 32, 142),
    "t4": (65, None, 0.32, 16, 16, 40),
    "v100_pcie_16gb": (112, None, 0.9, 16, 16, 80),
    "v100_pcie_32gb": (112, None, 0.9, 32, 16, 80),
    "p100_pcie_16gb": (18.7, None, 0.732, 16, 16, 56),
    "a100_pcie_40gb": (312, None, 1.555, 40, 32, 108),
    "h100_nvl_94gb": (835, 1671, 3.9, 94, 64, 132),
    "mi210": (181, None, 1.638, 64, (32, 64), 104),
    "w7900": (122.6, None, 0.864, 48, (28, 32), 96),
    "rx7900xtx": (122.8, None, 0.96, 24, (25, 32), 96),
    "gaudi2": (432, 865, 2.45, 96, 262.5, 24),
}
# GB/s to the host one way, nominal: PCIe 3.0 and 5.0 x16, NVLink-C2C (a Grace's is for one Hopper or two Blackwells).
HOST_LINKS = {
    16: ("p100_pcie_16gb", "t4", "v100_pcie_16gb", "v100_pcie_32gb", "v100_sxm2_16gb", "v100_sxm2_32gb"),
    32: ("a10", "a100_sxm4_80gb", "a6000", "l40s", "rtx3090", "rtx4090", "w7900"),
    64: (
        "b200",
        "h100_pcie_80gb",
        "h100_sxm5_80gb",
        "h200_sxm",
        "mi300x",
        "rtx5080",
        "rtx5090",
        "rtxpro6000_blackwell",
    ),
    225: ("gb200", "gb300"),
    450: ("gh200",),
}
# GB/s of the LPDDR5X of a Grace with 480 GB, nominal, and the devices that share it.
GRACES = {"gh200": (384, 1), "gb200": (512, 2), "gb300": (14_000 / 36, 2)}
FIGURES = ("flops_16", "flops_8", "memory_bytes_per_s", "memory_bytes", "link_bytes_per_s", "multiprocessors")
UNITS = (1e12, 1e12, 1e12, 1e9, 1e9, 1)

# The paper's artifact, theoretical analysis: peaks summed in 16 bits, which consumer devices reach twice as fast.
SUMMED_IN_16_BITS = {"rtx4090": 330e12, "rtx5090": 419e12}
ARTIFACT = {"a100_sxm4_80gb": (312e12, 300e9), "h100_sxm5_80gb": (989.5e12, 450e9)}  # peak, NVLink one way

# Devices of one die: equal products and units; what a line of them differs in stands in SHEETS.
DIES = (
    ("v100_sxm2_16gb", "v100_sxm2_32gb"),
    ("a100_sxm4_40gb", "a100_sxm4_80gb", "a800_sxm4_80gb", "a100_pcie_80gb", "a100_pcie_40gb"),
    ("v100_pcie_16gb", "v100_pcie_32gb"),
    ("h100_sxm5_80gb", "h800_sxm5", "h200_sxm", "h100_sxm5_96gb", "gh200"),
    ("mi300x", "mi325x"),
)
NEEDED = ("flops_16", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "multiprocessors", "sustained_16")


@pytest.fixture(scope="module")
def several_nodes():
    """The machines of several nodes, by name."""
    machines = {name: machine(name) for name in names("cluster")}
    return {name: each for name, each in machines.items() if each.num_nodes > 1}


def test_there_are_as_many_as_promised(several_nodes):
    assert len(names("gpu")) >= 48
    assert len(several_nodes) >= 10


@pytest.mark.parametrize("name", names("gpu"))
def test_every_figure_of_a_device_has_a_source_and_an_uncertainty(name):
    """What is read off a sheet is exact unless the sheets leave a range; all else says how far it may be off."""
    device = gpu(name)
    known = declarations(device.declared)
    low = [figure for figure in ("flops_8", "flops_4") if getattr(device, figure) is not None]
    low += [figure.replace("flops", "sustained") for figure in low]
    for figure in (*NEEDED, *low, "sustained_memory", "attention_flops_per_s"):
        row = known[figure]
        assert len(row.source) > 10, figure
        assert row.origin == "vendor" or row.within > 0, figure


def test_every_figure_of_a_machine_has_a_source_and_what_is_assumed_an_uncertainty(several_nodes):
    figures = ("devices_per_node", "domain", "intra_bytes_per_s", "inter_bytes_per_s", "inter_latency_s")
    for (name, each), figure in product(several_nodes.items(), figures):
        known = declarations(each.declared)[figure]
        assert known.source, (name, figure)
        assert known.origin != "assumed" or known.within > 0, (name, figure)


@pytest.mark.parametrize("name", SHEETS)
def test_figures_are_those_of_the_data_sheet(name):
    device, known = gpu(name), declarations(gpu(name).declared)
    for figure, unit, printed in zip(FIGURES, UNITS, SHEETS[name], strict=True):
        value = getattr(device, figure)
        if printed is None:
            assert value is None, figure
            continue
        low, high = printed if isinstance(printed, tuple) else (printed, printed)
        slack = 1.08 if figure == "memory_bytes" else 1.01  # sheets print GB of cards that have GiB
        assert low * unit / 1.01 <= value <= high * unit * slack, figure
        if isinstance(printed, tuple):
            assert known[figure].within > 0, f"{figure}: sheets leave a range, the file must say so"


@pytest.mark.parametrize("name", SUMMED_IN_16_BITS)
def test_consumer_devices_count_sums_in_32_bits(name):
    assert gpu(name).flops_16 == pytest.approx(SUMMED_IN_16_BITS[name] / 2, rel=0.002)


@pytest.mark.parametrize("name", ARTIFACT)
def test_the_artifact_has_the_same_peaks_and_links(name):
    assert (gpu(name).flops_16, gpu(name).link_bytes_per_s) == pytest.approx(ARTIFACT[name], rel=0.001)


@pytest.mark.parametrize("die", DIES, ids=lambda die: die[0])
def test_devices_of_one_die_have_the_same_products_and_units(die):
    assert len({(gpu(name).flops_16, gpu(name).flops_8, gpu(name).multiprocessors) for name in die}) == 1


@pytest.mark.parametrize("name", names("gpu"))
def test_half_the_bits_are_twice_the_rate(name):
    """Dense on dense; a sparse peak beside a dense one would show as four. Gaudi 3 has one rate for both."""
    device = gpu(name)
    if device.flops_8 is not None:
        assert device.flops_8 / device.flops_16 == pytest.approx(1.0 if name == "gaudi3" else 2.0, rel=0.02)
    if device.flops_4 is not None:
        assert device.flops_8 is not None
        ratio = {"b300": 3.0, "gb300": 3.0, "rtx5090": 4.0, "rtx5080": 4.0}.get(
            name, 2.0
        )  # NVFP4 dense: 14-15 PF a B300
        assert device.flops_4 / device.flops_8 == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("name", names("gpu"))
def test_what_is_reached_is_less_than_the_peak(name):
    device = gpu(name)
    for kernel, rate in device.attention_flops_per_s.items():
        assert rate < device.flops_16, kernel
    assert device.matmul_rate(16) < device.flops_16
    if device.flops_8 is not None:
        assert device.sustained_8 <= device.sustained_16  # conversions take their part


def test_newer_kernels_of_attention_are_no_slower():
    for name in names("gpu"):
        rates = [gpu(name).attention_flops_per_s.get(kernel, 0) for kernel in ("flash1", "flash2", "flash3")]
        known = [rate for rate in rates if rate]
        assert known == sorted(known), name


def test_a_machine_joins_its_devices_as_their_sheet_says(several_nodes):
    for name, found in several_nodes.items():
        assert found.intra_bytes_per_s == found.device.link_bytes_per_s, name
        assert found.inter_bytes_per_s < found.intra_bytes_per_s, name
        assert found.domain_devices % found.node_devices == 0, name


@pytest.mark.parametrize("name", ["jean_zay_a100", "dgx_a100", "dgx_h100", "a100_800gbps"])
def test_cards_are_shared_by_the_devices_of_a_node(name):
    """4 x 100 Gb/s; 8 x 200; 8 x 400; 800 Gb/s: bytes a second, over eight devices."""
    gigabits = {"jean_zay_a100": 400, "dgx_a100": 1600, "dgx_h100": 3200, "a100_800gbps": 800}[name]
    assert machine(name).inter_bytes_per_s == gigabits * 1e9 / 8 / 8


# As people write them, and as drivers print them.
SAID = {
    "rtx4090": ["RTX 4090", "rtx-4090", "4090", "NVIDIA GeForce RTX 4090"],
    "rtx3090ti": ["RTX 3090 Ti", "3090 Ti", "GeForce RTX 3090 Ti"],
    "a6000": ["A6000", "RTX A6000", "NVIDIA RTX A6000"],
    "rtx6000_ada": ["RTX 6000 Ada", "NVIDIA RTX 6000 Ada"],
    "rtxpro6000_blackwell": ["RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell"],
    "l40": ["L40", "NVIDIA L40"],
    "l40s": ["L40S"],
    "a10": ["A10"],
    "a10g": ["A10G", "NVIDIA A10G"],
    "t4": ["T4", "Tesla T4"],
    "v100_pcie_32gb": ["V100 PCIe 32GB"],
    "v100_sxm2_16gb": ["Tesla V100-SXM2-16GB"],
    "p100_pcie_16gb": ["P100", "Tesla P100-PCIE-16GB"],
    "a100_pcie_40gb": ["A100-PCIE-40GB"],
    "h100_sxm5_80gb": ["H100"],
    "h100_nvl_94gb": ["H100 NVL"],
    "w7900": ["W7900", "AMD Radeon PRO W7900"],
    "rx7900xtx": ["RX 7900 XTX", "AMD Radeon RX 7900 XTX"],
    "mi210": ["MI210", "AMD Instinct MI210"],
    "gaudi2": ["Gaudi 2", "Intel Gaudi2"],
    "ascend_910b": ["Ascend 910B"],
}


@pytest.mark.parametrize("name", SAID)
def test_a_device_is_found_as_people_write_it(name):
    assert [gpu(said).name for said in SAID[name]] == [name] * len(SAID[name])


@pytest.mark.parametrize("said", ["RTX", "NVIDIA", "A100", "L4S", "GeForce PRO", "RTX 4090 Ti", ""])
def test_a_name_that_fits_none_or_several_is_no_device(said):
    with pytest.raises(ValueError, match="gpu"):
        gpu(said)


@pytest.mark.parametrize("name", names("gpu"))
def test_figures_stay_in_ranges_that_are_built(name):
    """FLOPs for a byte of memory, rates of a link and of a unit: a slipped digit or unit leaves them."""
    device = gpu(name)
    assert 20 < device.flops_16 / device.memory_bytes_per_s < 600
    assert 0.01 < device.link_bytes_per_s / device.memory_bytes_per_s < 0.2
    assert 12e9 < device.memory_bytes < 300e9
    assert 0.3e12 < device.flops_16 / device.multiprocessors < 30e12
    assert 0.1 < device.attention_rate("flash3") / device.flops_16 < 0.95
    assert device.memory_bytes / device.memory_bytes_per_s < 0.1  # read once


def test_a_device_with_a_figure_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="a finite number above 0"):
        replace(gpu("b200"), memory_bytes_per_s=0.0)


def test_links_to_the_host_are_of_the_devices_generation():
    for gigabytes, devices in HOST_LINKS.items():
        for name in devices:
            assert machine(f"2x_{name}").host_to_device_bytes_per_s == gigabytes * 1e9, name


@pytest.mark.parametrize("name", GRACES)
def test_a_host_of_graces_has_the_memory_of_all_of_them(name):
    nominal, devices = GRACES[name]
    for number in (1, 2, 4):
        found = machine(f"{number}x_{name}").host_bytes_per_s
        assert found == pytest.approx(0.8 * nominal * 1e9 * number / devices, rel=0.02)
    words = {"name": "x", "num_devices": 16, "devices_per_node": 4, "gpu": name}
    assert machine_of(words).host_bytes_per_s == machine(f"4x_{name}").host_bytes_per_s
    assert machine_of(words | {"host_bytes_per_s": 5e9}).host_bytes_per_s == 5e9
    assert machine("4x_l40s").host_bytes_per_s == 150e9
