"""Keys without effect: what a command line sets and its run does not read, each with the reason."""

from collections.abc import Collection, Iterator
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING

from rpbench.config.choices import ConfigError, Duel, Failures, Predict, Roofline, Simulate, TorchDuel, Train
from rpbench.config.request import CONSTANTS
from rpbench.cost.hardware.basis import counted_numbers
from rpbench.cost.hardware.machine import COPIED_SHARE, Machine

if TYPE_CHECKING:
    from rpbench.config.mesh import MeshChoice
    from rpbench.config.request import Request

Idle = Iterator[tuple[Collection[str], str]]  # keys, or groups of keys, and why nothing reads them

OF_TENSORS = ("dtype", "optimizer", "seed")
OF_TEXTS = ("workload.path", "workload.text", "workload.held_out", "workload.validate_every")
# Keys that the published runs of mode=predict set themselves.
OF_SCRIPTS = (
    *("num_microbatches", "num_steps", "chunks_per_device", "partition", "recompute"),
    *("prefetch", "dispatch", "offload", "charge", "workload", "schedule."),
)
# Keys that closed forms have no place for.
OF_ORDERS = ({"schedule", "cost", "software", *OF_SCRIPTS} | {*OF_TEXTS}) - {"num_microbatches", "workload"}
# Keys of mode=failures that one kind of run has.
OF_FAILURES = {
    "simulated": (
        *("mean_between_s", "horizon_s", "horizon_steps", "detect_s", "restart_s"),
        *("store_bytes_per_s", "net_bytes_per_s"),
    ),
    "processes": ("stall_s",),
}
OF_GEMINI = ("copies", "dies")
# Figures of a cluster: of layers, of the traffic inside a host, of the way to the host, and between hosts.
LAYERS = (
    *("matmul_flops_per_s", "wide_matmul_flops_per_s", "matmul_efficiency", "wide_matmul_efficiency"),
    *("attention_efficiency", "launch_s"),
)
HOST = (
    *("host_to_device_bytes_per_s", "copy_bytes_per_s", "device_to_host_bytes_per_s", "transfer_latency_s"),
    *("devices_per_root_complex", "root_complex_bytes_per_s", "host_bytes_per_s", "host_memory_bytes_per_s"),
)
COPIES = ("host_to_device_bytes_per_s", "copy_bytes_per_s")  # of HOST, what boundary tensors without a direct link take
INSIDE = (
    *("memory_bytes_per_s", "memory_efficiency", "intra_bytes_per_s", "collective_bytes_per_s", "intra_latency_s"),
    *HOST,
)
BETWEEN = ("inter_bytes_per_s", "inter_latency_s", "domain")
OF_ROOFLINE = ("matmul_flops_per_s", "host_to_device_bytes_per_s")
RENT = "rent is counted by rpbench advise"
MEMORY = ("device_memory_bytes", "reserved_memory_bytes", "host_memory_bytes")


def without_effect(request: "Request", *, eager: bool) -> list[str]:
    """A sentence for each reason why keys of the command line change nothing.

    `eager`: whether constants of kernels count, as with `software=roundpipe` or on a calibrated machine.
    """
    found: dict[str, list[str]] = {}
    for keys, why in _idle(request, eager):
        for item in request.overrides:
            if _is_one_of(item, keys) and not any(item in known for known in found.values()):
                found.setdefault(why, []).append(item)
    return [f"{' '.join(items)} without effect: {why}" for why, items in found.items()]


def check_without_effect(request: "Request", verb: str) -> None:
    """Refuse keys of a run that change nothing under a verb that runs nothing; `show` may be of any run."""
    backend, tracker, results = request.backend and request.backend.name, request.tracker.name, Path("results")
    for key, value, default, why in (
        ("backend", backend, None, "no schedule is executed"),
        ("mode", request.mode.name, "simulate", "there is one alone"),
        ("tuning_budget", request.tuning_budget, None, "it searches more than the cut, in a run"),
        ("tracker", tracker, "none", "it is no run"),
        ("results_dir", results if verb == "profile" else request.results_dir, results, "no record is left"),
        ("force", request.force, False, "no record is left"),
        ("save_timeline", request.save_timeline, False, "no record is left"),
    ):
        if value != default and not (verb == "show" and key in ("backend", "mode", "tuning_budget")):
            given = "true" if value is True else value
            raise ConfigError(f"{key}={given} with {verb}: {why}; leave {key}= out")


