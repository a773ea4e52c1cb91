"""Text that is held out: no microbatch is made of it, and what is trained on is read once."""

import pytest
import torch

from rpbench.models.data import TextTokens


@pytest.fixture
def path(tmp_path):
    """A hundred bytes that say where they stand."""
    found = tmp_path / "text"
    found.write_bytes(bytes(range(100)))
    return found


def tokens_of(path, **options):
    return TextTokens(path, vocab=256, seq_len=4, microbatch_sequences=2, num_microbatches=1, **options)


def test_nobody_reads_what_is_held_out_and_nothing_is_read_twice(path):
    data = tokens_of(path, held_out=0.2, num_steps=9)
    read = torch.cat([data.microbatch(step, 0).tokens.flatten() for step in range(9)])
    assert len(set(read.tolist())) == len(read) == 72
    assert max(read) < 80
    unseen = data.held_out()
    assert unseen.tokens.tolist() == [[80, 81, 82, 83], [84, 85, 86, 87], [88, 89, 90, 91], [92, 93, 94, 95]]
    assert torch.equal(unseen.labels, unseen.tokens + 1)


def test_too_short_a_text_is_refused(path):
    with pytest.raises(ValueError, match="80 bytes to train on: 10 steps of 2 sequences of 4 tokens need 81"):
        tokens_of(path, held_out=0.2, num_steps=10)
    assert tokens_of(path, held_out=0.2).num_sequences == 19, "without a number of steps it may be read again"
    with pytest.raises(ValueError, match="4 bytes held out: a sequence needs 5"):
        tokens_of(path, held_out=0.04).held_out()
