"""The duel on accelerators: a schedule of ours, FSDP2, DeepSpeed's ZeRO-Offload and the released library, in turn.

It is the duel (`rpbench.run.modes.duel`) with other contenders, on the same model, tokens, weights and AdamW. Each has
the accelerators for itself while it runs and frees its memory afterwards; on the host it has one thread for arithmetic
a process. Other runtimes continue from the weights of their run before, which changes no time. A runtime that is not
installed says so in its record, and the others run. A dry duel has made-up streams, and FSDP2 computes on the
processor: every step runs, and nothing is timed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from baselines.systems.case import why_missing
from rpbench.config.choices import ConfigError, GpuDuel
from rpbench.config.request import Request
from rpbench.engine.backends import accelerator
from rpbench.engine.backends.threads import one_thread
from rpbench.engine.measure.stopwatch import ForeignLoad
from rpbench.engine.verification import WHOLE_BOUNDS, verified
from rpbench.engine.workload import Workload
from rpbench.records.record import Record
from rpbench.run.assemble import Assembled
from rpbench.run.modes.duel.contenders import Contender, gpu_contenders
from rpbench.run.modes.duel.findings import verdict_fields
from rpbench.run.modes.duel.run import Fields, found_or_made, play_all, write_all
from rpbench.run.modes.duel.starts import case_of, job_of
from rpbench.run.modes.duel.teams import ON_DEVICE, Absent, Parity, Sample, SystemTeam, Team
from rpbench.run.modes.duel.verdict import Started, timed_fields
from rpbench.run.modes.train import check_request, run_accelerated
from rpbench.run.scheduled import assembled_of
from rpbench.run.training.tensors import DTYPES, backend_of
from rpbench.torch_runtime.processes.ranks import Ranks

# Engine -> the system of `baselines.systems` and the mode in which it runs.
SYSTEMS: Mapping[str, tuple[str, str]] = {
    "FSDP2": ("fsdp2", "offload"),
    "DeepSpeed": ("deepspeed", "zero_offload"),
    "RoundPipe": ("released", ""),
}
# Engine -> the package that it needs, and whether it runs on CUDA alone, in one process.
PACKAGES = {"DeepSpeed": ("deepspeed", False), "RoundPipe": ("roundpipe", True)}
NO_PACE = "dry: made-up accelerators have no pace"


class AcceleratorTeam:
    """A schedule of ours on the accelerators, real or made up."""

    def __init__(self, request: Request, assembled: Assembled) -> None:
        self._request, self._assembled = request, assembled
        self._is_dry = _is_dry(request)
        self._workload: Workload | None = None
        self._later = replace(request, backend=replace(backend_of(request), num_warmup_runs=0))
        self.tolerance = 0.0 if self._is_dry else WHOLE_BOUNDS[DTYPES[request.dtype]]

    def check(self, sequence_tokens: int) -> Parity:
        """Its distance from plain training, on short sequences; in a dry run also the findings on its streams."""
        model = replace(self._request.given_model, seq_len=sequence_tokens)
        ran = run_accelerated(replace(self._request, model=model, verify=True), replace(self._assembled, model=model))
        fields = {key: value for key, value in ran.fields.items() if not key.startswith("predicted_")}
        return fields | (verified(ran.training) if self._is_dry else {})

    def run(self) -> Sample:
        """All steps, with a warm-up before the first run only; each run finds the allocator empty."""
        request = self._request if self._workload is None else self._later
        with ForeignLoad() as foreign:
            used = time.process_time()
            ran = run_accelerated(request, self._assembled, workload=self._workload)
            used = time.process_time() - used
        self._workload = ran.training.workload
        if not self._is_dry:
            torch.accelerator.empty_cache()  # for the next contender
        return Sample(ran.wall_s, None, used, foreign.elapsed_s, foreign.others_s)


@dataclass
class AbsentTeam:
    why: str
    tolerance: float = 0.0

    def check(self, sequence_tokens: int) -> Parity:
        raise Absent(self.why)

    def run(self) -> Sample:
        raise Absent(self.why)


def accelerator_teams(request: Request, entrants: Sequence[Contender], stack: ExitStack) -> Iterator[tuple[str, Team]]:
    mode, assembled = request.mode_as(GpuDuel), assembled_of(request)
    device, tolerance = "cpu" if _is_dry(request) else accelerator.kind(), WHOLE_BOUNDS[DTYPES[request.dtype]]
    for entrant in entrants:
        package, needs_cuda = PACKAGES.get(entrant.engine, ("torch", False))
        if entrant.engine not in SYSTEMS:
            yield entrant.name, AcceleratorTeam(request, assembled)
        elif (why := why_missing(package, needs_cuda=needs_cuda)) is not None:
            yield entrant.name, AbsentTeam(why)
        else:
            ranks = stack.enter_context(Ranks(1 if needs_cuda else request.num_devices, mode.stall_s))
            case = case_of(request, *SYSTEMS[entrant.engine], device=device)
            yield entrant.name, SystemTeam(case, ranks, (), tolerance, (ON_DEVICE,))


def records(request: Request) -> list[Record]:
    entrants = gpu_contenders(request.schedule.chosen)
    return found_or_made(request, entrants, lambda ids: _made(request, entrants, ids))


def _made(request: Request, entrants: Sequence[Contender], ids: Mapping[str, str]) -> list[Record]:
    _check(request)
    with one_thread():
        check_request(request, assembled_of(request))
    tokens = request.tokens_per_step

    def timed(fit: Sequence[str], starts: Sequence[Started]) -> dict[str, Fields]:
        if _is_dry(request):
            return {name: {"evidence": "dry"} for name in fit}
        found = {name: timed_fields(name, starts, request.num_steps) for name in fit}
        return {name: each | {"tokens_per_s": tokens / each["step_time_s"]} for name, each in found.items()}

    job = job_of(request, f"GPU duel {request.model_name}", entrants, partial(accelerator_teams, request))
    if _is_dry(request):
        job = replace(job, budget_s=0.0)
    rows = play_all(request, job, ids, lambda each: {"schedule": each.schedule, "tokens_per_step": tokens}, timed)
    for row in rows:
        if row["status"] == "ok":
            row |= {"verdict": "no verdict", "verdict_reason": NO_PACE}
    alone, by_name = f"{request.schedule.chosen} has not run twice", {row["contender"]: row for row in rows}
    return write_all(request, rows, {} if _is_dry(request) else verdict_fields(by_name, alone))


def _is_dry(request: Request) -> bool:
    return backend_of(request).dry_accelerators is not None


def _check(request: Request) -> None:
    model, asked = request.given_model, request.optimizer
    dtypes = ("float32", "bfloat16")
    if request.dtype not in dtypes:
        raise ConfigError(
            f"dtype={request.dtype} with mode=gpu_duel: {' or '.join(dtypes)}, which everybody trains alike"
        )
    if model.tied or model.dropout or model.lora_rank:
        raise ConfigError(
            f"model={model.name} with mode=gpu_duel: FSDP2 and the library take layers one by one and draw numbers of "
            "their own; set model.tied=false model.dropout=0, and no model.lora_rank"
        )
    if asked.name != "adamw" or asked.clip_norm is not None or asked.num_warmup_steps:
        raise ConfigError(f"optimizer={asked.name} with mode=gpu_duel: adamw, without clip_norm and num_warmup_steps")
    if request.recompute != "all" or request.workload.name != "synthetic" or request.pieces != 1:
        raise ConfigError(
            "mode=gpu_duel: everybody recomputes all of a layer, on tokens that are drawn; set recompute=all "
            "workload=synthetic"
        )
