"""`show`: a schedule as text, and what a person would ask about it first."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rpbench.config.choices import ConfigError, Failures, Simulate, Train
from rpbench.config.mesh import MeshChoice
from rpbench.config.request import Request
from rpbench.config.without_effect import check_without_effect
from rpbench.ir.schedule import to_text
from rpbench.ir.timeline import Timeline
from rpbench.mesh.layout import MEGATRON
from rpbench.passes.recomputation import kept_layers
from rpbench.records.record import check_target, check_writable
from rpbench.run.assemble import Assembled, assemble
from rpbench.sim.shared_links import simulate_charged
from rpbench.workload.architecture import Architecture

FILES = ("torchtitan", "megatron_layout", "deepspeed", "fsdp2")  # forms that say how large a microbatch is


def drawing_path(name: str) -> Path:
    """The file to draw to; ValueError for an ending that is not svg, pdf or png, or a place where no file can be."""
    path = Path(name)
    if path.suffix not in (".svg", ".pdf", ".png"):
        raise ValueError(f"draw={name}: the ending decides the format; take .svg, .pdf or .png")
    check_target(path)
    check_writable(path.parent, "draw")
    return path


def show_schedule(request: Request, out: TextIO, form: str = "text") -> Assembled:
    """Print a checked schedule in a form to `out`, its sizes to stderr; ValueError if it or the form cannot be."""
    if request.tuning_budget is not None:
        raise ConfigError(
            f"tuning_budget={request.tuning_budget} with show: it prints the order of given options, and nothing is "
            "searched; run it, and show the partition and the options of its record"
        )
    check_without_effect(request, "show")
    if not isinstance(request.mode, Simulate | Train | Failures):
        raise ConfigError(f"mode={request.mode.name} with show: it has no one order of actions; leave mode= out")
    mesh = request.meshed
    alone = request if mesh is None else replace(request, mesh=None, num_devices=mesh.mesh.pipeline)
    assembled = assemble(alone)  # under a mesh the order of one pipeline
    schedule = assembled.schedule
    text = to_text(schedule) if form == "text" else _exported(assembled, request, form)
    out.write(text.removesuffix("\n") + "\n")
    out.flush()
    source = f" ({assembled.entry.source})" if assembled.entry else ""
    shape = schedule.shape
    print(
        f"{schedule.name}{source}: {shape.num_ranks} devices, {shape.num_stages} forward and "
        f"{shape.num_backward_stages} backward stages, {shape.num_microbatches} microbatches, "
        f"{schedule.num_actions} actions; checked: complete, placed, free of deadlock",
        file=sys.stderr,
    )
    return assembled


def _exported(assembled: Assembled, request: Request, form: str) -> str:
    from rpbench.run.mesh_run import planned
    from rpbench.run.training.tensors import optimizer_settings
    from rpbench.torch_runtime.formats.export import Given, export  # torch's forms; text needs none of them
    from rpbench.torch_runtime.formats.frameworks import numbers_of

    sequences = request.workload.microbatch_sequences
    mesh, cut, kept = request.meshed, assembled.choice.partition, assembled.keeps
    known = {} if mesh is None else _meshed(mesh, assembled.model, form)
    if mesh is not None and request.recompute == "fitting":
        kept = planned(request)[0].kept_by_stage(cut)
    known |= _recomputed(cut.backward, kept_layers(cut, request.recompute) if kept is None else kept)
    if mesh is not None and mesh.precision != "bf16":
        known["notes"] += (f"the plan multiplies in {mesh.precision}: ask the framework for it, this is bf16",)
    if assembled.model is not None:
        known["notes"] += tuple(_learning(assembled.model))
        if lengths := request.workload.lengths:
            known["notes"] += (
                f"the plan is for sequences of {min(lengths)} to {max(lengths)} tokens, in their order; padded to "
                f"{assembled.model.seq_len}, they take longer and may not fit",
            )
        known |= {"sequences": sequences, "seq_len": assembled.model.seq_len}
        known["optimizer_bits"] = assembled.model.optimizer_bits
    options = request.schedule.options
    given = Given(
        lambda: _timeline(request, assembled),
        model=assembled.model,
        host_memory_bytes=assembled.cluster.host_memory_bytes,
        plan=numbers_of(assembled.schedule, options, **known),
        optimizer=optimizer_settings(request.optimizer),
    )
    if sequences != int(sequences) and form in FILES:
        raise ConfigError(f"microbatches of {sequences} sequences: format={form} takes whole ones; take larger ones")
    return export(assembled.schedule, form, given)


def _meshed(chosen: MeshChoice, model: Architecture | None, form: str) -> dict[str, Any]:
    """What the frameworks' files say of a mesh; ConfigError for another order of its axes than theirs."""
    mesh, axes = chosen.mesh, ("data", "pipeline", "tensor", "context", "expert", "sequence_parallel")
    if form in FILES and mesh.order != MEGATRON:
        has = ", ".join(MEGATRON)
        raise ConfigError(f"mesh.order={','.join(mesh.order)}: with format={form} it is {has}; leave mesh.order out")
    found = {name: getattr(mesh, name) for name in axes} | {"shared": mesh.sharing.what}
    found |= {"shard_group": mesh.sharing.group, "reshard": mesh.sharing.reshard}
    if model is not None and model.experts is not None:
        found["expert_tensor"] = mesh.expert_tensor
    assert chosen.machine is not None
    found["nodes"] = chosen.machine.num_nodes
    return found | {name: getattr(chosen.software, name) for name in ("gradients_beside", "parameters_beside")}


