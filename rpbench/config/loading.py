"""Loading: the request of a command line, typed and checked once; later code reads no dictionary of choices."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rpbench import registry
from rpbench.config.choices import (
    MODES,
    AnyDuel,
    BackendConfig,
    CostConfig,
    Duel,
    Failures,
    GpuDuel,
    Mode,
    OptimizerConfig,
    Predict,
    Roofline,
    Simulate,
    TrackerConfig,
    Train,
    WorkloadConfig,
    first_line,
    typed,
)
from rpbench.config.composing import recalling
from rpbench.config.configuration import BESIDES, GROUPS, Composed, ConfigError, RunConfig, as_plain
from rpbench.config.files import SourceFile, read_source, source_of
from rpbench.config.keys import built, check_constants, check_name
from rpbench.config.notes import notes_of, told_apart
from rpbench.config.request import ABSTRACT, Request, ScheduleChoice, charged_as
from rpbench.config.schedule_options import check_options
from rpbench.config.sizes import check_sizes, cut_sequences, num_layers, read_lengths
from rpbench.config.without_effect import without_effect
from rpbench.cost.hardware.machine import Machine, machine_of
from rpbench.cost.hardware.measured import has_engine
from rpbench.places import CHECKPOINT, file_of
from rpbench.registry import Entry, sources, unknown_name
from rpbench.untrusted import not_finite
from rpbench.workload.architecture import Architecture
from rpbench.yaml_file import keys_of

if TYPE_CHECKING:
    from rpbench.config.mesh import MeshChoice
    from rpbench.mesh.software import Software

_TEXTS = Path(__file__).parents[1] / "models" / "text"  # shipped with the project; its module needs torch

DEVICES = 8  # of a run on a cluster that does not say how many a host has


def load(overrides: Sequence[str]) -> Request:
    """The request of a command line.

    Raises ConfigError for an unknown name, key or value, with the nearest known one, and ValueError for an impossible
    model or cluster.
    """
    return request_of(recalling.compose(overrides))


def cluster_file(path: Path) -> Machine:
    """The cluster of a user's YAML file; ConfigError for a file or key that is wrong, ValueError for a number."""
    source = read_source("cluster", str(path))
    assert source is not None
    try:
        if not keys_of(source.text):
            raise ValueError("no keys; write key: value, one a line, such as num_devices: 8")
        values: Any = OmegaConf.to_container(OmegaConf.create(source.text))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(f"cluster={path}: {first_line(error)}") from None
    keys = {"name": path.stem, **{str(key): value for key, value in values.items()}}
    check_name("cluster", keys)
    return machine_of(keys)


def request_of(found: Composed) -> Request:
    """The request of a composed configuration; ValueError as of `load`."""
    config = found.node if isinstance(found.node, RunConfig) else typed(RunConfig, found.node)
    _check_names(found.choices)
    shape, notes = told_apart(config.model, found.choices.get("model"), found.overrides)
    check_name("cluster", config.cluster)
    cluster = machine_of(config.cluster)
    model = None if shape.get("name") == ABSTRACT else built(Architecture, "model", shape)
    software = _software(config)
    config, choices, mesh = _meshed(replace(config, model=shape), found, cluster, model, software)
    if config.num_devices is None:
        config = replace(config, num_devices=DEVICES if cluster.num_devices is None else cluster.node_devices)
    check_sizes(config, mesh.mesh.pipeline if mesh else config.num_devices or 1)
    mode = _mode(config)
    eager = software.kernels != "tiled" if software else has_engine(cluster.measured)
    cost, workload = typed(CostConfig, config.cost), typed(WorkloadConfig, config.workload)
    check_constants(cost.constants, software.numbers if software else {})
    if workload.lengths is not None:
        workload = replace(workload, lengths=read_lengths(workload.lengths, model))
        config = replace(config, workload={**config.workload, "lengths": workload.lengths})
    schedule = _schedule(config, found.choices)
    config = replace(config, **charged_as(config, mode, schedule.entry, cluster, cost))  # type: ignore[arg-type]
    files = {"schedule_file": schedule.file, "schedule.generator": _own_generator(schedule.entry)}
    for key, name, within in (
        ("cost.profile", cost.profile, ""),
        ("workload.path", workload.path, ""),
        ("workload.text", workload.text and str(_TEXTS / f"{workload.text}.txt"), ""),
        ("mode.plans", mode.plans if isinstance(mode, Duel) else None, ""),
        ("checkpoint.resume_from", config.checkpoint.resume_from, CHECKPOINT),
    ):
        files[key] = read_source(key, name, within=within)
    request = Request(
        mode=mode,
        schedule=schedule,
        model=model,
        num_layers=num_layers(config),
        cluster=cluster,
        workload=workload,
        cost=cost,
        backend=typed(BackendConfig, config.backend) if config.backend else None,
        optimizer=typed(OptimizerConfig, config.optimizer),
        tracker=typed(TrackerConfig, config.tracker),
        results_dir=Path(config.results_dir),
        choices={key: name for key, name in {**choices, "mode": mode.name}.items() if key not in BESIDES},
        overrides=found.overrides,
        subject={
            **_subject(config, mode, schedule, files),
            "cluster": {key: value for key, value in as_plain(cluster).items() if key != "ssd" or value is not None},
            **({"framework": as_plain(mesh.software)} if mesh else {}),
        },
        software=software,
        mesh=mesh,
        **{f.name: getattr(config, f.name) for f in fields(RunConfig) if f.name in _COPIED},
    )
    _check_mode(request)
    notes = (*notes, *notes_of(mode, cost, found.overrides, found.choices), *without_effect(request, eager=eager))
    return _in_pieces(replace(request, notes=notes))


