"""Rows: the plans of an advice as JSON, each with all that is needed to run it."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import rpbench
from rpbench.advice.interval import Shared, ratio_reach
from rpbench.cost.footprint.replicas import SsdBytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.roofline import cost_usd_per_billion_tokens
from rpbench.ir.partition import symmetric
from rpbench.mesh.job import Job
from rpbench.mesh.layout import AXES, Sharded
from rpbench.mesh.memory import fullest
from rpbench.mesh.plan_search.plans import SCHEDULES, Alone, Space
from rpbench.mesh.plan_search.search import ORDERS, Prediction
from rpbench.mesh.step import pipeline_terms, stages_of_step
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.plans import Tuned
from rpbench.plan.contest.terms import Terms
from rpbench.workload.architecture import Architecture, why_not_built
from rpbench.workload.elsewhere import torchtitan_refuses
from rpbench.yaml_file import read_keys

COVERED = 0.01  # a plan whose `gap` is at most this fraction counts as searched to the end
HERE = "here only"
LIBRARY = "RoundPipe's library"
NONE_RUNS = "runs_in={}: none of the schedules that are asked for runs there; leave one out"
_FRAMEWORKS = read_keys(Path(__file__).with_name("frameworks.yaml"))
RUNS_IN: Mapping[str, Sequence[str]] = _FRAMEWORKS["runs_in"]
FRAMEWORKS = tuple(dict.fromkeys(name for each in RUNS_IN.values() for name in each))
EXPORTS: Mapping[str, str] = _FRAMEWORKS["exports"]
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Sequence[Any]]]] = _FRAMEWORKS["options"]
SHARES: Mapping[str, Sequence[Sharded]] = _FRAMEWORKS["shares"]
MEGATRON_MESHES = ("zero_2", "zero_3", "combined_1f1b")  # that Megatron runs as meshes, and not on one host
CUTS_LAYERS = ("torchtitan", "Megatron")  # over devices
# Plans without a pipeline by what their replicas share, as one host names them.
ALONE: Mapping[Alone, str] = {
    "none": "data_parallel",
    "optimizer": "zero_1",
    "gradients": "zero_2",
    "parameters": "zero_3",
}
CUT = "megatron_tp"  # plans of one replica that is cut into tensor shards
WITHOUT_PIPELINE: Mapping[Alone, str] = {**ALONE, "tensor": CUT}
WORK = (
    "kernels",
    "recompute",
    "collectives",
    "host",
)  # parts of an order's work, in the order in which they are summed
RECOMPUTE_WORD = {"fitting": "fitting", "full": "all", "none": "none"}  # word of a mesh -> word of a run
_STUDY = Path(rpbench.__file__).parents[1] / "analysis" / "kept" / "convergence_study.csv"
SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Ranked:
    """A plan that fits."""

    plan: Tuned
    # low, high: interval of tokens per second that holds nine of ten errors of the figures
    low: float
    high: float
    staleness_steps: int  # steps between the weights that a gradient was computed on and those that it changes
    why: Mapping[str, float]  # seconds of a step by cause
    memory: Mapping[str, int]  # bytes of the fullest device by class
    ssd: SsdBytes  # bytes on the host's SSDs
    filled: Tuned | None = None  # the best similar cut without empty stages; None where the plan has none
    ratio_reach: float = 1.0  # of the ratio of its pace to the first row's (`rpbench.advice.interval.ratio_reach`)

    @property
    def bubble(self) -> float:
        """Share of a step in which devices wait for one another."""
        return self.why["bubble"] / sum(self.why.values())


@dataclass(frozen=True)
class Misfit:
    """A contender without a plan that fits."""

    plan: Tuned  # the one that lacks least: `device_lacks_bytes` on a device and `host_lacks_bytes` on the host
    device_lacks_bytes: int
    host_lacks_bytes: int
    is_proven: bool  # whether a bound proves that no plan fits; otherwise the search has found none


def runs_in(name: str) -> Sequence[str]:
    """The frameworks that run a contender today, by its name; `HERE` if only this project does.

    DeepSpeed has no delayed update, so ZeRO-Offload with one is not among its methods.
    """
    return RUNS_IN.get(name, (HERE,))


def contender_runs_in(contender: Contender, terms: Terms, options: Mapping[str, Any] | None = None) -> Sequence[str]:
    """The frameworks that run a contender of one host on these devices, with some of its options, or with these."""
    found, shards, own = runs_in(contender.name), terms.num_devices, options or {}
    if contender.entry.tensor_parallel and torchtitan_refuses(terms.model, shards, 1, shards, shards):
        found = [each for each in found if each != "torchtitan"]
    able = [each for each in found if all(own.get(name, known[0]) in known for name, known in _limits(contender, each))]
    return able or (HERE,)


def as_run_by(contender: Contender, framework: str) -> Contender:
    """The contender with the values of its options that a framework has."""
    return replace(contender, within=dict(_limits(contender, framework)))


def _limits(contender: Contender, framework: str) -> Iterable[tuple[str, Sequence[Any]]]:
    return OPTIONS.get(framework, {}).get(contender.name, {}).items()


def plain_row(row: Ranked, terms: Terms, framework: str | None = None) -> dict[str, Any]:
    """A plan that fits, written for a framework; None: the first that runs it."""
    plan, pace = row.plan, row.plan.outcome.tokens_per_s
    names = contender_runs_in(plan.contender, terms, dict(plan.setting.options))
    command = command_of(plan, terms)
    return {
        "schedule": plan.contender.name,
        "options": _options(plan),
        "tokens_per_s": pace,
        "tokens_per_s_low": row.low,
        "tokens_per_s_high": row.high,
        "gap": plan.gap,
        "searched_to_the_end": plan.gap <= COVERED,
        "peak_memory_bytes": plan.outcome.peak_bytes,
        "memory": dict(row.memory),
        "host_memory_bytes": plan.outcome.host_bytes,
        **_ssd(row, terms),
        **_worth(terms.model, terms.cluster, terms.num_devices, pace),
        "bubble": row.bubble,
        "staleness_steps": row.staleness_steps,
        "convergence": _convergence(plan.contender.name) if row.staleness_steps else None,
        "why": dict(row.why),
        "ratio_reach": row.ratio_reach,
        "runs_in": list(names),
        "command": command,
        **_exported(row, command, terms, [framework] if framework else names),
    }


def _ssd(row: Ranked, terms: Terms) -> dict[str, Any]:
    """Bytes on SSDs, bytes written in a step, and days until the SSDs are worn; empty where a plan uses none."""
    ssd, found = terms.cluster.ssd, row.ssd
    if ssd is None or not found.held:
        return {}
    days = ssd.days(found.written, row.plan.outcome.step_time_s)
    return {"ssd_bytes": found.held, "ssd_written_bytes": found.written, "ssd_days": days}


def _exported(row: Ranked, command: str, terms: Terms, names: Sequence[str]) -> dict[str, Any]:
    """The command that writes a plan for the first of some frameworks that takes it; if one needs another cut, a note
    with the cut and its pace.
    """
    export, note = _export(row.plan, command, terms, names), None
    if export is None and LIBRARY in names:
        note = _unwritten(row.plan, terms) or None
    beside = row.filled if "torchtitan" in names else None
    if beside is not None and "format=torchtitan" not in (export or ""):
        written = _export(beside, command_of(beside, terms), terms, names)
        cut, pace = beside.partition, beside.outcome.tokens_per_s
        fits = f"{pace:,.0f} tokens/s" if beside.outcome.fits else "which does not fit"
        note = f"torchtitan has no stage without layers: not {row.plan.partition}, but {cut} beside it ({fits})"
        export = export or written
        note += "" if export == written else f": {written}"
    return {"export": export, "export_note": note}


def _worth(model: Architecture, cluster: Machine, num_devices: int, pace: float) -> dict[str, Any]:
    """MFU, tokens a day, and the price of tokens."""
    price = cluster.price_usd_per_hour
    return {
        "mfu": mfu(model, cluster, num_devices, pace),
        "tokens_per_day": pace * SECONDS_A_DAY,
        "usd_per_1e9_tokens": None if price is None else cost_usd_per_billion_tokens(price, pace),
    }


# --- meshes --------------------------------------------------------------------------------------------------


def mesh_row(
    found: Prediction, reach: float, first: Prediction, shared: Shared, framework: str | None = None
) -> dict[str, Any]:
    """A mesh that fits, with the fields of `plain_row`.

    A search over meshes times every plan, most by closed forms, so that there is no bound on better plans (`gap`).

    Args:
        reach: the factor above and below its pace that holds nine of ten errors.
        first: the fastest.
        shared: the errors that both share.
        framework: that it is written for; None: the first that runs it.
    """
    job, memory = found.job, {name: round(size) for name, size in found.memory.items()}
    pace = found.tokens_per_s_per_device * job.machine.size
    why = dict(found.terms)
    if WORK[0] in why:
        why = {"work": sum(why.pop(name) for name in WORK), **why}
    if "pipeline" in why:
        whole = why.pop("pipeline")
        work = min(whole, pipeline_terms(job, stages_of_step(job))["work"])
        why = {"work": work, "bubble": whole - work, **why}
    command, names = command_of_mesh(job), mesh_runs_in(job)
    export = None
    if names != (HERE,):
        export = command.replace("rpbench ", "rpbench show ", 1) + f" format={EXPORTS[framework or names[0]]}"
    return {
        "schedule": mesh_name(job),
        "options": mesh_options(job),
        "tokens_per_s": pace,
        "tokens_per_s_low": pace / reach,
        "tokens_per_s_high": pace * reach,
        "gap": None,
        "searched_to_the_end": False,
        "peak_memory_bytes": sum(memory.values()),
        "memory": memory,
        "host_memory_bytes": 0,
        **_worth(replace(job.architecture, seq_len=job.seq_len), job.machine, job.machine.size, pace),
        "bubble": why.get("bubble", 0.0) / sum(why.values()),
        "staleness_steps": 0,
        "convergence": None,
        "why": why,
        "ratio_reach": ratio_reach(first.terms, found.terms, shared),
        "runs_in": list(names),
        "command": command,
        "export": export,
        "export_note": None,
    }


def leads_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first row's lead over each other one, as a fraction of that one's pace, with an interval for nine of ten."""
    found = []
    for row in rows[1:]:
        ratio, reach = rows[0]["tokens_per_s"] / row["tokens_per_s"], row["ratio_reach"]
        ends = {"low": ratio / reach - 1, "high": ratio * reach - 1}
        found.append({"schedule": row["schedule"], "by": ratio - 1, **ends})
    return found


