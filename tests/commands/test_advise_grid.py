"""Advice against plain runs: over a grid of settings none beats the first row by 1 %, nor any row by 3 %."""

import io
import re
import shlex
from itertools import product

import pytest

from rpbench.commands.advising.advise import advise_on

SIZES = ("num_layers=8", "hidden=2048", "heads=16", "vocab=32000", "seq_len=1024", "gpu=l40s", "num_devices=2")
NAMES = ("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "dualpipe_v", "zb_v", "zero_2", "zero_3")
CHUNKS = {"interleaved_1f1b": (2, 3), "dualpipe_v": (2,), "zb_v": (2,), "zero_2": (2, 4), "zero_3": (2, 4)}
SEQUENCES = 16  # of a step


def grid(row):
    """Command lines near that of a row: other microbatches, chunks and recomputation, and cuts that are searched."""
    words = shlex.split(row["command"])[3:]
    left_out = re.compile(r"num_microbatches=|workload.microbatch_sequences=|recompute=|partition=|chunks_per_device=")
    kept = [word for word in words if not left_out.match(word)]
    chunks = CHUNKS.get(row["schedule"], (1,))
    for size, recompute, number in product((1, 2, 4), ("none", "all", "fitting"), chunks):
        yield [
            *kept,
            f"num_microbatches={SEQUENCES // size}",
            f"workload.microbatch_sequences={size}",
            f"recompute={recompute}",
            f"chunks_per_device={number}",
            "partition=search",
        ]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [48e9, 6e9])
def test_no_plain_run_of_a_grid_beats_the_answer(memory, rpbench):
    words = [*SIZES, f"device_memory_bytes={memory:.0f}", f"schedules={','.join(NAMES)}", "seconds=20"]
    answer = advise_on(words, io.StringIO())
    unfit = {row["schedule"] for row in answer["does_not_fit"]}
    assert {row["schedule"] for row in answer["ranking"]} | unfit == set(NAMES)
    best = 0.0
    for row in answer["ranking"]:
        for each in grid(row):
            status, records, _ = rpbench(*each)
            if status == 0 and records[0]["status"] == "ok":
                best = max(best, records[0]["tokens_per_s"])
                # A record's pace is of all its steps, the row's of a middle one, which is no slower.
                assert records[0]["tokens_per_s"] <= 1.03 * row["tokens_per_s"], (row["schedule"], each)
    assert best <= 1.01 * answer["ranking"][0]["tokens_per_s"]
