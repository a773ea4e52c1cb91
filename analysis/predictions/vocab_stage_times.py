"""Iteration times of runs whose head is cut over all ranks, predicted from measured stage times.

    python -m analysis.predictions.vocab_stage_times          write vocab_stage_times.csv
    python -m analysis.predictions.vocab_stage_times known    plain 1F1B against its measured iterations

The stage times of 24 runs on eight A100 are given, their iterations are not. Each run is simulated in the order of its
method (`build_order`). Added to the given times:

    overhead      optimizer, data and the work of transfers: the median of measured minus simulated milliseconds over
                  the 16 known runs with plain 1F1B. The only fitted constant.
    embedding     the gradient of the cut embedding: the first stage's backward less the others' in the known run with
                  the same vocabulary and sequence, divided by the ranks.
    transfers     a boundary tensor, and the all-reduce of an input gradient, over 240 GB/s (80 % of an A100's NVLink
                  one way, vendor) and 20 us. Assumed.

The intervals are assumptions. Low: no gradient of the embedding, two thirds of the overhead. High: twice the gradient,
half more overhead, and 2 % for waiting at barriers because stage times vary between microbatches.

A pass S of a microbatch is a rank's shard of the head. With 4 ranks and 8 microbatches, F = 1 and B = 2:

    one barrier    rank 0   F0 F1 F2 F3 S0 F4 S1 S2 S3 B0 F5 S4 B1 F6 S5 B2 F7 S6 B3 S7 B4 B5 B6 B7 S8
                   rank 3   F0 S0 F1 B0 S1 F2 B1 S2 F3 B2 S3 F4 B3 S4 F5 B4 S5 F6 B5 S6 F7 B6 S7 B7 S8
    two barriers   rank 0   F0 F1 F2 F3 S0 F4 S1 F5 S2 S3 S4 B0 F6 S5 B1 F7 S6 B2 S7 B3 S8 B4 B5 B6 B7
    interlaced     rank 0   F0 F1 F2 F3 F4 F5 S0 S1 S2 S3 B0 S4 F6 B1 S5 F7 B2 S6 B3 S7 B4 B5 B6 B7

    one barrier    S(i) computes the logits of i and the weight gradient of i - 1. One all-reduce after all S(i) makes
                   the sums and the input gradient: only the last stage's B(i) waits for it.
    two barriers   S(i) computes the logits of i and both gradients of i - 1, after the sums of all S(i - 1). The last
                   stage's B(i) waits for all S(i + 1).
    interlaced     S(i) computes logits and gradients of i; every rank waits inside it for the sums of all ranks.

As actions: HF is the first half of S, HB the second. With one barrier all work is HF, and HB is the all-reduce on the
lane `net`: HB(i) waits for every HF(i), and the last stage's B(i) for every HB(i).

Source: Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys'25 (arXiv
2411.05288), and the orders of the released code (sail-sg/VocabularyParallelism@6191c3b), described, not copied.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, repeat
from statistics import fmean, median
from typing import Any, NamedTuple

from analysis.predictions.tables import FOLDER, write
from baselines.tensor_parallel.interlaced import letters
from rpbench.cost.published import published_rows
from rpbench.cost.table import CostTable, Work
from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row, Schedule, Shape
from rpbench.registry import entries
from rpbench.sim.longest_path import simulate

METHODS = ("vocab", "synctwice", "interlaced")  # the files' names of one barrier, two barriers, interlaced

Token = tuple[str, int]  # F, B or S, and its microbatch


class Turn(NamedTuple):
    """A rank's steady phase: triples B S F (`backward_first`) or B F S, after `num_passes` passes S."""

    backward_first: bool
    num_passes: int


