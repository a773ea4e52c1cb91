"""A device, links and software without quirks: seconds are FLOPs over the rate, or bytes over the bandwidth."""

from dataclasses import replace

from rpbench.cost.hardware.device import Device
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.layers.layer_seconds import Setting
from rpbench.mesh.layout import Mesh
from rpbench.mesh.software import Software
from rpbench.workload.architecture import Architecture

NEVER, RATE, BANDWIDTH, RING, CARD = 1e-30, 1e12, 1e9, 50e9, 10e9
# Nothing is lost to thin products, launches or the host, and links are reached in full.
NO_LOSS = dict.fromkeys(("narrow", "shallow", "tokens", "launch_s", "layer_s", "dispatch_s"), NEVER) | dict.fromkeys(
    ("intra", "inter", "grouped", "imbalance"), 1.0
)
PLAIN = Software("plain", attention="flash2", passes=10.0, loss_bytes=8.0, pad_vocab=256, constants=NO_LOSS)
# One multiprocessor: tiles fill it whenever sizes are multiples of 256.
COMPUTES = Device("computes", RATE, 10**12, 1e30, CARD, 1, 1.0, {"flash2": 1e30}, sustained_memory=1.0)
MOVES = replace(COMPUTES, name="moves", flops_16=1e30, memory_bytes_per_s=BANDWIDTH)
OWN = Architecture("small", 2, 1024, 8, 32000, key_value_heads=4, inner=4096)
TOKENS = 1024


def plain_machine(num_devices, device=COMPUTES, node=8):
    """So many devices in nodes without latency."""
    return Machine(
        "plain",
        gpu=device,
        num_devices=num_devices,
        devices_per_node=min(node, num_devices),
        collective_bytes_per_s=RING,
        intra_bytes_per_s=RING,
        inter_bytes_per_s=CARD,
        intra_latency_s=0.0,
        inter_latency_s=0.0,
    )


def setting(own=OWN, device=COMPUTES, mesh=None, software=PLAIN, **options):
    """A microbatch of one sequence."""
    mesh = mesh or Mesh()
    where = plain_machine(mesh.num_devices, device)
    return Setting(own, where, mesh, software, seq_len=TOKENS, sequences=1, **options)