def mesh_misfit(job: Job) -> dict[str, Any]:
    """A mesh that does not fit, with the fields of `plain_misfit`."""
    found = fullest(job)
    return {
        "schedule": mesh_name(job),
        "options": mesh_options(job),
        "least_memory_bytes": 0,
        "peak_memory_bytes": round(sum(found.classes.values())),
        "device_lacks_bytes": round(found.lacks),
        "host_lacks_bytes": 0,
        "searched_to_the_end": False,
    }


def mesh_name(job: Job) -> str:
    """The schedule of a mesh, or without a pipeline the method's name on one host."""
    mesh = job.mesh
    if mesh.pipeline > 1:
        return job.schedule
    return CUT if mesh.data == 1 and mesh.tensor > 1 else ALONE[mesh.sharing.what]


def mesh_options(job: Job) -> dict[str, Any]:
    """Sizes and choices of a mesh, in the words of one host where they exist."""
    return {
        **{name: getattr(job.mesh, name) for name in (*AXES, "expert")},
        "shares": job.mesh.sharing.what,
        "microbatch_sequences": job.sequences,
        "num_microbatches": job.num_microbatches,
        "chunks_per_device": job.chunks,
        "recompute": RECOMPUTE_WORD.get(job.recompute, job.recompute),
        **({"kept_layers": list(job.kept_by_stage(symmetric(job.cut)))} if job.recompute == "fitting" else {}),
        "partition": "-".join(map(str, job.cut)),
    }