def key_of(item: str) -> str:
    return item.lstrip("+").partition("=")[0]


def _is_one_of(item: str, keys: Collection[str]) -> bool:
    """Whether an override sets one of the keys, or a key of one of the groups; `schedule.` is a group's keys alone."""
    key = key_of(item)
    return any(key == each or key.startswith(each if each.endswith(".") else f"{each}.") for each in keys)


def _figures(*names: str) -> list[str]:
    return [f"cluster.{name}" for name in names]


def _idle(request: "Request", eager: bool) -> Idle:
    mode = request.mode
    if isinstance(mode, Failures):
        yield from _idle_failures(mode)
        if mode.run == "simulated":
            yield OF_TENSORS[:2], "a simulated failure has no tensors"  # the seed draws who fails, and when
            yield _figures("price_usd_per_hour"), RENT
            if request.offload == "none" and request.entry.lower is None:
                yield ["prefetch"], "no weights are streamed (offload=none)"
            if mode.net_bytes_per_s is not None:
                yield _figures("inter_bytes_per_s"), "mode.net_bytes_per_s counts between hosts"
    elif isinstance(mode, Duel | TorchDuel):
        key = "contenders" if isinstance(mode, Duel) else "schedules"
        yield ["schedule"], f"mode.{key}= says who takes part"
    elif isinstance(mode, Train):
        yield _figures("price_usd_per_hour"), RENT
        if request.workload.path is None and request.workload.text is None:
            yield OF_TEXTS, f"workload={request.workload.name} has no text"
        if request.backend is not None and request.backend.name in ("virtual", "emulated"):  # timed by costs
            moves = request.offload != "none" or request.entry.lower is not None
            yield from _idle_on_one_host(request, moves=moves, charged=moves)
    elif isinstance(mode, Simulate | Predict | Roofline):
        measured = request.cost.name == "profiled" and request.cost.profile is None  # here, with tensors
        tensors = f"mode={mode.name} has no tensors; it counts 16-bit weights, Adam's states"
        yield (["optimizer"] if measured else OF_TENSORS), tensors
        yield _figures("price_usd_per_hour"), RENT
        if isinstance(mode, Simulate):
            yield OF_TEXTS, tensors
            yield from _idle_simulation(request, eager)
        elif isinstance(mode, Predict):
            yield from _idle_prediction(request, mode)
        else:
            yield OF_ORDERS, "mode=roofline has closed forms of a model and a machine, of no order"
            idle = {*MEMORY, *LAYERS, *INSIDE, *BETWEEN, "ssd", "device_speeds"} - set(OF_ROOFLINE)
            yield _figures(*idle), f"mode=roofline takes {' and '.join(_figures(*OF_ROOFLINE))} alone"


def _idle_failures(mode: Failures) -> Idle:
    for kind, keys in OF_FAILURES.items():
        if kind != mode.run:
            yield [f"mode.{key}" for key in keys], f"of mode.run={kind} alone"
    if mode.policy != "gemini":
        yield [f"mode.{key}" for key in OF_GEMINI], "of mode.policy=gemini alone"


def _idle_prediction(request: "Request", mode: Predict) -> Idle:
    yield (
        OF_SCRIPTS,
        "mode=predict takes a system's published run; mode.sequences=N with mode.microbatches=N are another, and "
        "mode=simulate takes all of them",
    )
    yield ["cost.recompute_ahead", "cost.fused_ahead", "cost.overlap_gain"], "mode=predict times no actions"
    own = request.software.numbers if request.software else {}
    if own.items() <= counted_numbers()[0].items():
        yield ["software"], "mode=predict counts with the numbers of the system's own software"
    if not mode.by_action:
        idle = ("device_to_host_bytes_per_s", "host_memory_bytes_per_s", "transfer_latency_s", "ssd")
        yield _figures(*idle, "intra_latency_s", *BETWEEN), "closed forms of a system on one host have no place for it"
    yield from _shadowed(request.cluster)


