"""Orders copied by hand from the papers' figures and rules; microbatches and ranks count from 0."""

import pytest

from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entries

# Huang et al., NeurIPS'19, figure 2c: four devices, four microbatches. The figure drains in descending order;
# torch and the RoundPipe artifact ascend, and so does this one (baselines/synchronous/gpipe.py).
GPIPE = """
    0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
    2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3
"""

# Narayanan et al., SC'21, figure 4 (top): four devices, eight microbatches.
ONE_F_ONE_B = """
    0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
    2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
    3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
"""

# The same paper, figure 4 (bottom): two chunks a device, stages 0 to 3 light and 4 to 7 dark.
INTERLEAVED = """
    0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 \
0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7
    1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 \
5B4 5B5 5B6 5B7 1B4 1B5 1B6 1B7
    2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 \
6F6 6B4 6F7 6B5 6B6 6B7 2B4 2B5 2B6 2B7
    3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 \
7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7
"""

# Lamy-Poirier, MLSys'23, section 4: a chunk runs all microbatches before the next starts; back in reverse.
LOOPED_BFS = """
    0F0 0F1 0F2 0F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 0B3 0B2 0B1 0B0
    1F0 1F1 1F2 1F3 4F0 4F1 4F2 4F3 4B3 4B2 4B1 4B0 1B3 1B2 1B1 1B0
    2F0 2F1 2F2 2F3 5F0 5F1 5F2 5F3 5B3 5B2 5B1 5B0 2B3 2B2 2B1 2B0
"""

# RoundPipe: the jobs 0F 1F 2FB 1B 0B go round three devices; the second round, of one microbatch, starts
# where the first ended, on device 5 mod 3 = 2.
ROUNDPIPE = """
    0F0 0F1 0F2 1B0 1B1 1B2 1F3 0B3
    1F0 1F1 1F2 0B0 0B1 0B2 2FB3
    2FB0 2FB1 2FB2 0F3 1B3
"""

# Narayanan et al., SOSP'19, figure 4: four workers; the first admits four minibatches, then one for each gradient.
PIPEDREAM = """
    0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
    3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
"""

# Fan et al., PPoPP'21, section 3: policy B lets 2(p - r) - 1 in before the first backward.
DAPPLE = """
    0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0F6 0B2 0B3 0B4 0B5 0B6
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1B5 1B6
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 2F6 2B6
"""

# Li and Hoefler, SC'21, figure 3: four devices, four microbatches, of which 2 and 3 go up.
CHIMERA = """
    0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
    1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
    1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
    0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3
"""

CASES = {
    "pipedream": (PIPEDREAM, Shape(4, 4, 1, num_steps=6)),
    "pipedream_2bw": (PIPEDREAM, Shape(4, 4, 6)),
    "dapple": (DAPPLE, Shape(3, 3, 7)),
    "gpipe": (GPIPE, Shape(4, 4, 4)),
    "1f1b": (ONE_F_ONE_B, Shape(4, 4, 8)),
    "interleaved_1f1b": (INTERLEAVED, Shape(4, 8, 8)),
    "looped_bfs": (LOOPED_BFS, Shape(3, 6, 4)),
    "chimera": (CHIMERA, Shape(4, 4, 4)),
    "roundpipe": (ROUNDPIPE, Shape(3, 2, 4, 3, fused=True)),
}


def table(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, schedule.compute(rank))) for rank in range(schedule.shape.num_ranks)]


@pytest.mark.parametrize("name", CASES)
def test_order(name):
    golden, shape = CASES[name]
    assert table(entries()[name].build(shape)) == [" ".join(line.split()) for line in golden.strip().splitlines()]


def test_a_second_step_repeats_the_first():
    shape = Shape(3, 3, 2, num_steps=2)
    assert table(entries()["1f1b"].build(shape)) == [
        "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3",
        "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


# --- RoundPipe's dispatch rule ------------------------------------------------------------------------------


def dealt(num_forward: int, num_backward: int, devices: int, calls: list[int]) -> list[str]:
    """The released library's rule: job k of a call goes to device (c + k) mod P, then c grows by the jobs.

    A job runs one stage for all microbatches of its call; the first backward range is the fused one. The
    counter c is never reset, so a step and the one before differ in nothing but the microbatches' numbers.
    """
    rows: list[list[str]] = [[] for _ in range(devices)]
    counter = first = 0
    for size in calls:
        stages = [f"{stage}F" for stage in range(num_forward)]
        stages += [f"{num_backward - 1}FB", *(f"{stage}B" for stage in range(num_backward - 2, -1, -1))]
        for job, stage in enumerate(stages):
            rows[(counter + job) % devices] += [f"{stage}{first + mb}" for mb in range(size)]
        counter = (counter + len(stages)) % devices
        first += size
    return [" ".join(row) for row in rows]


@pytest.mark.parametrize(
    "num_forward, num_backward, devices, microbatches, steps",
    [
        (4, 11, 8, 16, 1),  # the artifact's Qwen3-1.7B cut
        (6, 17, 8, 16, 1),  # ... and Llama-3.1-8B
        (2, 3, 4, 5, 3),  # P + 1 microbatches, the library's default
        (1, 1, 2, 3, 4),
        (3, 5, 3, 10, 2),
    ],
)
def test_one_call_a_step_as_the_library_deals(num_forward, num_backward, devices, microbatches, steps):
    shape = Shape(devices, num_forward, microbatches, num_backward, steps, fused=True)
    schedule = entries()["roundpipe"].build(shape, round_size=microbatches)
    assert table(schedule) == dealt(num_forward, num_backward, devices, [microbatches] * steps)


@pytest.mark.parametrize("steps", [1, 3])
def test_rounds_of_at_most_p_as_the_artifact_deals(steps):
    shape = Shape(3, 2, 8, 5, steps, fused=True)
    assert table(entries()["roundpipe"].build(shape)) == dealt(2, 5, 3, [3, 3, 2] * steps)


def test_an_unfused_cut_runs_the_top_stage_twice():
    shape = Shape(2, 2, 2, 3)
    assert table(entries()["roundpipe"].build(shape)) == ["0F0 0F1 2B0 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"]
