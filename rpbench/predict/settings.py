"""Settings of a training run: batch, microbatches and accumulation, as the artifact's scripts give them.

Data: `analysis/published/run_settings.csv`, transcribed from the run scripts of the RoundPipe artifact
(arXiv 2604.27085). A system, machine or model without a row takes the nearest one, and says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from rpbench.cost.published import published_rows

# Devices with at least this much memory take the settings of the A800 machine, others those of the RTX 4090.
_LARGE_MEMORY_BYTES = 48 * 2**30
_THROUGHPUTS = ("throughput", "cross_platform")  # experiments that print a pace
PUBLISHED_DEVICES = 8  # of every machine of the tables
_ONE_BATCH = ("roundpipe", "mobius", "megatron")  # systems whose devices go through every sequence together
_SMALL, _LARGE = "8x-rtx4090-24gb", "8x-a800-80gb-sxm"


class Chunks(NamedTuple):
    """A call's microbatches: `num` of them, each of `size` sequences except the last."""

    size: float
    num: int
    last: float


@dataclass(frozen=True)
class Settings:
    """The batch of a step, and its cut into calls and microbatches."""

    global_sequences: int  # sequences of one optimizer step, over all devices
    num_calls: int  # accumulation: parts of a step that follow each other (calls, or micro-steps)
    num_microbatches: int  # of one call; 1 where a call is not cut further
    microbatch_sequences: float  # on one device for data-parallel systems; a mean where the batch does not divide
    source: str  # origin of the settings, as text

    @property
    def chunks(self) -> Chunks:
        """A call cut as `torch.chunk` does: pieces of the size rounded up, the last one short, perhaps fewer.

        64 sequences in ten are nine of 7 and one of 1; 51.2 on average are eight of 6 and one of 3.2.
        """
        sequences = self.global_sequences / self.num_calls
        size = ceil(sequences / self.num_microbatches)
        count = ceil(sequences / size)
        return Chunks(size, count, sequences - size * (count - 1))


# Mobius has neither public sources nor stated settings.
_MOBIUS = Settings(64, 1, 16, 4.0, "assumed: 16 microbatches of 4 sequences; no settings are public")


def published_settings(
    system: str, platform: str | None, model: str | None, memory_bytes: float, num_devices: int = PUBLISHED_DEVICES
) -> Settings:
    """The settings of a throughput run, or the nearest, by published names; None for others.

    A device's memory chooses a platform for machines that are not in the tables. Another number of devices keeps the
    batch, and replicas go through it in more or fewer parts.
    """
    found = _of_published_devices(system, platform, model, memory_bytes)
    if num_devices == PUBLISHED_DEVICES or system.startswith(_ONE_BATCH):
        return found
    replicated = _replicated(found.global_sequences, num_devices, found.microbatch_sequences)
    return replace(replicated, source=f"{found.source}, for num_devices={num_devices}")


def _of_published_devices(system: str, platform: str | None, model: str | None, memory_bytes: float) -> Settings:
    if system == "mobius":
        return _MOBIUS
    places = [platform] if platform else []
    places += [_LARGE, _SMALL] if memory_bytes >= _LARGE_MEMORY_BYTES else [_SMALL]
    for place in places:
        for row in _rows(_THROUGHPUTS, system, place, model):
            batch, calls = int(row["global_batch_sequences"]), int(row["grad_accum_steps"])
            # of other systems the table repeats the count of micro-steps in both columns
            inner = int(row["microbatches_per_call"]) if system.startswith("roundpipe") else 1
            source = f"run scripts, {system} on {place}"
            return Settings(batch, calls, inner, float(row["micro_batch_sequences"]), source)
    text = "assumed: one sequence a device, the artifact's own smallest trial"
    return Settings(8, 8 if system.startswith("megatron") else 1, 1, 1.0, text)


def length_microbatches(model: str | None, memory_bytes: float) -> int:
    """Microbatches of RoundPipe's longest run of a model on devices of this memory, of one sequence each; or 1."""
    place = _LARGE if memory_bytes >= _LARGE_MEMORY_BYTES else _SMALL
    found = (int(row["microbatches_per_call"]) for row in _rows(("max_seq_len",), "roundpipe", place, model))
    return next(found, 1)


def _rows(experiments: Sequence[str], system: str, platform: str, model: str | None) -> Iterator[dict[str, str]]:
    for row in published_rows("run_settings.csv"):
        asked = (system, platform, model) == (row["system"], row["platform"], row["model"])
        if asked and row["experiment"] in experiments:
            yield row


def given_settings(system: str, num_devices: int, sequences: int, num_microbatches: int) -> Settings:
    """A step of so many microbatches of `sequences`, cut as the system cuts it; the batch is the same for all systems.

    Data-parallel systems run as many sequences on every device at a time.
    """
    batch = sequences * num_microbatches
    if system.startswith(_ONE_BATCH[:2]):
        return Settings(batch, 1, num_microbatches, float(sequences), "given")
    if system.startswith("megatron"):
        return Settings(batch, num_microbatches, 1, float(sequences), "given")
    return _replicated(batch, num_devices, sequences)


def _replicated(batch: int, num_devices: int, sequences: float) -> Settings:
    """A batch of data-parallel devices, in as few parts as `sequences` on a device at a time take."""
    calls = ceil(batch / (num_devices * sequences))
    return Settings(batch, calls, 1, batch / (num_devices * calls), "given")
