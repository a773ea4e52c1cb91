"""Schedules of files: read, cut, held against the command line, and what they show of their method."""

from dataclasses import replace

from rpbench import registry
from rpbench.config.configuration import RunConfig
from rpbench.config.errors import ConfigError, config_errors
from rpbench.config.files import SourceFile
from rpbench.config.request import Request
from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind
from rpbench.ir.partition import parse, split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Weights, from_text
from rpbench.ir.waits.moves import has_transfers
from rpbench.places import ORDERS
from rpbench.plan.problem import times_of_method


def in_segments(request: Request, schedule: Schedule) -> Request:
    """The request with as many devices as the order has, and the segments that it cuts sequences into."""
    shape = schedule.shape
    segments = 1 if shape.tensor_parallel else shape.num_parts
    return replace(request, num_devices=shape.num_ranks, schedule=replace(request.schedule, segments=segments))


def times_of_order(times: LayerTimes, schedule: Schedule) -> LayerTimes:
    """Layer times under the method of an order's name, with the options that the order shows."""
    entry, shape = registry.offered().get(schedule.name), schedule.shape
    if entry is None:
        return times
    shown: dict[str, object] = {"sequence_parallel": shape.sequence_parallel}
    gathered = sum(action.kind is Kind.UNSHARD for device, _, row in schedule.items() if device == 0 for action in row)
    if gathered <= shape.num_stages * shape.num_steps:  # once a step, not for every visit
        shown |= dict.fromkeys(entry.gathers or ())
    return times_of_method(times, entry, shape.num_ranks, shown)


def leaves_boundaries(schedule: Schedule) -> bool:
    """Whether weights are moved to the work and boundary tensors are not, as `offload=weights` has it."""
    entry = registry.offered().get(schedule.name)
    if schedule.weights is not Weights.STREAMED or schedule.shape.num_backward_stages == 1 or (entry and entry.lower):
        return False  # methods with a lowering of their own know what they keep
    return all(what != "A" for _, what in schedule.moves)


def cut_of(request: Request, schedule: Schedule, file: SourceFile) -> Schedule:
    """A schedule of a file without a cut, with the typed one or else a layer a stage; as it is if cut apart."""
    shape, text = schedule.shape, request.partition
    if not any(item.lstrip("+").startswith("partition=") for item in request.overrides):
        return schedule if shape.separate_cuts else schedule.with_partition(symmetric((1,) * shape.num_stages))
    if not text[:1].isdigit():
        num_layers = request.model.num_layers if request.model else shape.num_stages
        even = symmetric(split_evenly(num_layers, shape.num_stages))
        raise ConfigError(
            f"partition={text}: schedule_file={file.path} has no cut, and nothing searches one for a file; type the "
            f"layers of each of its {shape.num_stages} stages, as partition={even}"
        )
    with config_errors(f"schedule_file={file.path}: "):
        return schedule.with_partition(parse(text))


def check_typed(request: Request, schedule: Schedule, file: SourceFile, *, has_cut: bool) -> None:
    """Refuse a name, sizes, a partition or transfers on the command line that differ from the file's."""
    shape, asked, moves = schedule.shape, request.num_microbatches, has_transfers(schedule)
    one_by_one = shape.num_microbatches == 1 and shape.num_steps % request.num_steps == 0
    own = {
        "schedule": (request.entry.name == schedule.name, f"is {schedule.name}"),
        "num_devices": (request.num_devices == shape.num_ranks, f"has {shape.num_ranks} ranks"),
        # Updates after every microbatch are steps of one: then the file has as many steps as the run had microbatches.
        "num_microbatches": (shape.num_microbatches in (asked, 1), f"has {shape.num_microbatches} microbatches a step"),
        "num_steps": (shape.num_steps == request.num_steps or one_by_one, f"has {shape.num_steps} steps"),
        "chunks_per_device": (
            request.chunks_per_device in (None, shape.num_stages / shape.num_ranks),
            f"has {shape.num_stages} stages on {shape.num_ranks} ranks",
        ),
        "mesh.pipeline": (request.num_devices == shape.num_ranks, f"has {shape.num_ranks} ranks"),
        "partition": (not has_cut or request.partition == str(schedule.partition), f"is cut {schedule.partition}"),
        "offload": (
            request.offload in (("weights", "all", "auto") if moves else ("none", "auto")),
            "moves something" if moves else "moves nothing",
        ),
        "prefetch": (request.prefetch == RunConfig.prefetch, "says when what it moves comes"),
        "dispatch": (request.dispatch == "round_robin", "says which device runs what"),
    }
    for item in request.overrides:
        key, _, value = item.lstrip("+").partition("=")
        agrees, fact = own.get(key, (True, ""))
        if not agrees and not (key == "schedule" and value.endswith(ORDERS)):
            raise ConfigError(f"{item}: schedule_file={file.path} {fact}; leave one of both out")


def read_order(file: SourceFile) -> Schedule:
    """The schedule of a file, in text or in the form of torch's own runtime."""
    with config_errors(f"schedule_file={file.path}: "):
        if file.path.suffix == ".csv":
            from rpbench.torch_runtime.formats.tables import read_schedule  # the form of torch's own runtime

            return read_schedule(file.text, file.path.stem)
        return from_text(file.text)
