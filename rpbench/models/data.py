"""Tokens to train on: random ones, or the bytes of a text file; and the seeds of all random numbers.

A microbatch depends only on the workload and on (step, microbatch): every system with the same workload sees the same
batches.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch


def generator_for(*parts: int | str) -> torch.Generator:
    """A CPU generator whose numbers depend on `parts` only, e.g. `generator_for("weights", seed, layer)`."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


BYTE_VALUES = 256
TEXTS = Path(__file__).parent / "text"


class Batch(NamedTuple):
    """Tokens of sequences, and the label (next token) of each; int64, on the CPU."""

    tokens: torch.Tensor  # (B, S)
    labels: torch.Tensor  # (B, S)


class Data(Protocol):
    """A source of microbatches."""

    def microbatch(self, step: int, microbatch: int) -> Batch:
        """The sequences of one microbatch of one optimizer step, both counted from 0."""


@dataclass(frozen=True)
class Regrouped:
    """The microbatches of another source in the same order, `window` of them a step instead of `num_microbatches`."""

    data: Data
    num_microbatches: int
    window: int

    def microbatch(self, step: int, microbatch: int) -> Batch:
        return self.data.microbatch(*divmod(step * self.window + microbatch, self.num_microbatches))


@dataclass(frozen=True)
class InPieces:
    """The microbatches of another source, each cut into equal runs of its sequences."""

    data: Data
    pieces: int

    def microbatch(self, step: int, microbatch: int) -> Batch:
        number, piece = divmod(microbatch, self.pieces)
        return Batch(*(each.tensor_split(self.pieces)[piece] for each in self.data.microbatch(step, number)))


@dataclass(frozen=True)
class Ragged:
    """The beginnings of another source's sequences; those of unequal lengths are packed behind each other."""

    data: Data
    lengths: tuple[tuple[int, ...], ...]  # of the sequences of each microbatch of a step

    def microbatch(self, step: int, microbatch: int) -> Batch:
        lengths, whole = self.lengths[microbatch], self.data.microbatch(step, microbatch)
        if len(set(lengths)) == 1:
            return Batch(*(each[:, : lengths[0]].contiguous() for each in whole))
        rows = ([row[:length] for row, length in zip(each, lengths, strict=True)] for each in whole)
        return Batch(*(torch.cat(each).unsqueeze(0) for each in rows))


class SyntheticTokens:
    """Uniformly random tokens, whose loss stays near log(vocab)."""

    def __init__(self, vocab: int, seq_len: int, microbatch_sequences: int, seed: int = 0) -> None:
        self.vocab = vocab
        self.shape = (microbatch_sequences, seq_len + 1)
        self.seed = seed

    def microbatch(self, step: int, microbatch: int) -> Batch:
        generator = generator_for("tokens", self.seed, step, microbatch)
        return _shifted(torch.randint(self.vocab, self.shape, generator=generator))


class TextTokens:
    """The bytes of a file, cut into sequences that are read once per epoch, each epoch in its own order.

    Bytes at the end that do not fill a sequence are left out. An epoch may end within a step.
    """

    def __init__(
        self,
        path: Path,
        *,
        vocab: int,
        seq_len: int,
        microbatch_sequences: int,
        num_microbatches: int,
        seed: int = 0,
        held_out: float = 0.0,
        num_steps: int | None = None,
    ) -> None:
        """Open a file.

        Args:
            held_out: fraction of the file, at its end, that is not trained on.
            num_steps: steps that must not read anything twice; None if any may.

        Raises ValueError if the file cannot be read, is too short for one step's batch or `num_steps`, or has more byte
        values than the model has tokens.
        """
        whole = _map_bytes(path)
        self.data, self.unseen = whole.tensor_split([len(whole) - int(held_out * len(whole))])
        self.seq_len, self.microbatch_sequences, self.num_microbatches = seq_len, microbatch_sequences, num_microbatches
        self.seed = seed
        # The label of a sequence's last token is the first token of the next one.
        self.num_sequences = (len(self.data) - 1) // seq_len
        batch = microbatch_sequences * num_microbatches
        if self.num_sequences < batch:
            raise ValueError(
                f"{path} has {len(self.data)} bytes: a batch of {num_microbatches} microbatches of "
                f"{microbatch_sequences} sequences of {seq_len} tokens needs {batch * seq_len + 1}; "
                "give a longer file, or fewer or shorter sequences"
            )
        if num_steps is not None and self.num_sequences < batch * num_steps:
            raise ValueError(
                f"{path} has {len(self.data)} bytes to train on: {num_steps} steps of {batch} sequences of {seq_len} "
                f"tokens need {batch * num_steps * seq_len + 1} if none is to be read twice; give a longer file, or "
                "fewer steps"
            )
        if vocab < BYTE_VALUES:
            raise ValueError(
                f"model.vocab={vocab}: a text file is read as bytes, which needs {BYTE_VALUES} tokens; "
                f"use model.vocab={BYTE_VALUES} or synthetic tokens"
            )

    def microbatch(self, step: int, microbatch: int) -> Batch:
        first = (step * self.num_microbatches + microbatch) * self.microbatch_sequences
        visits = range(first, first + self.microbatch_sequences)
        rows = torch.stack([self._sequence(visit) for visit in visits])
        return _shifted(rows.to(torch.int64))

    def held_out(self) -> Batch:
        """All whole held-out sequences, (N, S); ValueError without one."""
        num = (len(self.unseen) - 1) // self.seq_len
        if num < 1:
            raise ValueError(f"{len(self.unseen)} bytes held out: a sequence needs {self.seq_len + 1}; hold out more")
        rows = self.unseen[: num * self.seq_len + 1].unfold(0, self.seq_len + 1, self.seq_len)
        return _shifted(rows.to(torch.int64))

    def _sequence(self, visit: int) -> torch.Tensor:
        """The `visit`-th sequence since the start of training, with the token behind it: (S + 1,)."""
        epoch, position = divmod(visit, self.num_sequences)
        start = int(_epoch_order(self.num_sequences, self.seed, epoch)[position]) * self.seq_len
        return self.data[start : start + self.seq_len + 1]


@lru_cache(maxsize=4)
def _epoch_order(num_sequences: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.randperm(num_sequences, generator=generator_for("epoch", seed, epoch))


def _shifted(rows: torch.Tensor) -> Batch:
    """rows (B, S + 1) -> tokens and labels (B, S)."""
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def _map_bytes(path: Path) -> torch.Tensor:
    """The file as uint8 (number of bytes,), mapped into memory."""
    try:
        size = path.stat().st_size
        if not size:
            raise ValueError(f"{path} is empty: give a text file of at least one batch")
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path}: cannot be read ({error.__class__.__name__}); give a text file") from None