def _idle_simulation(request: "Request", eager: bool) -> Idle:
    mesh, cost = request.mesh, request.cost
    meshed = request.meshed is not None
    moves = not meshed and (request.offload != "none" or request.entry.lower is not None)
    charged = request.charge == "bytes" or moves or request.tuning_budget is not None
    yield ["cost.declared"], "a simulation has no interval"
    if not eager:
        why = "these constants are of kernels that are counted operator by operator, as in software=roundpipe"
        moved = () if not charged else CONSTANTS[:1] if cost.name == "analytic" else CONSTANTS
        yield [f"cost.constants.{name}" for name in counted_numbers()[0] if name not in moved], why
        yield _figures("launch_s"), "of kernels that are counted operator by operator, as in software=roundpipe"
    if request.model is None:
        yield _figures(*MEMORY), "model=abstract has no bytes"
        yield ["workload.microbatch_sequences"], "model=abstract has no sequences"
        if cost.name == "unit" or (cost.name == "constant" and not cost.recompute_ms):
            yield ["recompute"], "recomputation takes no time here (cost.recompute_ms of cost=constant)"
    if mesh is not None:
        yield from _idle_mesh(mesh)
    if meshed:
        taken = () if request.cluster.intra_bytes_per_s is not None else COPIES
        yield _figures(*({*HOST} - {*taken}), "host_memory_bytes", "ssd"), "under a mesh nothing moves to hosts"
        yield from _shadowed(request.cluster)
        yield ["prefetch"], "under a mesh no weights are streamed"
    else:
        yield from _idle_on_one_host(request, moves=moves, charged=charged)


def _idle_on_one_host(request: "Request", *, moves: bool, charged: bool) -> Idle:
    """Of runs timed by costs: `moves`, whether weights are streamed; `charged`, whether bytes take time."""
    cost = request.cost
    yield _figures(*BETWEEN), "the run has one host"
    if not moves and request.tuning_budget is None:
        yield ["prefetch"], "no weights are streamed (offload=none)"
    if cost.name != "analytic" and request.tuning_budget is None:
        yield _figures(*LAYERS), f"cost={cost.name} has its own seconds"
        if not charged:
            yield _figures(*INSIDE), f"cost={cost.name} has its own seconds, and charge=hops charges no bytes"
    is_known = request.schedule.file is None and request.tuning_budget is None
    if is_known and request.schedule.options.get("ssd", "none") == "none":
        yield _figures("ssd"), f"schedule={request.schedule.chosen} keeps nothing on SSDs"
    yield from _shadowed(request.cluster)


def _shadowed(cluster: Machine) -> Idle:
    """The nominal link, where what copies reach over it is given as well."""
    nominal, copied = cluster.host_to_device_bytes_per_s, cluster.copy_bytes_per_s
    if nominal is not None and copied is not None and not isclose(copied, COPIED_SHARE * nominal):
        why = f"copies reach cluster.copy_bytes_per_s={copied:g}, and that counts; change it"
        yield _figures("host_to_device_bytes_per_s"), why


def _idle_mesh(chosen: "MeshChoice") -> Idle:
    """Keys of a mesh whose axis has one device, or whose exchange its states do not need."""
    mesh, own = chosen.mesh, "mesh."
    shares = mesh.replicas > 1
    gathers = shares and mesh.sharing.what == "parameters"
    alone = chosen.machine is None  # a pipeline on one host
    for keys, counts, why in (
        (("overlap.gradients", "shard_group"), shares, "the mesh has no replicas"),
        (("shard",), shares or not alone, "the mesh has no replicas"),
        (("overlap.parameters",), shares and mesh.sharing.what != "none", "replicas gather no parameters"),
        (("reshard",), gathers, "of mesh.shard=parameters over replicas alone"),
        (("overlap.tensor",), mesh.tensor > 1, "mesh.tensor is 1"),
        (("overlap.expert",), mesh.expert > 1, "mesh.expert is 1"),
        (("order",), not alone, "a pipeline alone has one axis"),
    ):
        if not counts:
            yield [own + key for key in keys], why
