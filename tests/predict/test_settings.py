"""Settings: how a call is cut, and where a run's numbers are from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.predict.settings import Settings, given_settings, published_settings

GIB = 2**30


@pytest.mark.parametrize(
    ("sequences", "calls", "num", "chunks"),
    [
        (64, 1, 10, (7, 10, 1)),  # nine of 7 and one of 1
        (256, 2, 10, (13, 10, 11)),
        (256, 5, 10, (6, 9, 3.2)),  # fewer than asked for, as torch.chunk does
        (128, 1, 16, (8, 16, 8)),
    ],
)
def test_a_call_is_cut_as_torch_chunk_does(sequences, calls, num, chunks):
    assert Settings(sequences, calls, num, 1.0, "").chunks == pytest.approx(chunks)


@given(sequences=st.integers(1, 600), calls=st.integers(1, 8), num=st.integers(1, 32))
def test_chunks_hold_every_sequence(sequences, calls, num):
    chunks = Settings(sequences, calls, num, 1.0, "").chunks
    assert chunks.size * (chunks.num - 1) + chunks.last == pytest.approx(sequences / calls)
    assert 0 < chunks.last <= chunks.size
    assert chunks.num <= max(num, 1)


def test_settings_are_the_run_scripts():
    found = published_settings("roundpipe", "8x-rtx4090-24gb", "llama-3.1-8b", 24 * GIB)
    assert (found.global_sequences, found.num_calls, found.num_microbatches) == (256, 2, 10)
    found = published_settings("megatron-pp", "8x-rtx4090-24gb", "qwen3-1.7b", 24 * GIB)
    assert (found.num_calls, found.num_microbatches, found.microbatch_sequences) == (128, 1, 4)


def test_other_machines_take_those_of_the_nearest_memory_and_say_so():
    large = published_settings("fsdp", None, "llama-3.1-8b", 80 * GIB)
    small = published_settings("fsdp", None, "llama-3.1-8b", 32 * GIB)
    assert "a800" in large.source
    assert "4090" in small.source
    assert "smallest trial" in published_settings("fsdp", None, "gpt-oss-20b", 24 * GIB).source
    assert "no settings are public" in published_settings("mobius", None, "llama-3.1-8b", 24 * GIB).source


@pytest.mark.parametrize("system", ["roundpipe", "megatron-pp", "zero-2"])
def test_given_sizes_are_the_same_batch_for_every_system(system):
    found = given_settings(system, 8, 4, 16)
    assert found.global_sequences == 64
    each = found.microbatch_sequences * found.num_calls * found.num_microbatches
    assert each * (8 if system == "zero-2" else 1) == 64


def test_devices_and_calls_together_take_the_whole_batch_where_it_does_not_divide():
    """Twelve sequences on eight devices, one at a time: two calls of three quarters of a sequence."""
    found = given_settings("fsdp", 8, 1, 12)
    assert (found.global_sequences, found.num_calls, found.microbatch_sequences) == (12, 2, 0.75)


@pytest.mark.parametrize("system", ["fsdp", "zero-2", "zero-infinity"])
def test_fewer_replicas_go_through_the_published_batch_in_more_parts(system):
    """They kept the parts of eight devices: four had a higher pace than eight, and three a higher one still."""
    each = [published_settings(system, "8x-rtx4090-24gb", "qwen3-1.7b", 24 * GIB, number) for number in (8, 4, 2, 1)]
    assert {found.global_sequences for found in each} == {each[0].global_sequences}
    assert [found.num_calls for found in each] == [each[0].num_calls * many for many in (1, 2, 4, 8)]
    assert {found.microbatch_sequences for found in each} == {each[0].microbatch_sequences}
    assert each[1].source.endswith(", for num_devices=4")


@pytest.mark.parametrize("system", ["roundpipe", "megatron-pp", "mobius"])
def test_the_parts_of_a_batch_that_all_devices_share_do_not_depend_on_their_number(system):
    eight, four = (published_settings(system, "8x-rtx4090-24gb", "qwen3-1.7b", 24 * GIB, number) for number in (8, 4))
    assert eight == four
