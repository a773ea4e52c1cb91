"""backend=torch: a schedule on torch's own pipeline runtime, a process a rank; rank 0 writes the record."""

import math
import os
from dataclasses import asdict, replace
from statistics import median

from rpbench.config.choices import ConfigError
from rpbench.config.request import Request
from rpbench.engine.measure.profiles import measured_costs
from rpbench.records.record import Record
from rpbench.run.assemble import Assembled
from rpbench.run.recording import Fields, Outcome, Work, recorded
from rpbench.run.scheduled import assembled_of, scheduled
from rpbench.run.training.tensors import backend_of, optimizer_settings, text_of
from rpbench.run.training.validation import check_holds, check_save_to, checkpoint_subject, found_checkpoint
from rpbench.side_processes import is_first_rank, under_torchrun
from rpbench.sim.checked import checked_graph
from rpbench.torch_runtime.processes.diagnosis import RunFailed
from rpbench.torch_runtime.recorded import outcome as ran
from rpbench.torch_runtime.recorded.outcome import replay_makespan
from rpbench.torch_runtime.request import TorchRequest, make_request


def torch_records(request: Request) -> list[Record]:
    """The record of a run on ranks of torch's runtime; none on torchrun's other ranks than 0.

    Raises ValueError for a wrong request, before anything runs. Ranks other than 0 raise RunFailed if the run broke.
    """
    if not under_torchrun():
        return [recorded(request, _prepare)]
    if is_first_rank():
        return [recorded(replace(request, force=True), _prepare)]  # the other ranks run too: no record may be reused
    _run(request, _request(request)[0])
    return []


def _prepare(request: Request) -> Work:
    asked, assembled = _request(request)
    work = scheduled(request, assembled, lambda: _executed(request, asked, assembled))
    updates = {"num_updates": request.num_steps * work.opening["num_updates"]}  # the table is that of one step
    return replace(work, opening={**work.opening, **updates}, is_out_of_memory=lambda error: False)


def _request(request: Request) -> tuple[TorchRequest, Assembled]:
    """What the ranks are asked for: a table of one step, which runs `num_steps` times."""
    assembled, backend = assembled_of(replace(request, num_steps=1)), backend_of(request)
    own = assembled.tokens_per_microbatch  # of a process; all processes of a rank have such microbatches of their own
    assembled = replace(assembled, tokens_per_microbatch=own and own * backend.data_parallel)
    if assembled.model is None:
        raise ConfigError(
            "backend=torch trains tensors, which model=abstract does not have; take one with a shape, such as "
            "model=tiny_gpt"
        )
    settings, text = optimizer_settings(request.optimizer), text_of(request)
    asked = make_request(
        assembled.schedule,
        assembled.model,
        microbatch_sequences=request.workload.microbatch_sequences,
        num_steps=request.num_steps,
        num_warmup_steps=backend.num_warmup_runs,
        seed=request.seed,
        dtype=request.dtype,
        text=None if text is None else str(text),
        optimizer=asdict(settings),
        data_parallel=backend.data_parallel,
        data_mode=backend.data_mode,
        tensor_parallel=backend.tensor_parallel,
        recompute=request.recompute,
        verify=request.verify,
        device=backend.device,
    )
    return _with_checkpoints(request, asked), assembled


def _with_checkpoints(request: Request, asked: TorchRequest) -> TorchRequest:
    """The same, with the checkpoint to resume from and the one to save."""
    check_save_to(request)
    subject = checkpoint_subject(request, asked.num_microbatches)
    asked = replace(asked, save_to=request.checkpoint.save_to and os.path.abspath(request.checkpoint.save_to))
    asked = replace(asked, subject=subject if asked.save_to else {})
    if (found := found_checkpoint(request, subject)) is None:
        return asked
    check_holds(found, request, asked.workload(own=()))
    return replace(asked, start=str(found.data.absolute()), first_step=found.num_steps)


def _run(request: Request, asked: TorchRequest) -> ran.Outcome | None:
    # torch's pipelining takes seconds to import, and a refused request does not need it.
    from rpbench.torch_runtime.processes.launch import run_on_torch

    return run_on_torch(asked, stall_s=backend_of(request).stall_s)


def _executed(request: Request, asked: TorchRequest, assembled: Assembled) -> Outcome:
    """The outcome of the run; a broken run names the rank and its action."""
    try:
        found = _run(request, asked)
    except RunFailed as error:
        status = "oom" if error.cause == "out of memory" else "failed"
        where = {"failed_rank": error.rank, "failed_action": error.action, "failed_cause": error.cause}
        return Outcome({"status": status, "reason": str(error), "evidence": None, **where}, words=error.words)
    assert found is not None  # this is rank 0, which gets the outcome
    if broken := [(step, loss) for step, loss in enumerate(found.losses) if not math.isfinite(loss)]:
        step, loss = broken[0]
        reason = f"the loss of step {step} is {loss}; lower optimizer.learning_rate"
        return Outcome({"status": "failed", "reason": reason, "evidence": None, "num_finite_losses": step})
    return Outcome(_fields(found, assembled), found.timeline())


def _fields(found: ran.Outcome, assembled: Assembled) -> Fields:
    """The runtime's own fields, the metrics of the last step's timeline, and the median time of a step."""
    timeline = found.timeline()
    graph, _ = checked_graph(timeline.schedule)
    metrics = assembled.metrics(timeline, measured_costs(timeline, recompute_ahead=False), graph)
    replayed = {"replay_makespan_s": replay_makespan(timeline)}
    return metrics | found.fields() | replayed | {"step_time_s": median(map(found.wall_s, range(found.num_steps)))}