def mesh_runs_in(job: Job) -> tuple[str, ...]:
    """The frameworks that run a mesh today: its order, what its replicas share, and its shards of layers."""
    mesh = job.mesh
    name = job.schedule if mesh.pipeline > 1 else ALONE[mesh.sharing.what]
    name = "data_parallel" if name == "zero_1" else name
    alone = job.recompute == "none" or job.kept_by_stage(symmetric(job.cut)) == job.cut  # no layer runs again
    as_well = name in MEGATRON_MESHES and (name != "combined_1f1b" or (mesh.expert > 1 and alone))
    names = [*RUNS_IN.get(name, ()), *(["Megatron"] if as_well else [])]
    inside = mesh.tensor * mesh.context * mesh.expert
    found = [each for each in names if mesh.sharing.what in SHARES[each] and (inside == 1 or each in CUTS_LAYERS)]
    sharing = (mesh.context if mesh.sharing.what == "none" else mesh.shard_group) * mesh.tensor
    if torchtitan_refuses(job.architecture, mesh.tensor, mesh.expert, mesh.expert_tensor, sharing):
        found = [each for each in found if each != "torchtitan"]
    return tuple(found) or (HERE,)


def other_orders(names: Sequence[str] | None, framework: str | None) -> tuple[str, ...]:
    """The orders without a closed form among the names (None: all) that a framework runs on some meshes (None: any)."""
    able = {name: (*runs_in(name), *(["Megatron"] if name in MEGATRON_MESHES else [])) for name in ORDERS}
    asked = (name for name in ORDERS if names is None or name in names)
    return tuple(name for name in asked if framework is None or framework in able[name])


