"""Member: one rank of a run: its stages on torch's runtime, its batches, its optimizer, and its measurements.

Every step runs the whole table. After it gradients are summed over copies of the stages: the two directions of a
two-way schedule, or data-parallel ranks.

torch runs every action inside `record_function("PP:<token>")`, which is replaced while a step runs by a clock and a
line on the board. Computations are timed at the three methods of a stage that compute: the time from an action's start
until then is waiting for a message.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpbench.engine.layout import Layout, layout_of
from rpbench.engine.state import checkpoint
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.updates.optimizer import laid_out_as
from rpbench.engine.workload import Workload
from rpbench.torch_runtime.processes.diagnosis import Phase, Place
from rpbench.torch_runtime.request import DTYPES, ONE_STAGE, SAME_NAME, TorchRequest
from rpbench.torch_runtime.shards import Groups, is_sharded, whole, wrapper
from rpbench.torch_runtime.stages import ChainStage, StageModule
from rpbench.torch_runtime.versions import has_waits, load_runtime

COMPUTING = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
PREFIX = "PP:"


@dataclass
class Moment:
    """One lowered action as it ran; seconds by this rank's clock."""

    token: str
    start: float
    end: float = 0.0  # from `start` on, waiting included
    begun: Any = None  # start of its computation; None for an action that computes nothing
    done: Any = None  # end of its computation


@dataclass
class Recorder:
    """The actions of one step on a rank, in the order they ran; on a GPU timed by CUDA events, read after the step."""

    place: Place
    positions: dict[str, int]  # the token of a row's action -> its place, for the board
    on_gpu: bool = False
    moments: list[Moment] = field(default_factory=list)
    before: Callable[[str], None] = lambda token: None  # a test makes a rank fail here

    def begin(self, step: int) -> None:
        self.moments = []
        self.place.write(Phase.BETWEEN, -1, step)

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Wraps all that torch does for an action."""
        token = name.removeprefix(PREFIX)
        self.place.write(Phase.WAITING, self.positions.get(token))
        self.before(token)
        moment = Moment(token, time.perf_counter())
        self.moments.append(moment)
        yield
        moment.end = time.perf_counter()
        self.place.write(Phase.BETWEEN)

    def computes(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call with its times noted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if not self.moments or self.moments[-1].end:  # torch looks at shapes before the first step
                return call(*arguments, **options)
            moment = self.moments[-1]
            self.place.write(Phase.COMPUTING)
            begun = self.now()
            moment.begun = begun if moment.begun is None else moment.begun
            found = call(*arguments, **options)
            moment.done = self.now()
            self.place.write(Phase.WAITING)
            return found

        return timed

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self, zero: Any, zero_s: float) -> None:
        """Turn CUDA events into seconds: `zero` was recorded at `zero_s`, when the device was idle."""
        torch.cuda.synchronize()
        for moment in self.moments:
            if moment.begun is not None:
                moment.begun = zero_s + zero.elapsed_time(moment.begun) / 1e3
                moment.done = zero_s + zero.elapsed_time(moment.done) / 1e3
                moment.end = max(moment.end, moment.done)


def recording_runtime(recorder: Recorder, stages: list[Any], num_microbatches: int, order_of: str) -> Any:
    """torch's runtime for tables, whose rows must still be loaded, or its own schedule `order_of`; with recording.

    torch's single-stage schedules run no lowered actions: only their computations are timed. ValueError if torch has no
    schedule of that name, or it takes one stage a rank and there are more.
    """
    schedules = load_runtime()
    base = schedules._PipelineScheduleRuntime
    if order_of != "table":
        if order_of not in SAME_NAME.values():
            raise ValueError(f"order_of={order_of}: torch has {', '.join(SAME_NAME.values())}")
        if order_of in ONE_STAGE and len(stages) != 1:
            raise ValueError(
                f"order_of={order_of}: torch runs one stage a rank there, this partition has {len(stages)}"
            )
        base = schedules.get_schedule_class(order_of)
    if order_of in ONE_STAGE:  # GPipe's own names of its loop's turns are no lowered actions
        _listen_alone(stages[0], recorder)
        return base(stages[0], num_microbatches, loss_fn=_sum, scale_grads=False)

    class Recording(base):  # type: ignore[misc, valid-type]  # found where torch has it
        """A runtime of torch with its profiler's name replaced while it steps."""

        def _step_microbatches(self, *arguments: Any, **options: Any) -> Any:
            plain = schedules.record_function
            schedules.record_function = recorder.action
            try:
                return super()._step_microbatches(*arguments, **options)
            finally:
                schedules.record_function = plain

    for stage in stages:
        for name in COMPUTING:
            setattr(stage, name, recorder.computes(getattr(stage, name)))
    return Recording(stages, num_microbatches, loss_fn=_sum, scale_grads=False)


