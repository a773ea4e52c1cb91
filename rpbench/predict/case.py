"""Case: one system training one model on some devices of one machine, and the numbers all of it rests on."""

from dataclasses import dataclass, replace
from typing import Literal

from rpbench.cost.basis import Basis
from rpbench.cost.bound import rebound
from rpbench.predict.settings import Settings
from rpbench.workload.architecture import Architecture


@dataclass(frozen=True)
class Case:
    """What is predicted.

    Args:
        system: name as in the published tables.
        basis: the declared constants. Plans are made with them, whatever they are varied to afterwards.
        num_devices: devices that take part.
        measured_on: the constants on the machine where the layers of published models were timed; None: nobody knows
            how those timings bind the constants.
        grain: what a backward of RoundPipe recomputes at a time.
    """

    system: str
    model: Architecture
    basis: Basis
    settings: Settings
    num_devices: int
    grain: Literal["stage", "layer"] = "stage"
    measured_on: Basis | None = None

    @property
    def tokens_per_step(self) -> int:
        return self.settings.global_sequences * self.model.seq_len

    @property
    def microbatch_tokens(self) -> float:
        """Of a microbatch on one device, the mean where the batch does not divide."""
        return self.settings.microbatch_sequences * self.model.seq_len

    @property
    def chunk_tokens(self) -> float:
        """Of a whole microbatch of a call that is cut like `torch.chunk`."""
        return self.settings.chunks.size * self.model.seq_len

    def varied(self, name: str, factor: float) -> Basis:
        """The constants with one multiplied, and what published timings say of others then."""
        return rebound(self.model, self.basis, name, factor, self.measured_on)

    def of_length(self, seq_len: int) -> "Case":
        """The same with sequences of another length, whatever its positions were made for."""
        return replace(self, model=replace(self.model, seq_len=seq_len, context=None))


Terms = dict[str, float]  # seconds of a step by cause; they add up to the step
Bytes = dict[str, float]  # bytes by class of tensor