def space_of(names: Sequence[str] | None, framework: str | None = None) -> Space:
    """The space of a search over meshes for these methods (None: all), to be run by a framework (None: any).

    Raises ValueError if it runs none of them.
    """
    schedules = SCHEDULES if names is None else tuple(name for name in names if name in SCHEDULES)
    alone = tuple(kind for kind, name in WITHOUT_PIPELINE.items() if names is None or name in names)
    found = Space()
    if framework is not None:
        able = (*SHARES.get(framework, ()), *(["tensor"] if framework in CUTS_LAYERS else []))
        alone = tuple(kind for kind in alone if kind in able)
        schedules = tuple(name for name in schedules if framework in runs_in(name))
        found = Space(
            shared=tuple(SHARES.get(framework, found.shared)),
            max_tensor=found.max_tensor if framework in CUTS_LAYERS else 1,
            cuts_experts=framework in CUTS_LAYERS,
            refuses=torchtitan_refuses if framework == "torchtitan" else None,
        )
    if not schedules and other_orders(names, framework):
        schedules = ("1f1b",)  # whose meshes the other orders take
    if framework is not None and not schedules and not alone:
        raise ValueError(NONE_RUNS.format(framework))
    return replace(found, schedules=schedules, without_pipeline=alone)


def command_of_mesh(job: Job) -> str:
    """The command line that simulates a mesh."""
    mesh = job.mesh
    words = [
        f"schedule={job.schedule}",
        f"model={job.architecture.name}",
        f"cluster={job.machine.name}",
        *([f"++model.seq_len={job.seq_len}"] if job.seq_len != job.architecture.seq_len else []),
        f"num_devices={mesh.num_devices}",
        f"num_microbatches={job.num_microbatches}",
        *(f"mesh.{name}={getattr(mesh, name)}" for name in (*AXES, "expert") if getattr(mesh, name) > 1),
        *(["mesh.sequence_parallel=true"] if mesh.sequence_parallel else []),
        f"mesh.shard={mesh.sharing.what}",
        f"chunks_per_device={job.chunks}",
        f"'partition=\"{'-'.join(map(str, job.cut))}\"'",
        f"recompute={RECOMPUTE_WORD[job.recompute]}",
        f"workload.microbatch_sequences={job.sequences}",
    ]
    return "python -m rpbench " + " ".join(words)


def plain_misfit(row: Misfit) -> dict[str, Any]:
    """A contender without a plan that fits."""
    return {
        "schedule": row.plan.contender.name,
        "options": _options(row.plan),
        "least_memory_bytes": row.plan.least_bytes,
        "least_host_memory_bytes": row.plan.least_host_bytes,
        "peak_memory_bytes": row.plan.outcome.peak_bytes,
        "device_lacks_bytes": row.device_lacks_bytes,
        "host_lacks_bytes": row.host_lacks_bytes,
        "searched_to_the_end": row.is_proven,
    }


def parameters(model: Architecture) -> dict[str, int]:
    """Numbers of parameters: all, those that a token uses, and those that are trained."""
    total = model.experts.total if model.experts else None
    idle = model.layer_matrix_weights(total) - model.layer_matrix_weights(None)
    every = model.total_parameters
    return {"all": every, "active": every - round(idle) * model.num_layers, "trained": model.trainable_parameters}