def _sum(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """torch requires a loss function, although the last stage computes the loss."""
    return loss.sum()


def _listen_alone(stage: Any, recorder: Recorder) -> None:
    """Record each computation as an action: the single-stage classes have loops of their own."""
    for name, kind in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
        call = getattr(stage, name)

        def timed(microbatch: int, *arguments: Any, _call: Any = call, _kind: str = kind, **options: Any) -> Any:
            with recorder.action(f"{stage.stage_index}{_kind}{microbatch}"):
                return recorder.computes(_call)(microbatch, *arguments, **options)

        setattr(stage, name, timed)


class Member:
    """This rank's part of a request, in an initialised process group; `place` is its line on the board.

    ValueError if the number of processes is wrong, or another rank has another request.
    """

    def __init__(self, request: TorchRequest, place: Place) -> None:
        self.request, self.lowered = request, request.lowered
        self.groups = Groups(request)
        self.device = torch.device("cpu" if request.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        self.rank = self.groups.pipeline_rank
        table, chains = self.lowered.table, self.lowered.chains
        assert table.partition is not None  # or the request had been refused
        layout = layout_of(table.partition)
        own = [layout.forward[chains.place(stage)[1]] for stage in chains.stages_of(self.rank)]
        self.modules = sorted({module for modules in own for module in modules})
        self.workload = request.workload(own=self.modules)
        self.boundary = self._boundary()
        stages = self._make_stages(layout)
        positions = {chains.token(action): number for number, action in enumerate(self.lowered.row(self.rank))}
        self.recorder = Recorder(place, positions, on_gpu=self.device.type == "cuda")
        self.runtime = recording_runtime(self.recorder, stages, self.lowered.num_microbatches, request.order_of)
        if request.order_of == "table":
            self._load()
        self.optimizers = self._make_optimizers()
        if request.start is not None:
            self._go_on(Path(request.start))
        # per timed step, its recorded actions, and its first and last moment by this rank's clock
        self.steps: list[tuple[list[Any], float, float]] = []
        self.losses: list[float] = []  # per timed step, the sum of this rank's losses, each a part of the step's mean

    def _boundary(self) -> torch.Tensor:
        """One microbatch's tensor between two stages, (B, S, H); it requires a gradient, or none would come back."""
        batch, length = self.workload.batch(0).tokens.shape
        sizes, dtype = (batch, length, self.request.model["hidden"]), DTYPES[self.request.dtype]
        return torch.empty(sizes, dtype=dtype, device=self.device, requires_grad=True)

    def _make_stages(self, layout: Layout) -> list[Any]:
        chains, wrap, found = self.lowered.chains, wrapper(self.request, self.groups), []
        workload, length = self._scaled(self.workload), len(chains.routes[0])
        tokens = workload.batch(0).tokens.to(self.device)
        loss = torch.empty(1, dtype=self.boundary.dtype, device=self.device, requires_grad=True)
        for stage in chains.stages_of(self.rank):
            chain, own = chains.place(stage)
            module = StageModule(workload, layout.forward[own], chain).to(self.device)
            found.append(
                ChainStage(
                    module if wrap is None else wrap(module),
                    stage,
                    chains.num_stages,
                    self.device,
                    input_args=(tokens if own == 0 else self.boundary,),
                    output_args=(loss if own == length - 1 else self.boundary,),
                    group=self.groups.pipeline,
                    chain_length=length,
                )
            )
        return found

    def _scaled(self, workload: Workload) -> Workload:
        """FSDP averages over data-parallel ranks, so there a loss is divided by one rank's microbatches."""
        if self.request.data_parallel == 1 or self.request.data_mode == "plain":
            return workload
        return replace(workload, num_microbatches=workload.num_microbatches // self.request.data_parallel)

    def _load(self) -> None:
        sharded = self.request.data_parallel > 1 and self.request.data_mode != "plain"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.csv"
            path.write_text(self.lowered.to_csv(sharded=sharded, waits=has_waits()))
            self.runtime._load_csv(str(path), format="compute_comms")

    @cached_property
    def parameters(self) -> Tensors:
        """The trained parameters of this rank's modules; sharded ones as their shards."""
        found = {}
        for stage in self.runtime._stages if hasattr(self.runtime, "_stages") else [self.runtime._stage]:
            for name, layer in stage.submod.layers.items():
                for parameter_name, parameter in layer.named_parameters():
                    if parameter.requires_grad:
                        found[int(name), parameter_name] = parameter
        return dict(sorted(found.items()))

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        """One for sharded and one for whole parameters, which no fused step takes together; none without updates."""
        kinds = [[p for p in self.parameters.values() if is_sharded(p) is sharded] for sharded in (True, False)]
        return [self.request.settings().make(own) for own in kinds if own and self.request.optimizer is not None]

    # --- checkpoints ---

    def _go_on(self, data: Path) -> None:
        """Load this rank's weights and optimizer state from a checkpoint's data."""
        kept = checkpoint.metadata_of(data).state_dict_metadata
        states = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for place, parameter in self.parameters.items():
            for moment in self.request.settings().moments if parameter in states else ():
                if checkpoint.moment_name(place, moment) in kept:
                    like = torch.zeros(()) if moment == "step" else torch.zeros_like(parameter.detach())
                    states[parameter].state[parameter][moment] = like.to(self.device)
        checkpoint.read(data, self._named(), alone=False)

    def _named(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state of this rank's modules by their names in the whole model."""
        states = {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}
        return checkpoint.named(
            {place: parameter.detach() for place, parameter in self.parameters.items()},
            {place: states[parameter] for place, parameter in self.parameters.items() if parameter in states},
        )

    def save(self) -> None:
        """Write the state after the last step, a collective; rank 0 commits the checkpoint."""
        if self.request.save_to is None:
            return
        folder, num_steps = Path(self.request.save_to), self.request.first_step + self.request.num_steps
        with checkpoint.begun(folder, num_steps) if dist.get_rank() == 0 else nullcontext() as own:
            data: list[Any] = [own]
            dist.broadcast_object_list(data)
            checkpoint.write(data[0], self._named(), alone=False)
            if own is not None:
                checkpoint.commit(folder, own, num_steps, self.request.subject)

    # --- running ---

    def run(self) -> None:
        for _ in range(self.request.num_warmup_steps):
            self._step(0)
        self.steps.clear()
        self.losses.clear()
        for step in range(self.request.num_steps):
            self._step(step)
            self._update(step + 1)
        self.recorder.place.write(Phase.DONE)

    def run_once(self) -> None:
        """One step on the first step's microbatches without an update; only this step is kept."""
        self.steps.clear()
        self.losses.clear()
        self._step(0)
        self.recorder.place.write(Phase.DONE)

    def _step(self, step: int) -> None:
        batch = self._batch(step)
        for parameter in self.parameters.values():
            parameter.grad = None
        losses: list[torch.Tensor] = []
        target = torch.zeros(self.lowered.num_microbatches, device=self.device)
        self.recorder.begin(step)
        dist.barrier()
        zero = None
        if self.recorder.on_gpu:
            torch.cuda.synchronize()
            zero = self.recorder.now()
        began = time.perf_counter()
        self.runtime.step(**batch, target=target, losses=losses, return_outputs=False)
        if zero is not None:
            self.recorder.settle(zero, began)
        ended = time.perf_counter()
        self.recorder.place.write(Phase.BETWEEN, -1)
        self.groups.add_up(self.parameters)
        self.steps.append((self.recorder.moments, began, ended))
        self.losses.append(float(sum(float(loss.detach().sum()) for loss in losses)))

    def _update(self, version: int) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None and not is_sharded(parameter):
                parameter.grad = laid_out_as(parameter, parameter.grad)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.request.settings().rate(self.request.first_step + version)
            optimizer.step()

    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        """The microbatches of a step by keyword, those of a chain one after another."""
        found = {}
        per_rank = self.lowered.table.shape.num_microbatches
        first = step * self.request.num_microbatches + self.groups.data_rank * per_rank
        for chain, own in enumerate(self.lowered.chains.microbatches):
            numbers = [first + microbatch for microbatch in own]
            tokens, labels = zip(*(self.workload.batch(number) for number in numbers), strict=True)
            found[f"tokens_{chain}"] = torch.cat(tokens).to(self.device)
            found[f"labels_{chain}"] = torch.cat(labels).to(self.device)
            found[f"numbers_{chain}"] = torch.tensor([self.workload.absolute(number) for number in numbers])
        return found

    # --- results ---

    def gradients(self) -> Tensors:
        """The full gradients of the last step; a collective over data- or tensor-parallel ranks."""
        return {place: whole(p.grad) for place, p in self.parameters.items() if p.grad is not None}

    def weights(self) -> Tensors:
        """The full weights; a collective as well."""
        return {place: whole(parameter.detach()) for place, parameter in self.parameters.items()}