def build_order(method: str, num_ranks: int, num_microbatches: int, forward: float, backward: float) -> Schedule:
    """The schedule of a method with one stage on each rank; some orders depend on the times of a mean stage.

    Raises ValueError for an unknown method, or too few microbatches for a steady phase.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: one of {', '.join(METHODS)}")
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"num_microbatches={num_microbatches}: orders with a cut head need two for each of {num_ranks} ranks; "
            f"take at least {2 * num_ranks}"
        )
    rows = tuple(
        _lanes(method, rank, tokens(method, rank, num_ranks, num_microbatches, forward, backward), num_microbatches)
        for rank in range(num_ranks)
    )
    shape = Shape(num_ranks, num_ranks, num_microbatches, num_head_shards=num_ranks)
    return Schedule(shape, rows, name=method)


def tokens(
    method: str, rank: int, num_ranks: int, num_microbatches: int, forward: float, backward: float
) -> tuple[Token, ...]:
    """The row of one rank; with barriers, passes S are counted from 0 to `num_microbatches`."""
    if method == "interlaced":
        kinds: Iterable[str] = letters(num_ranks, rank, num_microbatches)
    else:
        turn = _turns(num_ranks, forward, backward)[rank]
        kinds = _with_barriers(rank, num_ranks, num_microbatches, turn, int(method == "synctwice"))
    count = {kind: iter(range(num_microbatches + (kind == "S"))) for kind in "FBS"}
    return tuple((kind, next(count[kind])) for kind in kinds)


def _turns(num_ranks: int, forward: float, backward: float) -> list[Turn]:
    """The steady phase of every rank, from the last rank upwards.

    Each rank's forward is due one forward earlier than the next rank's; once that is a whole backward early, the rank
    runs its forward before the pass S.
    """
    offset, was_late = 0.0, False
    turns = [Turn(True, 0)]
    for _ in range(num_ranks - 1):
        if was_late:
            early, was_late, offset = True, False, offset + backward - forward
        elif offset - forward >= -backward:
            early, offset = True, offset - forward
        else:
            early, was_late = False, True
        more = not (early and not turns[0].backward_first)
        turns.insert(0, Turn(early, turns[0].num_passes + more))
    return turns


def _with_barriers(rank: int, num_ranks: int, num_microbatches: int, turn: Turn, second: int) -> Iterator[str]:
    """Kinds of a row with one barrier, or two if `second` is 1."""
    warmup = num_ranks - rank
    yield from chain("F" * warmup, "SF" * (1 + second), "S" * turn.num_passes)
    steady = num_microbatches - warmup - 1 - second
    yield from ("BSF" if turn.backward_first else "BFS") * steady
    passes_left = num_microbatches + 1 - (1 + second + turn.num_passes + steady)
    backwards_left = num_microbatches - steady
    paired = min(passes_left - (1 - second), backwards_left)  # with one barrier, the last pass ends the row
    yield from chain("BS" * paired, "B" * (backwards_left - paired), "S" * (passes_left - paired))


def _lanes(method: str, rank: int, row: tuple[Token, ...], num_microbatches: int) -> dict[str, Row]:
    """The lanes of a rank; the pass S after the last microbatch has no logits."""
    compute: list[Action] = []
    for kind, microbatch in row:
        if kind != "S":
            compute.append(Action(Kind[kind], rank, microbatch))
        elif method == "interlaced":
            compute += [Action(Kind.HF, rank, microbatch), Action(Kind.HB, rank, microbatch)]
        else:
            if method == "synctwice" and microbatch > 0:
                compute.append(Action(Kind.HB, rank, microbatch - 1))
            if microbatch < num_microbatches:
                compute.append(Action(Kind.HF, rank, microbatch))
    if method != "vocab":
        return {"compute": tuple(compute)}
    sums = zip(repeat(Kind.HB), repeat(rank), range(num_microbatches))
    return {"compute": tuple(compute), "net": tuple(Action(*what) for what in sums)}


LINK_BYTES_PER_US, LATENCY_US = 240e3, 20.0
VALUE_BYTES = 2  # fp16
FORWARD_PART = 1 / 3  # of a pass S in two halves: one matrix product of three
MIB = 2**20

# 16 bytes of a parameter (fp16 weight and gradient, three fp32 values) explain how the known runs differ by vocabulary
# to 0.1 %; 34 bytes of a token and hidden value are Korthikanti et al. (arXiv 2205.05198) with fused attention. Fitted
# on the runs at 2,048 tokens: a constant; and bytes of a parameter in the optimizer's step instead of activations,
# which decide the run with the largest vocabulary.
STATE_BYTES, STEP_BYTES = 16, 6.1
LAYER_BYTES, CONSTANT_BYTES = 34, 176 * MIB
LOGIT_BYTES = 10  # one logit: fp16, its fp32 exponential, an fp32 temporary


class Run(NamedTuple):
    """A run of the files; times in us for each stage."""

    id: str
    method: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    head: tuple[float, ...]
    vocab: int
    seq: int
    num_microbatches: int
    hidden: int
    num_layers: int

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a boundary tensor of one sequence."""
        return VALUE_BYTES * self.seq * self.hidden


def read_run(row: dict[str, str]) -> Run:
    forward, backward, head = (
        tuple(map(float, row[f"{name}_us_per_stage"].split())) for name in ("forward", "backward", "vocab_pass")
    )
    sizes = [int(row[name]) for name in ("vocab", "seq", "num_microbatches", "hidden", "layers")]
    return Run(row["id"], row["method"], forward, backward, head, *sizes)