def mfu(model: Architecture, cluster: Machine, num_devices: int, tokens_per_s: float) -> float | None:
    """Model FLOPs a second over the devices' 16-bit peak; None if the peak is unknown.

    A backward counts as two forwards, as one if only adapters are trained, and as none in frozen layers. Attention
    counts the keys that a query sees: with all of a long sequence's, as PaLM counts, it exceeds 1. Recomputation does
    not count.

    Source: Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B.
    """
    peak = cluster.matmul_flops_per_s
    if peak is None:
        return None
    passes = 3 if model.lora_rank is None else 2
    flops = passes * model.forward_flops(model.seq_len, "causal")
    flops -= 2 * model.frozen_layers * model.layer_forward_flops(model.seq_len, "causal")  # no backward goes there
    each = flops / model.seq_len
    return each * tokens_per_s / (num_devices * peak)


def command_of(plan: Tuned, terms: Terms) -> str:
    """The command line that simulates a plan with everything charged."""
    words = [
        f"schedule={plan.contender.entry.name}",
        f"model={terms.model.name}",
        f"cluster={terms.cluster.name}",
        *([f"++cluster.ssd={terms.cluster.ssd.name}"] if terms.cluster.ssd else []),
        f"cost={terms.source}",
        *(["cost.split_backward=true", "cost.fused_ahead=false"] if terms.source == "published" else []),
        f"num_devices={terms.num_devices}",
        f"num_microbatches={terms.num_microbatches(plan.setting.microbatch_sequences)}",
        f"num_steps={max(terms.num_steps, plan.num_steps)}",
        f"'partition=\"{plan.partition}\"'",
        "charge=bytes",
        "offload=auto",
        *plan.setting.overrides(),
    ]
    return "python -m rpbench " + " ".join(words)


def _options(plan: Tuned) -> dict[str, Any]:
    setting = plan.setting
    return {
        **dict(setting.options),
        "microbatch_sequences": setting.microbatch_sequences,
        "chunks_per_device": setting.chunks_per_device,
        "recompute": setting.recompute,
        "kept_layers": list(plan.outcome.keeps),
        "prefetch": setting.prefetch,
        "partition": str(plan.partition),
    }


def _unwritten(plan: Tuned, terms: Terms) -> str:
    """Why `show` writes no plan for RoundPipe's library, whose file says what the model takes on the host; or empty."""
    cut = plan.partition  # embedding and head stand in its outer stages, the head in the fused one if there is one
    if 0 in (*cut.forward[1 : None if cut.fused else -1], *cut.backward[1:-1]):
        return f"{LIBRARY} has no range without layers, and partition {cut} has one"
    why = why_not_built(terms.model)
    return f"no file for {LIBRARY}: {why}" if why else ""


def _export(plan: Tuned, command: str, terms: Terms, names: Sequence[str]) -> str | None:
    """The command that writes the plan for the first of some frameworks that takes it; None if `show` has no format."""
    entry, counts = plan.contender.entry, plan.partition.forward
    for framework in names:
        staged = entry.lower is None and not entry.tensor_parallel
        if framework not in EXPORTS or (framework == "torchtitan" and staged and 0 in counts[1:-1]):
            continue  # torchtitan has no empty stages: `_exported` offers another cut
        if framework == LIBRARY and _unwritten(plan, terms):
            continue
        shown = command.replace("python -m rpbench ", "python -m rpbench show ", 1)
        # Methods that move states keep these words: without them nothing is sharded, and other plans fit.
        left_out = ("num_steps=",) if entry.lower else ("num_steps=", "charge=", "offload=", "prefetch=")
        words = [word for word in shown.split(" ") if not word.startswith(left_out)]
        return " ".join([*words, f"format={EXPORTS[framework]}"])
    return None


def _convergence(name: str) -> dict[str, Any] | None:
    """Losses of such late updates and of synchronous ones in our study (docs/convergence.md); None: unknown."""
    study = _study()
    late, plain = study.get(_FRAMEWORKS["studied"].get(name, "")), study.get("1f1b")
    if late is None or plain is None:
        return None
    return {
        "final_loss": float(late["final_loss"]),
        "final_loss_synchronous": float(plain["final_loss"]),
        "seeds_at_goal": int(late["seeds_at_goal"]),
        "seeds": int(late["seeds"]),
        "source": "docs/convergence.md, one small model",
    }


@cache
def _study() -> Mapping[str, Mapping[str, str]]:
    if not _STUDY.exists():
        return {}
    with _STUDY.open(newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}
