"""Which schedule is fastest on ragged batches: simulated against measured. Prints figures, asserts none about time.

python -m pytest tests/benchmarks/test_ragged_orders.py -m benchmarks -n 0 -s

All schedules take turns, every round in another order, on two threads of this machine. Beside the clock stands the
replay: when each action would have run if it had taken exactly the processor's time that it took, so that what else a
machine does leaves the order of schedules as it is. Both are compared with times simulated from a profile of whole
sequences and of the shortest, and with times simulated as if all microbatches were alike.
"""

import gc
import random
from itertools import combinations
from pathlib import Path
from statistics import median

import pytest

from rpbench.config.loading import load
from rpbench.run.recording import run

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_auto", "adaptis", "zb_v", "interleaved_1f1b", "roundpipe")
ROUNDS = 3
MICROBATCHES = 8
# Tokens of the sequences of a step, a few long ones among many short ones, in an order that was drawn once.
LENGTHS = (1024, 124, 256, 48, 832, 160, 384, 88)


@pytest.mark.benchmarks
def test_ragged_orders(tmp_path: Path) -> None:
    common = [
        "model=half_mid_gpt",
        "model.seq_len=1024",
        "cost=profiled",
        "cost.split_backward=true",
        "num_devices=2",
        f"num_microbatches={MICROBATCHES}",
    ]
    common += ["workload.microbatch_sequences=1", f"results_dir={tmp_path}", "force=true"]
    lengths = f"workload.lengths=[{','.join(map(str, LENGTHS))}]"
    simulated = {name: _makespan([f"schedule={name}", *common, lengths]) for name in SCHEDULES}
    as_means = {name: _makespan([f"schedule={name}", *common]) for name in SCHEDULES}
    clock: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    replay: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    draw = random.Random(0)
    for _ in range(ROUNDS):
        for name in draw.sample(SCHEDULES, len(SCHEDULES)):
            words = [f"schedule={name}", *common, lengths, "backend=cpu", "backend.num_warmup_runs=1"]
            (record,) = run(load(words))
            assert record["status"] == "ok"
            clock[name].append(record["makespan_s"])
            replay[name].append(record["replay_makespan_s"])
            gc.collect()  # of the run's tensors, before the next one
    first = SCHEDULES[1]
    print(
        f"\n{'':20}simulated  all alike  replayed   by the clock; each over {first}, medians of {ROUNDS} paired ratios"
    )
    measured = {
        what: {name: _paired(of, name, first) for name in SCHEDULES}
        for what, of in (("replayed", replay), ("by the clock", clock))
    }
    for name in sorted(SCHEDULES, key=simulated.__getitem__):
        row = simulated[name] / simulated[first], as_means[name] / as_means[first]
        print(f"{name:20}" + "".join(f"{value:9.3f}  " for value in (*row, *(own[name] for own in measured.values()))))
    for what, own in measured.items():
        print(
            f"pairs in the same order as {what}: simulated {_agree(simulated, own)}, all alike {_agree(as_means, own)}"
        )


def _makespan(words: list[str]) -> float:
    (record,) = run(load(words))
    return float(record["makespan_s"])


def _paired(of: dict[str, list[float]], name: str, other: str) -> float:
    return median(one / two for one, two in zip(of[name], of[other], strict=True))


def _agree(one: dict[str, float], other: dict[str, float]) -> str:
    pairs = list(combinations(one, 2))
    same = sum((one[a] < one[b]) == (other[a] < other[b]) for a, b in pairs)
    return f"{same} of {len(pairs)}"