@cache
def known() -> dict[str, tuple[Run, float, float]]:
    """Runs with plain 1F1B, their iterations (ms) and peaks (bytes), by id."""
    return {
        row["id"]: (read_run(row), float(row["iteration_ms"]), float(row["max_allocated_MB"]) * MIB)
        for row in published_rows("measured/vocab_stage_times.csv")
    }


@cache
def simulated_ms(run: Run, embedding_us: float = 0.0) -> float:
    """Time of one step; `embedding_us` is that of a rank's shard of the embedding's gradient for one microbatch."""
    num_ranks, hop = len(run.forward), LATENCY_US + run.boundary_bytes / LINK_BYTES_PER_US
    work = {Kind.F: _works(run.forward), Kind.B: _works(time + embedding_us for time in run.backward)}
    if not any(run.head):
        schedule = entries()["1f1b"].build(Shape(num_ranks, num_ranks, run.num_microbatches))
    else:
        means = fmean(run.forward), fmean(run.backward)
        schedule = build_order(run.method, num_ranks, run.num_microbatches, *means)
        one_barrier = run.method == "vocab"
        sums = 2 * (num_ranks - 1) / num_ranks * run.boundary_bytes / LINK_BYTES_PER_US + LATENCY_US
        part = 1.0 if one_barrier else FORWARD_PART
        work[Kind.HF] = _works(part * time for time in run.head)
        work[Kind.HB] = _works(sums if one_barrier else (1 - part) * time for time in run.head)
    timeline = simulate(schedule, CostTable(work, hop, units_per_second=1_000_000))
    return float(timeline.makespan) / 1000


def _works(times: Any) -> tuple[Work, ...]:
    return tuple(map(Work, times))


@cache
def overhead_ms() -> float:
    """Measured less simulated milliseconds of a step of plain 1F1B: the median of the known runs."""
    return median(measured - simulated_ms(run) for run, measured, _ in known().values())


def embedding_us(run: Run) -> float:
    """Time of a rank's shard of the embedding's gradient, from the known run of the same sizes."""
    wanted = ("base", run.vocab, run.seq)
    (base,) = (other for other, _, _ in known().values() if (other.method, other.vocab, other.seq) == wanted)
    return (base.backward[0] - fmean(base.backward[1:-1])) / len(base.backward)


def peak_bytes(run: Run) -> float:
    """Allocated bytes of the first rank, which has the most microbatches in flight.

    Weights and optimizer state, and the larger of activations with logits and the optimizer's step.
    """
    num_ranks = len(run.forward)
    layers = run.num_layers // num_ranks
    cut = num_ranks if any(run.head) else 1
    tables = 2 if cut > 1 else 1  # plain: the embedding alone; cut: shards of embedding and head
    parameters = layers * 12 * run.hidden**2 + run.seq * run.hidden + tables * run.vocab * run.hidden / cut
    in_flight = {"vocab": num_ranks + 1, "synctwice": num_ranks + 2, "interlaced": 3 * num_ranks // 2}
    activations = in_flight.get(run.method, num_ranks) * layers * LAYER_BYTES * run.seq * run.hidden
    logits = LOGIT_BYTES * run.seq * run.vocab / cut if cut > 1 else 0
    return STATE_BYTES * parameters + max(activations + logits + CONSTANT_BYTES, STEP_BYTES * parameters)


def rows() -> list[dict[str, str]]:
    overhead = overhead_ms()
    found = []
    for run in map(read_run, published_rows("challenge/vocab_stage_times.csv")):
        plain, middle, twice = (simulated_ms(run, factor * embedding_us(run)) for factor in (0, 1, 2))
        found.append(
            {
                "id": run.id,
                "iteration_ms": f"{middle + overhead:.1f}",
                "iteration_ms_low": f"{plain + overhead * 2 / 3:.1f}",
                "iteration_ms_high": f"{1.02 * twice + 1.5 * overhead:.1f}",
                "peak_memory_bytes": f"{peak_bytes(run):.0f}",
            }
        )
    return found


def known_text() -> str:
    """Errors of the predicted iterations and peaks of plain 1F1B."""
    overhead = overhead_ms()
    lines = [f"overhead {overhead:.1f} ms (fitted: the median of these rows)"]
    for run, measured, peak in known().values():
        off, off_peak = (simulated_ms(run) + overhead) / measured - 1, peak_bytes(run) / peak - 1
        lines.append(
            f"{run.id} {run.method} vocabulary {run.vocab}, {run.seq} tokens: time {off:+.2%}, memory {off_peak:+.2%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["known"]:
        print(known_text())
    else:
        write(FOLDER / "vocab_stage_times.csv", rows())
