"""Batches: the same for everybody who asks, and clear errors for files that cannot serve."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rpbench.models import Batch, SyntheticTokens, TextTokens


def same(first: Batch, second: Batch) -> bool:
    return torch.equal(first.tokens, second.tokens) and torch.equal(first.labels, second.labels)


def text(path: Path, size: int, **changes: Any) -> TextTokens:
    path.write_bytes(bytes(i % 251 for i in range(size)))
    options = {"vocab": 256, "seq_len": 10, "microbatch_sequences": 2, "num_microbatches": 3, "seed": 0}
    return TextTokens(path, **{**options, **changes})


def test_synthetic_tokens_do_not_depend_on_who_asks_or_when() -> None:
    first, second = (SyntheticTokens(vocab=50, seq_len=8, microbatch_sequences=3, seed=4) for _ in range(2))
    places = [(step, mb) for step in range(3) for mb in range(4)]
    forwards = {place: first.microbatch(*place) for place in places}
    torch.manual_seed(99)
    backwards = {place: second.microbatch(*place) for place in reversed(places)}
    assert all(same(forwards[place], backwards[place]) for place in places)
    rows = torch.cat([batch.tokens for batch in forwards.values()])
    assert len(rows.unique(dim=0)) == len(rows)


def test_synthetic_tokens_depend_on_the_seed_and_fill_the_vocabulary() -> None:
    batches = [
        SyntheticTokens(vocab=5, seq_len=100, microbatch_sequences=2, seed=seed).microbatch(0, 0) for seed in (0, 1)
    ]
    assert not same(*batches)
    assert batches[0].tokens.unique().tolist() == [0, 1, 2, 3, 4]
    assert batches[0].tokens.dtype == torch.int64
    assert batches[0].tokens.shape == batches[0].labels.shape == (2, 100)


@pytest.mark.parametrize("source", ["synthetic", "text"])
def test_labels_are_the_tokens_that_follow(source: str, tmp_path: Path) -> None:
    data = SyntheticTokens(50, 10, 2) if source == "synthetic" else text(tmp_path / "text", 200)
    batch = data.microbatch(1, 2)
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    if source == "text":
        assert torch.equal((batch.tokens + 1) % 251, batch.labels)


def test_an_epoch_shows_every_sequence_once_and_the_next_one_in_another_order(tmp_path: Path) -> None:
    data = text(tmp_path / "text", 121)  # 12 sequences: two steps of six an epoch
    epochs = [
        [
            int(row[0])
            for step in (2 * epoch, 2 * epoch + 1)
            for mb in range(3)
            for row in data.microbatch(step, mb).tokens
        ]
        for epoch in range(3)
    ]
    assert [sorted(starts) for starts in epochs] == [[10 * i for i in range(12)]] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    other = text(tmp_path / "text", 121, seed=1)
    assert not same(other.microbatch(0, 0), data.microbatch(0, 0))
    again = text(tmp_path / "text", 121)
    assert same(again.microbatch(5, 1), data.microbatch(5, 1))


def test_a_step_across_the_end_of_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    data = text(tmp_path / "text", 71)  # 7 sequences, 6 a step
    starts = [int(row[0]) for step in range(7) for mb in range(3) for row in data.microbatch(step, mb).tokens]
    for epoch in range(6):
        assert sorted(starts[7 * epoch : 7 * epoch + 7]) == [0, 10, 20, 30, 40, 50, 60]


def test_a_file_of_exactly_one_batch_serves(tmp_path: Path) -> None:
    assert text(tmp_path / "text", 61).num_sequences == 6


@pytest.mark.parametrize(
    "size, changes, message",
    [
        (60, {}, r"has 60 bytes: a batch of 3 microbatches of 2 sequences of 10 tokens needs 61"),
        (0, {}, r"is empty"),
        (500, {"vocab": 255}, r"model.vocab=255: a text file is read as bytes, which needs 256 tokens"),
    ],
)
def test_files_that_cannot_serve_are_refused(size: int, changes: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        text(tmp_path / "text", size, **changes)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    options = {"vocab": 256, "seq_len": 10, "microbatch_sequences": 2, "num_microbatches": 3}
    with pytest.raises(ValueError, match=r"missing: cannot be read \(FileNotFoundError\)"):
        TextTokens(tmp_path / "missing", **options)
    with pytest.raises(ValueError, match="cannot be read"):
        TextTokens(tmp_path, **options)