def _recomputed(layers: Sequence[int], kept: Sequence[int]) -> dict[str, Any]:
    """Recomputation as frameworks have it, the same for all stages, with a note on stages that differ."""
    again = [number - less for number, less in zip(layers, kept, strict=True)]
    if sum(again) in (0, sum(layers)):
        return {"recompute": "full" if any(again) else "none", "notes": ()}
    note = (
        f"the plan recomputes {'-'.join(map(str, again))} layers of its stages; Megatron takes one number for all, "
        f"here {max(again)}, and others recompute all layers: slower, and fits"
    )
    return {"recompute": "full", "recomputed_layers": max(again), "notes": (note,)}


def _learning(model: Architecture) -> Iterator[str]:
    """What a training script has to do where not all of a model learns, or its optimizer is another."""
    if model.lora_rank is not None:
        maps = [each for routed in model.kinds for each in model.linear_maps(routed) if model.adapted(each)]
        where = [*dict.fromkeys(each.name for each in maps)] if model.lora_targets else "all-linear"
        config = f"LoraConfig(r={model.lora_rank}, target_modules={where!r})"
        yield f"adapters learn, not the model: wrap it with PEFT's {config} before it is cut"
    if model.training_mode == "qlora":
        yield (
            "frozen weights are in 4 bits: load them with bitsandbytes' NF4, with bnb_4bit_quant_storage=bfloat16 "
            "where they are sharded (zero_3, FSDP)"
        )
    if model.frozen_layers:
        yield f"the first {model.frozen_layers} layers are frozen: call requires_grad_(False) on them"
    if model.optimizer_bits != 32:
        yield f"Adam's moments are in {model.optimizer_bits} bits: take bitsandbytes' AdamW8bit"


def _timeline(request: Request, assembled: Assembled) -> Timeline:
    """The timeline that the run of a request has, under its mesh and on links that transfers share."""
    if request.meshed is not None:
        from rpbench.run.mesh_run import simulated  # the packages of meshes, for requests that have one

        return simulated(request)[-1].timeline
    return simulate_charged(assembled.graph, assembled.costs)


def draw_schedule(request: Request, assembled: Assembled, path: Path) -> None:
    """Draw the simulated timeline of a request's schedule to a file; its ending decides the format."""
    from rpbench.drawing.timeline_figure import draw_timeline

    timeline, unit = _timeline(request, assembled), "slots" if request.cost.name == "unit" else "s"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_timeline(timeline, assembled.schedule.name, unit=unit).savefig(path, dpi=200)
    print(f"drawn to {path}", file=sys.stderr)