def _in_pieces(request: Request) -> Request:
    """The same run with microbatches cut as its schedule orders them."""
    pieces = request.entry.pieces(request.schedule.options)
    if pieces == 1:
        return request
    _check_pieces(request)
    return replace(
        request,
        pieces=pieces,
        num_microbatches=request.num_microbatches * pieces,
        workload=cut_sequences(request.workload, pieces),
    )


def _check_pieces(request: Request) -> None:
    """Refuse modes, files, searches and measured times that have microbatches of their own."""
    mode, file, profile = request.mode, request.schedule.file, request.cost.profile
    named = " ".join(f"schedule.{key}={str(value).lower()}" for key, value in (request.entry.halved or {}).items())
    if not isinstance(mode, Simulate | Train):
        raise ConfigError(f"{named} with mode={mode.name}: it has its own microbatches; leave one of both out")
    if file is not None:
        raise ConfigError(f"{named} with schedule_file={file.path}: the file says its microbatches; leave one out")
    if request.tuning_budget is not None:
        raise ConfigError(
            f"{named} with tuning_budget={request.tuning_budget}: the search chooses the size of microbatches; "
            "leave one of both out"
        )
    if profile is not None:
        raise ConfigError(
            f"{named} with cost.profile={profile}: it says nothing of the size of its microbatches; "
            "measure pieces by leaving it out"
        )


# Keys that a request takes from the configuration as they are.
_COPIED = {f.name for f in fields(RunConfig)} - {*GROUPS, "mesh", "schedule_file", "results_dir"}


def _subject(
    config: RunConfig, mode: Mode, schedule: ScheduleChoice, files: Mapping[str, SourceFile | None]
) -> dict[str, Any]:
    """All of a configuration that decides what a run measures, as plain data."""
    subject = {f.name: as_plain(getattr(config, f.name)) for f in fields(config) if f.name not in BESIDES}
    subject["mode"] = as_plain(mode)
    subject["schedule"] = {"name": schedule.entry.name, **as_plain(dict(schedule.options))}
    if not (isinstance(mode, Train | Duel) or (isinstance(mode, Failures) and mode.run == "processes")):
        del subject["optimizer"]  # nothing is stepped
    # What a run leaves out is left out here, as in records from before there was a choice.
    for group, is_given in (("mesh", config.mesh.is_given), ("software", config.software is not None)):
        if not is_given:
            del subject[group]
    for group, key in (("cost", "max_freeze_ratio"), ("schedule", "ssd"), ("workload", "lengths")):
        if subject[group].get(key) in (None, 0, "none"):
            subject[group].pop(key, None)
    for found in not_finite(subject):
        raise ConfigError(f"{found}: a finite number")
    subject["sha256"] = {key: file.sha256 for key, file in files.items() if file is not None}
    return subject


def _mode(config: RunConfig) -> Mode:
    """The chosen mode; by default `train` with a backend, else `simulate`."""
    given = config.mode or {"name": "train" if config.backend else "simulate"}
    name = str(given.get("name"))
    if name not in MODES:
        raise ConfigError(unknown_name("mode", name, list(MODES)))
    return typed(MODES[name], given)


