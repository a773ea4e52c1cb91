"""Case: what a system is asked to train, as data that goes to another process."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.workload import Workload
from rpbench.models.build import build_model
from rpbench.models.data import SyntheticTokens
from rpbench.workload.architecture import Architecture


@dataclass(frozen=True)
class Case:
    """A system and a workload.

    Args:
        system: a name of `baselines.systems.worker.SYSTEMS`.
        schedule: for systems with several, as they name them; empty for the others.
        model: the fields of a `Model`.
        microbatch_sequences, num_microbatches, num_steps, seed: of the workload.
        dtype: a name of torch's, such as `float32`.
        partition: layers of each stage, for systems that cut.
        recompute: layers run again in backward: `all`, `except_last` stage's, or `none`; the head never.
        verify: compare with plain training.
        optimizer: the fields of `OptimizerSettings`; None leaves the weights alone.
        device: what its ranks compute on, each on one of its own: `cpu`, or torch's name of an accelerator.
    """

    system: str
    model: dict[str, Any]
    num_microbatches: int
    schedule: str = ""
    microbatch_sequences: int = 1
    num_steps: int = 1
    seed: int = 0
    dtype: str = "float32"
    partition: tuple[int, ...] = ()
    recompute: str = "all"
    verify: bool = False
    optimizer: dict[str, Any] | None = field(default_factory=dict)
    device: str = "cpu"

    def workload(self) -> Workload:
        """The same modules and microbatches wherever it is called."""
        model = Architecture(**self.model)
        return Workload(
            list(build_model(model, seed=self.seed, dtype=getattr(torch, self.dtype))),
            SyntheticTokens(model.vocab, model.seq_len, self.microbatch_sequences, self.seed),
            self.num_microbatches,
            self.seed,
            draws_random=model.dropout > 0,
        )

    def settings(self) -> OptimizerSettings:
        """How weights are updated."""
        return OptimizerSettings(**(self.optimizer or {}))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """The case `to_json` wrote.

        Raises:
            ValueError: if it is none.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "partition": tuple(fields.get("partition", ()))})
        except TypeError as error:
            raise ValueError(f"not a case ({error}): fields are {', '.join(cls.__dataclass_fields__)}") from None
