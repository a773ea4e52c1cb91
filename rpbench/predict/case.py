"""Case: one system training one model on some devices of one machine, with the constants of its prediction.

The seconds of the interpreter's loop over experts are here where each device has its own process; one interpreter for
all devices is simulated (`rpbench.predict.streaming`).
"""

from dataclasses import dataclass, replace
from typing import Literal

from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.machine import NUMBERS
from rpbench.cost.published import published_tokens_per_microbatch
from rpbench.mesh.layers.eager_kernels import PARTS, correction_name
from rpbench.mesh.layers.layer_seconds import Setting, eager_kernels
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.mesh.placement import Group
from rpbench.predict.settings import Settings
from rpbench.workload.architecture import Architecture

FUSED = "megatron_counted"
SOFTWARE = {  # whose kernels the systems run, in conf/software/
    "zero-2": "deepspeed",
    "zero-infinity": "deepspeed",
    "fsdp": "fsdp",
    "megatron-pp": FUSED,
    "megatron-tp": FUSED,
    "mobius": "mobius",
    "roundpipe": "roundpipe",
    "roundpipe-sync": "roundpipe",
}


@dataclass(frozen=True)
class Case:
    """One system training one model, to be predicted."""

    system: str  # name as in the published tables
    model: Architecture
    basis: Basis  # the declared constants. Plans are made with them, also when a prediction varies a constant.
    settings: Settings
    num_devices: int
    grain: Literal["stage", "layer"] = "stage"  # the unit that a backward of RoundPipe recomputes at a time
    # constants of the machine where the layers of published models were timed; None: unknown, the timings bind nothing
    measured_on: Basis | None = None
    cut: tuple[int, ...] = ()  # layers of each stage of a bound pipeline; empty: found by `megatron.bound_cut`

    @property
    def software(self) -> str:
        """Name in `conf/software/` of the software whose kernels it runs."""
        return SOFTWARE[self.system]

    def setting(self, num_tokens: float, basis: Basis | None = None) -> Setting:
        """A microbatch of so many tokens on one device; with other constants than the declared ones, if given."""
        return setting_of(self.model, num_tokens, basis or self.basis, self.software)

    @property
    def tokens_per_step(self) -> int:
        return self.settings.global_sequences * self.model.seq_len

    @property
    def microbatch_tokens(self) -> float:
        """Tokens of a microbatch on one device, the mean where the batch does not divide."""
        return self.settings.microbatch_sequences * self.model.seq_len

    @property
    def chunk_tokens(self) -> float:
        """Tokens of a full microbatch of a call cut as by `torch.chunk`."""
        return self.settings.chunks.size * self.model.seq_len

    def varied(self, name: str, factor: float) -> Basis:
        """The constants with one multiplied, and the model's corrections as its timings give them then.

        A model's corrections are the measured over the counted times of its layers on one machine. The counted times
        depend on the constants, the measured ones do not: a change of a constant is compensated by the correction, and
        only matters where a case differs from the timed run in microbatch size or machine.
        """
        found, timed_on, published = self.basis.scaled(name, factor), self.measured_on, self.model.published_name or ""
        corrections = {part: correction_name(published, part) for part in PARTS}
        bound = {part: known for part, known in corrections.items() if known in self.basis.values}
        if timed_on is None or not bound or name in bound.values() or name not in timed_on.values:
            return found
        if name in NUMBERS and timed_on.cluster_name != self.basis.cluster_name:
            return found
        before, after = (_counted(self.model, each) for each in (timed_on, timed_on.scaled(name, factor)))
        values = {known: self.basis.values[known] * before[part] / after[part] for part, known in bound.items()}
        return replace(found, values={**found.values, **values})

    def of_length(self, seq_len: int) -> "Case":
        """The case with sequences of another length, beyond the model's context too."""
        return replace(self, model=replace(self.model, seq_len=seq_len, context=None))


Terms = dict[str, float]  # seconds of a step by cause; they add up to the step
Bytes = dict[str, float]  # bytes by class of tensor


def ring(num_devices: int, basis: Basis) -> Group:
    """Devices in a ring at the rate that each link reaches while all send; one device sends nothing."""
    pace = basis["collective_bytes_per_s"] if num_devices > 1 else float("inf")
    return Group(num_devices, num_devices, pace, pace, 0.0)


# --- constants that published timings bind -----------------------------------------------------------------------

TIMED_SEQ_LEN = 2048  # tokens of a sequence where layers were timed


def _counted(model: Architecture, basis: Basis) -> dict[str, float]:
    timed = replace(model, seq_len=TIMED_SEQ_LEN, context=None)
    times = times_of(setting_of(timed, published_tokens_per_microbatch(model.published_name or ""), basis))
    parts = (times.forward[0], times.backward[0], times.head_forward, times.head_backward)
    return dict(zip(PARTS, parts, strict=True))


def expert_s(model: Architecture, num_tokens: float, basis: Basis) -> float:
    """Seconds of a device for the experts of one layer's forward.

    Time of a timed layer beyond its count belongs to the experts: attention of that width is counted right elsewhere.
    """
    kernels = eager_kernels(setting_of(model, num_tokens, basis))
    surplus = kernels.correction("forward") - 1
    return kernels.seconds(kernels.experts()) + surplus * kernels.seconds(kernels.forward)


def loop_s(model: Architecture, basis: Basis) -> float:
    """Seconds of the interpreter for one layer's forward; 0 without experts."""
    return basis["expert_pass_s"] * model.experts.total if model.experts else 0.0


def waiting_s(model: Architecture, basis: Basis) -> float:
    """Seconds that a device waits for the loop in forward and recomputation of all layers.

    Hugging Face's loop reads the tokens of every expert from the device, so launches and kernels do not overlap.
    """
    return 2 * model.num_layers * loop_s(model, basis)
