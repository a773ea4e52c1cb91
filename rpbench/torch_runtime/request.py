"""Request: a training run as plain data that every rank has, and its checks."""

import hashlib
import json
from collections.abc import Container
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.ir.schedule import Schedule, from_text, to_text
from rpbench.models.build import build_layer, build_model
from rpbench.models.data import Data, SyntheticTokens, TextTokens
from rpbench.torch_runtime.lowering import Lowered, lower
from rpbench.workload.architecture import Architecture

# Ours -> torch's of the same order, where it has one.
SAME_NAME = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
ONE_STAGE = ("GPipe", "1F1B")  # of torch's: one stage a rank

DataMode = Literal["plain", "fsdp2", "replicate"]
DATA_MODES: tuple[DataMode, ...] = get_args(DataMode)
REFUSED_MODES = {
    "ddp": "its hooks do not fire where backward comes as I and W, and gradients stay apart without an error "
    "(pytorch issue 144530)",
    "fsdp2_reshard": "a weight gradient that comes after its stage was resharded is lost or wrong without an error",
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class TorchRequest:
    """A schedule, a model, its data, and how they are run."""

    schedule: str  # in our text form, with its partition
    model: dict[str, Any]  # the fields of an `Architecture`
    microbatch_sequences: int = 1
    num_steps: int = 1  # optimizer steps; each runs the whole table on microbatches of its own
    num_warmup_steps: int = 0  # untimed steps before the first, on its microbatches
    seed: int = 0
    dtype: str = "float32"
    text: str | None = None  # a file whose bytes are the tokens; None: random ones
    # the fields of `OptimizerSettings`; None leaves the weights alone
    optimizer: dict[str, Any] | None = field(default_factory=dict)
    # processes of every pipeline rank; only one of data_parallel and tensor_parallel may exceed 1
    data_parallel: int = 1
    data_mode: DataMode = "plain"  # how gradients of data-parallel ranks are summed
    tensor_parallel: int = 1
    recompute: str = "none"  # all others are refused
    verify: bool = False
    device: str = "cpu"  # "cpu" over gloo, "cuda" over NCCL
    order_of: str = "table"  # "table": the schedule's rows; otherwise a schedule of torch's own, by its name
    options: dict[str, Any] = field(default_factory=dict)  # of torch's runtime, as `defer_pp_recv`; all are refused
    start: str | None = None  # a checkpoint's data to go on from, which the caller has checked
    first_step: int = 0  # steps before the checkpoint
    save_to: str | None = None  # a folder for the state after the last step
    subject: dict[str, Any] = field(default_factory=dict)  # the training that the saved checkpoint belongs to

    @cached_property
    def lowered(self) -> Lowered:
        """The lowered rows of all pipeline ranks; raises ScheduleError if torch's runtime cannot run it."""
        return lower(from_text(self.schedule))

    @property
    def num_pipeline_ranks(self) -> int:
        return self.lowered.num_ranks

    @property
    def ranks_each(self) -> int:
        """Processes of each pipeline rank."""
        return self.data_parallel * self.tensor_parallel

    @property
    def num_ranks(self) -> int:
        return self.num_pipeline_ranks * self.ranks_each

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step, over all data-parallel ranks."""
        return self.lowered.table.shape.num_microbatches * self.data_parallel

    def workload(self, own: Container[int] | None = None) -> Workload:
        """The same modules and microbatches on every rank; modules not in `own` stay on the meta device."""
        model, dtype = Architecture(**self.model), DTYPES[self.dtype]
        if own is None:
            modules = list(build_model(model, seed=self.seed, dtype=dtype))
        else:
            devices = ("cpu" if index in own else "meta" for index in range(model.num_layers + 2))
            modules = [
                build_layer(model, index, seed=self.seed, dtype=dtype, device=device)
                for index, device in enumerate(devices)
            ]
        return Workload(
            modules,
            self._data(model),
            self.num_microbatches,
            self.seed,
            draws_random=model.dropout > 0,
            first_step=self.first_step,
        )

    def settings(self) -> OptimizerSettings:
        return OptimizerSettings(**(self.optimizer or {}))

    def _data(self, model: Architecture) -> Data:
        if self.text is None:
            return SyntheticTokens(model.vocab, model.seq_len, self.microbatch_sequences, self.seed)
        return TextTokens(
            Path(self.text),
            vocab=model.vocab,
            seq_len=model.seq_len,
            microbatch_sequences=self.microbatch_sequences,
            num_microbatches=self.num_microbatches,
            seed=self.seed,
        )

    @property
    def digest(self) -> str:
        """A hash of all that must be equal on every rank before the first message."""
        fields = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256((fields + self.lowered.digest).encode()).hexdigest()


def make_request(schedule: Schedule, model: Architecture, **fields: Any) -> TorchRequest:
    """A checked request (`check_request`) for a schedule and a model with other `fields` of `TorchRequest`."""
    request = TorchRequest(to_text(schedule), asdict(model), **fields)
    check_request(request)
    return request


def check_request(request: TorchRequest) -> None:
    """Raise ValueError for what cannot run or would give wrong gradients without an error, before a process starts."""
    lowered = request.lowered
    _check_partition(lowered.table, request)
    _check_ways(request, splits=Kind.I in lowered.table.plain_kinds)
    if request.dtype not in DTYPES:
        raise ValueError(
            f"dtype={request.dtype}: backend=torch trains in {' or '.join(DTYPES)}; use backend=cpu or device"
        )
    for name in ("num_steps", "data_parallel", "tensor_parallel", "microbatch_sequences"):
        value = getattr(request, name)
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1")
    if request.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no CUDA device; use device=cpu")
    settings = request.settings()
    if settings.clip_norm is not None or settings.loss_scaling is not None:
        raise ValueError(
            "clip_norm and loss scaling look at all gradients at once, which backend=torch leaves on their ranks; "
            "use backend=cpu, or neither"
        )


def _check_partition(table: Schedule, request: TorchRequest) -> None:
    model = Architecture(**request.model)
    if table.partition is None:
        raise ValueError("the schedule has no partition: give it one by with_partition(), or name a model")
    table.partition.check_layers(model.num_layers)
    stages = len(table.partition.forward)
    empty = [s for s, count in enumerate(table.partition.forward) if not count and s not in (0, stages - 1)]
    if empty:
        raise ValueError(
            f"partition {table.partition}: stage {empty[0]} holds no layer, so that nothing would be computed between "
            "two messages; give it a layer at least"
        )
    if model.tied and stages > 1:
        raise ValueError(
            f"model={model.name} ties embedding and head, which are on different stages, and torch's runtime adds up "
            "no gradients between stages; set model.tied=false, or use backend=cpu"
        )


def _check_ways(request: TorchRequest, *, splits: bool) -> None:
    if request.options:
        name, value = next(iter(request.options.items()))
        why = ": messages carry no name, and deferring receives swaps them without an error" if "defer" in name else ""
        raise ValueError(f"{name}={value}{why}; backend=torch takes no options of torch's runtime, leave it out")
    if request.data_mode in REFUSED_MODES:
        raise ValueError(
            f"data_mode={request.data_mode}: {REFUSED_MODES[request.data_mode]}; take one of {', '.join(DATA_MODES)}"
        )
    if request.data_mode not in DATA_MODES:
        raise ValueError(f"data_mode={request.data_mode}: one of {', '.join(DATA_MODES)}")
    if request.recompute != "none":
        cause = (
            "a backward in I and W recomputes once for every group of parameters"
            if splits
            else "the runner keeps all activations"
        )
        raise ValueError(f"recompute={request.recompute}: {cause}; set recompute=none, or use backend=cpu")
    if request.data_parallel > 1 and request.tensor_parallel > 1:
        raise ValueError(
            f"data_parallel={request.data_parallel}, tensor_parallel={request.tensor_parallel}: backend=torch composes "
            "a pipeline with one of them; set the other to 1"
        )
    chains = request.lowered.chains.routes
    if request.ranks_each > 1 and len(chains) > 1:
        raise ValueError(
            f"schedule={request.lowered.table.name} keeps two copies of every stage, which are data parallel already; "
            "set data_parallel=1 and tensor_parallel=1, or take a schedule with one copy"
        )
    if request.device not in ("cpu", "cuda"):
        raise ValueError(f"device={request.device}: cpu (gloo) or cuda (NCCL)")