def _schedule(config: RunConfig, choices: Mapping[str, str | None]) -> ScheduleChoice:
    if "name" not in config.schedule:
        raise ConfigError("schedule=null: choose one, as in schedule=1f1b")
    name = str(config.schedule["name"])
    entry, given = registry.entry(name), {key: value for key, value in config.schedule.items() if key != "name"}
    for key in given:
        if key not in entry.options:
            raise ConfigError(unknown_name(f"option of schedule {name}", key, list(entry.options)))
    check_options(entry, given)
    file = read_source("schedule_file", config.schedule_file)
    return ScheduleChoice(choices.get("schedule") or name, entry, {**entry.options, **given}, file)


def _check_names(choices: Mapping[str, str | None]) -> None:
    """Refuse an option that two files have."""
    for group, option in choices.items():
        found = None if option is None else file_of(group, option)
        if found is not None and group == "schedule" and option in registry.offered():
            raise ConfigError(f"schedule={option}: a generator and {found} have this name; rename yours")


def _software(config: RunConfig) -> "Software | None":
    """The named software with the command line's changes; None without one."""
    if config.software is None:
        return None
    from rpbench.mesh.software import software_of  # its package, for runs that name one

    check_name("software", config.software)
    return software_of(config.software)


def _meshed(
    config: RunConfig, found: Composed, cluster: Machine, model: Architecture | None, software: "Software | None"
) -> tuple[RunConfig, Mapping[str, str | None], "MeshChoice | None"]:
    """The configuration, the choices and the mesh, with the devices and the cost source that a mesh determines."""
    if not config.mesh.is_given and (config.num_devices or 1) > cluster.node_devices < cluster.size:
        config = replace(config, mesh=replace(config.mesh, pipeline=config.num_devices))  # more than one host
    if not config.mesh.is_given:
        return config, found.choices, None
    if (old := config.mesh.framework) is not None:
        raise ConfigError(f"mesh.framework={old} is now software={old}")
    # The packages of meshes are imported for runs that have one.
    from rpbench.config.mesh import check_meshed, counted_cost, mesh_choice

    choices = dict(found.choices)
    if cluster.gpu is not None and config.cost.get("name") == "unit":
        config = replace(config, cost=counted_cost(config.cost, found.overrides))
        choices["cost"] = str(config.cost["name"])
    mesh = mesh_choice(config, cluster, model, software)
    check_meshed(config, mesh)
    settled = replace(config.mesh, pipeline=mesh.mesh.pipeline)
    config = replace(config, mesh=settled, num_devices=mesh.mesh.num_devices)
    if mesh.machine is not None:
        config = replace(config, charge="hops", offload="none")
    return config, choices, mesh


def _own_generator(entry: Entry) -> SourceFile | None:
    """The code of a user's generator, which is part of the run's identity; None for the project's own."""
    found = sources(entry)
    return source_of(found[0], b"".join(path.read_bytes() for path in found)) if found else None


def _check_mode(request: Request) -> None:
    mode, backend = request.mode, request.backend
    where = f"backend={backend.name}" if backend else f"mode={mode.name}"
    own_seconds = request.cost.name != "analytic" and request.meshed is None
    if request.software is not None and own_seconds:
        raise ConfigError(
            f"software={request.software.name} with cost={request.cost.name}, which has its own seconds: software says "
            "what cost=analytic counts; leave one of both out"
        )
    if request.mesh is not None and not isinstance(mode, Simulate):
        raise ConfigError(
            f"mesh with mode={mode.name}: meshes are simulated; use mode=simulate, search one with rpbench plan "
            "mesh=search, or train replicas and tensor shards with backend=torch backend.data_parallel=2 "
            "backend.tensor_parallel=2"
        )
    model = request.model
    if model is not None and (model.frozen_layers or model.optimizer_bits != 32) and not isinstance(mode, Simulate):
        raise ConfigError(
            f"model.frozen_layers={model.frozen_layers} model.optimizer_bits={model.optimizer_bits} with "
            f"mode={mode.name}: frozen layers and 8-bit moments are simulated only; take 0 and 32, or mode=simulate"
        )
    if isinstance(mode, Train) and backend is None:
        raise ConfigError("mode=train: choose what executes it, as in backend=virtual, backend=cpu or backend=emulated")
    if isinstance(mode, GpuDuel) and (backend is None or backend.name != "device"):
        raise ConfigError("mode=gpu_duel is played on accelerators: set backend=device")
    if not isinstance(mode, Train | GpuDuel) and backend is not None:
        raise ConfigError(f"mode={mode.name} has no backend: leave backend={backend.name} out, or take mode=train")
    has_tensors = backend is not None and backend.name != "emulated"
    if request.verify and not has_tensors and not isinstance(mode, Duel):
        raise ConfigError(f"verify=true: {where} has no tensors to compare; use backend=virtual or backend=cpu")
    asked = [f"checkpoint.{key}={folder}" for key, folder in asdict(request.checkpoint).items() if folder]
    if asked and (backend is None or backend.name not in ("virtual", "cpu", "torch")):
        raise ConfigError(f"{' '.join(asked)}: {where} has no state to keep; use backend=virtual, cpu or torch")
    if (file := request.schedule.file) is not None and not isinstance(mode, Simulate | Train | Failures):
        raise ConfigError(
            f"schedule_file={file.path} with mode={mode.name}: it times what it knows by name; leave the file out, or "
            "use mode=simulate"
        )
    if isinstance(mode, Predict | Roofline | AnyDuel) and request.model is None:
        raise ConfigError(f"mode={mode.name} needs a model with a shape; choose one, as in model=qwen3_1p7b")
    if request.tuning_budget is not None and not isinstance(mode, Simulate):
        raise ConfigError(
            f"tuning_budget={request.tuning_budget} with mode={mode.name}: plans are searched in simulation; use "
            "mode=simulate"
        )
    _check_frozen(request)
    _check_lengths(request)
    _check_recompute(request.recompute, mode, is_known=request.model is not None and request.schedule.file is None)


