"""Case, a system's training as data for another process; System, the base of adapters; our own losses on a case."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from rpbench.cost.table import LayerTimes
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.engine.workload import Workload, synthetic
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entry
from rpbench.workload.architecture import Architecture

LEAST = {"deepspeed": "0.19", "roundpipe": "0.1.1"}  # versions that the adapters were written for


@dataclass(frozen=True)
class Case:
    """A system and a workload."""

    system: str  # a name of `baselines.systems.worker.SYSTEMS`
    model: dict[str, Any]  # the fields of a `Model`
    num_microbatches: int
    schedule: str = ""  # for systems with several, as they name them
    microbatch_sequences: int = 1
    num_steps: int = 1
    seed: int = 0
    dtype: str = "float32"  # a name of torch's
    partition: tuple[int, ...] = ()  # layers of each stage, for systems that cut
    recompute: str = "all"  # layers run again in backward: `all`, `except_last` stage's, or `none`; the head never
    verify: bool = False  # compare with plain training
    # the fields of `OptimizerSettings`; None leaves the weights alone
    optimizer: dict[str, Any] | None = field(default_factory=dict)
    device: str = "cpu"  # what its ranks compute on, each on one of its own: `cpu`, or torch's name of an accelerator

    def workload(self) -> Workload:
        """The modules and microbatches, the same in every process."""
        model = Architecture(**self.model)
        return synthetic(model, self.microbatch_sequences, self.dtype, self.seed, self.num_microbatches)

    def settings(self) -> OptimizerSettings:
        return OptimizerSettings(**(self.optimizer or {}))

    def make_adamw(self, parameters: Iterable[torch.Tensor], **options: Any) -> torch.optim.AdamW:
        """torch's AdamW with the case's settings."""
        own = self.settings()
        return torch.optim.AdamW(parameters, lr=own.learning_rate, weight_decay=own.weight_decay, **options)

    def check_replicas(self, system: str, methods: Collection[str], num_ranks: int) -> None:
        """Refuse (ValueError) an unknown method, a recomputation by stages, or microbatches that cannot be dealt evenly
        to data-parallel ranks.
        """
        if self.schedule not in methods:
            raise ValueError(f"schedule={self.schedule!r}: {system} is run as {', '.join(methods)}")
        if self.recompute not in ("all", "none"):
            raise ValueError(f"recompute={self.recompute!r}: all or none, because there are no stages")
        if self.num_microbatches % num_ranks:
            raise ValueError(f"num_microbatches={self.num_microbatches}: {num_ranks} ranks take an equal number each")

    def microbatches(self, step: int) -> range:
        return range(step * self.num_microbatches, (step + 1) * self.num_microbatches)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """The case of a JSON object with its fields; ValueError for text that is not such an object."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "partition": tuple(fields.get("partition", ()))})
        except TypeError as error:
            raise ValueError(f"not a case ({error}): fields are {', '.join(cls.__dataclass_fields__)}") from None


def why_missing(package: str, *, needs_cuda: bool = False) -> str | None:
    """Why a package cannot be used on this machine; None if it can."""
    if find_spec(package) is None:
        return f"{package} is not installed: pip install '{package}>={LEAST[package]}'"
    if needs_cuda and not torch.cuda.is_available():
        return f"{package} needs a CUDA device, and torch sees none"
    return None


def require(package: str, *, needs_cuda: bool = False) -> ModuleType:
    """The package; ValueError if it cannot be used here."""
    reason = why_missing(package, needs_cuda=needs_cuda)
    if reason is not None:
        raise ValueError(f"system={package}: {reason}")
    return import_module(package)


class Method(NamedTuple):
    """A schedule of ours and its options."""

    name: str
    options: dict[str, Any]


class System(ABC):
    """One rank of a system that trains a case."""

    ours: Method | None = None  # our method that computes the same

    def __init__(self, case: Case) -> None:
        self.case, self.workload = case, case.workload()
        self.modules = set(range(len(self.workload.modules)))  # those whose weights this rank trains
        self.actions: list[tuple[str, int, int, float]] = []  # kind, stage, microbatch, processor seconds
        self.losses: list[float] = []  # this rank's mean of every step; empty where ranks have parts of a microbatch

    @cached_property
    def parameters(self) -> dict[tuple[int, str], nn.Parameter]:
        """The parameters of this rank's modules, by module and name, as they are when it is first read."""
        return {
            (number, name): parameter
            for number in sorted(self.modules)
            for name, parameter in self.workload.modules[number].named_parameters()
        }

    def prepare(self) -> None:  # noqa: B027  most systems have nothing to prepare
        """The part of a run that is not timed."""

    @abstractmethod
    def train(self) -> None:
        """Run all steps of the case."""

    @abstractmethod
    def gradients(self) -> Tensors:
        """Gradients of the last step."""

    @abstractmethod
    def weights(self) -> Tensors:
        """The weights as they are now."""


def our_losses(method: Method, case: Case, num_devices: int) -> list[float]:
    """The mean loss of every step of one of our methods on the case's weights and data, on a virtual clock."""
    workload = case.workload()
    layers = [1.0] * (len(workload.modules) - 2)
    partition = symmetric((1,) * len(layers))
    found = entry(method.name)
    assert found.lower is not None  # methods of replicas say what they move
    shape = Shape(num_devices, len(partition.forward), case.num_microbatches, num_steps=case.num_steps)
    order = found.build(shape, **method.options).with_partition(partition)
    schedule = found.lower(order, prefetch=1, **(found.options | method.options))
    costs = LayerTimes(layers, layers, layers, 1.0, 1.0).table(partition, recompute_ahead=False)
    training = Training(workload, schedule, Settings(case.settings()))
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return [training.mean_loss(step) for step in range(case.num_steps)]