def _check_recompute(recompute: str, mode: Mode, *, is_known: bool) -> None:
    """Refuse ways to recompute of other modes; `is_known`: whether bytes and order of the run are."""
    if recompute == "fitting" and not isinstance(mode, Simulate):
        raise ConfigError(
            f"recompute=fitting with mode={mode.name}: layer by layer is simulated; use mode=simulate, or "
            "recompute=all, except_last or none"
        )
    if recompute == "fitting" and not is_known:
        raise ConfigError(
            "recompute=fitting: what fits follows from a model's bytes and a schedule of the registry; "
            "choose both, or use recompute=all"
        )
    if isinstance(mode, Duel) and recompute != "all":
        raise ConfigError(f"recompute={recompute} with mode=duel: it has a key of its own; set mode.recompute")


def _check_frozen(request: Request) -> None:
    ratio, budget, mode = request.cost.max_freeze_ratio, request.tuning_budget, request.mode
    beside = {"a mesh": request.mesh is not None, f"tuning_budget={budget}": budget is not None}
    beside |= {f"mode={mode.name}": not isinstance(mode, Simulate)}
    if ratio and (what := next((name for name, there in beside.items() if there), None)):
        raise ConfigError(
            f"cost.max_freeze_ratio={ratio} with {what}: backwards that make a part of the weight gradients are "
            "simulated for one schedule on one host; use mode=simulate alone, or leave it at 0"
        )


_OF_LENGTHS = ("virtual", "cpu", "emulated")  # backends that train on sequences of unequal lengths


def _check_lengths(request: Request) -> None:
    """Refuse a wrong number of lengths, and choices that need microbatches of one size."""
    workload, mode, backend = request.workload, request.mode, request.backend
    if workload.lengths is None:
        return
    sequences, needed = workload.microbatch_sequences, request.num_microbatches * workload.microbatch_sequences
    if len(workload.lengths) != needed:
        raise ConfigError(
            f"workload.lengths: {len(workload.lengths)} of them, and a step has {needed} sequences: num_microbatches="
            f"{request.num_microbatches} times workload.microbatch_sequences={sequences}; give one for each, or change "
            "one of both"
        )
    others = {
        "a mesh": request.mesh,
        f"tuning_budget={request.tuning_budget}": request.tuning_budget,
        "schedule_file": request.schedule.file,
        f"cost.max_freeze_ratio={request.cost.max_freeze_ratio}": request.cost.max_freeze_ratio,
    }
    refused = [what for what, is_made in others.items() if is_made]
    if not isinstance(mode, Simulate | Train):
        refused.append(f"mode={mode.name}")
    if backend is not None and backend.name not in _OF_LENGTHS:
        refused.append(f"backend={backend.name}")
    if workload.held_out:
        refused.append(f"workload.held_out={workload.held_out}")
    if refused:
        raise ConfigError(
            f"workload.lengths with {refused[0]}: microbatches of unequal lengths are simulated for one schedule on "
            f"one host, and trained on backend={' or '.join(_OF_LENGTHS)}; leave one of both out"
        )
