"""Iteration times of runs with a cut head, predicted from measured stage times.

    python -m analysis.predictions.vocab_stage_times      write vocab_stage_times.csv
    python -m analysis.predictions.vocab_stage_times known    plain 1F1B against its measured iterations

The stage times of 24 runs on eight A100 are given, their iterations are not. Each run is simulated in the order of its
method (`build_order`) with the times of every stage, and three things are added that the given times leave out:

    overhead      optimizer, data and the transfers' own work: the median of measured minus simulated over the 16
                  known runs with plain 1F1B. Fitted: one constant, in ms.
    embedding     the gradient of the cut embedding: the first stage's backward over the others' in the known run with
                  the same vocabulary and sequence, divided by the ranks. Not fitted: other runs' measurements.
    transfers     a boundary tensor, and the all-reduce of an input gradient, over 240 GB/s (80 % of the NVLink of an
                  A100 one way, vendor) and 20 us. Assumed.

The ends of an interval are assumptions: below, no gradient of the embedding and two thirds of the overhead; above,
twice the gradient, half more overhead, and 2 % for stages whose times vary from microbatch to microbatch, which a
barrier for each microbatch turns into waiting.

Memory is that of the first rank: see `peak_bytes`.

Orders of runs whose head is cut over all ranks: one barrier, two barriers, interlaced.

A pass S of a microbatch is a rank's share of the head. With 4 ranks and 8 microbatches, F = 1 and B = 2:

    one barrier    rank 0   F0 F1 F2 F3 S0 F4 S1 S2 S3 B0 F5 S4 B1 F6 S5 B2 F7 S6 B3 S7 B4 B5 B6 B7 S8
                   rank 3   F0 S0 F1 B0 S1 F2 B1 S2 F3 B2 S3 F4 B3 S4 F5 B4 S5 F6 B5 S6 F7 B6 S7 B7 S8
    two barriers   rank 0   F0 F1 F2 F3 S0 F4 S1 F5 S2 S3 S4 B0 F6 S5 B1 F7 S6 B2 S7 B3 S8 B4 B5 B6 B7
    interlaced     rank 0   F0 F1 F2 F3 F4 F5 S0 S1 S2 S3 B0 S4 F6 B1 S5 F7 B2 S6 B3 S7 B4 B5 B6 B7

What S waits for and what waits for it:

    one barrier    S(i) holds the logits of i and the weight gradient of i - 1. One all-reduce after all S(i) brings the
                   sums and the input gradient: the last stage's B(i) waits for it, ranks do not.
    two barriers   S(i) holds the logits of i and both gradients of i - 1, which wait for the sums of all S(i - 1). The
                   last stage's B(i) waits for all S(i + 1).
    interlaced     S(i) holds logits and gradients of i, and every rank waits inside it for the sums of all.

As actions: HF is the first half of a share, HB the second. With one barrier the second half is the all-reduce, on the
lane `net`, and all the work is HF: HB(i) waits for every HF(i), and the last stage's B(i) for every HB(i).

Source: Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys'25 (arXiv
2411.05288), and the orders of the released code (sail-sg/VocabularyParallelism@6191c3b), described, not copied.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
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

METHODS = ("vocab", "synctwice", "interlaced")  # as the measured runs name one barrier, two barriers, interlaced

Token = tuple[str, int]  # F, B or S, and its microbatch


class Turn(NamedTuple):
    """The order of a rank in the steady phase.

    Args:
        backward_first: its triple is B S F, not B F S.
        num_passes: passes S between the last forward of the warmup and the first triple.
    """

    backward_first: bool
    num_passes: int


def build_order(method: str, num_ranks: int, num_microbatches: int, forward: float, backward: float) -> Schedule:
    """The schedule of a method of `METHODS`, one stage on each rank, for times of a mean stage, which some orders
    depend on.

    Raises ValueError for an unknown method, or so few microbatches that the steady phase is empty.
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
    """The row of one rank; a cut pass S of a method with barriers is counted from 0 to `num_microbatches`."""
    if method == "interlaced":
        kinds: Iterable[str] = letters(num_ranks, rank, num_microbatches)
    else:
        turn = _turns(num_ranks, forward, backward)[rank]
        kinds = _with_barriers(rank, num_ranks, num_microbatches, turn, int(method == "synctwice"))
    count = {kind: iter(range(num_microbatches + (kind == "S"))) for kind in "FBS"}
    return tuple((kind, next(count[kind])) for kind in kinds)


def _turns(num_ranks: int, forward: float, backward: float) -> list[Turn]:
    """The steady phase of every rank, found from the last rank upwards.

    Going up a rank, its forward is due one forward earlier; once that is a whole backward early, the rank runs its
    forward ahead of the pass S instead.
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
    """Kinds of a row with one barrier, or with a `second`."""
    warmup = num_ranks - rank
    yield from chain("F" * warmup, "SF" * (1 + second), "S" * turn.num_passes)
    steady = num_microbatches - warmup - 1 - second
    yield from ("BSF" if turn.backward_first else "BFS") * steady
    passes_left = num_microbatches + 1 - (1 + second + turn.num_passes + steady)
    backwards_left = num_microbatches - steady
    paired = min(passes_left - (1 - second), backwards_left)  # with one barrier, the last pass ends the row
    yield from chain("BS" * paired, "B" * (backwards_left - paired), "S" * (passes_left - paired))


def _lanes(method: str, rank: int, row: tuple[Token, ...], num_microbatches: int) -> dict[str, Row]:
    """The lanes of a rank; the pass after the last microbatch has no logits."""
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
FORWARD_PART = 1 / 3  # of a pass S whose two halves stand apart: one product of three
MIB = 2**20

# Memory of the known runs (all in MiB): 16 bytes a parameter (fp16 weight and gradient, three fp32 values) explain
# their differences by vocabulary to 0.1 %; 34 bytes a token and hidden value are Korthikanti et al. (arXiv 2205.05198)
# with fused attention. Fitted on the runs at 2,048 tokens: a constant; and what the optimizer's step needs for a
# parameter in place of activations, which the run with the largest vocabulary alone shows.
STATE_BYTES, STEP_BYTES = 16, 6.1
LAYER_BYTES, CONSTANT_BYTES = 34, 176 * MIB
LOGIT_BYTES = 10  # one logit of a share, counted: fp16, its fp32 exponential, an fp32 temporary


class Run(NamedTuple):
    """A run of the files: times in us, one a stage."""

    id: str
    method: str
    vocab: int
    seq: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    head: tuple[float, ...]
    num_microbatches: int
    hidden: int
    num_layers: int

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a boundary tensor: one sequence a microbatch."""
        return VALUE_BYTES * self.seq * self.hidden


def read_run(row: dict[str, str]) -> Run:
    forward, backward, head = (
        tuple(float(time) for time in row[f"{name}_us_per_stage"].split())
        for name in ("forward", "backward", "vocab_pass")
    )
    vocab, seq, num_microbatches, hidden, num_layers = (
        int(row[name]) for name in ("vocab", "seq", "num_microbatches", "hidden", "layers")
    )
    return Run(row["id"], row["method"], vocab, seq, forward, backward, head, num_microbatches, hidden, num_layers)


@cache
def known() -> dict[str, tuple[Run, float, float]]:
    """Runs with plain 1F1B with their iteration (ms) and peak (bytes), by id."""
    return {
        row["id"]: (read_run(row), float(row["iteration_ms"]), float(row["max_allocated_MB"]) * MIB)
        for row in published_rows("measured/vocab_stage_times.csv")
    }


@cache
def simulated_ms(run: Run, embedding_us: float = 0.0) -> float:
    """Time of one step in the order of the run's method; `embedding_us` is of a rank's share of the embedding's
    gradient, for one microbatch.
    """
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
    """Milliseconds that a step of plain 1F1B takes beyond its simulated one: the median of the known runs."""
    return median(measured - simulated_ms(run) for run, measured, _ in known().values())


def embedding_us(run: Run) -> float:
    """A rank's share of the gradient of the embedding, from the known run of the same sizes."""
    wanted = ("base", run.vocab, run.seq)
    (base,) = (other for other, _, _ in known().values() if (other.method, other.vocab, other.seq) == wanted)
    return (base.backward[0] - fmean(base.backward[1:-1])) / len(base.backward)


def peak_bytes(run: Run) -> float:
    """Allocated bytes of the first rank, which holds the most microbatches.

    Weights and optimizer state with either the activations of all microbatches in flight and the logits of a share,
    or what the optimizer's step needs.
    """
    num_ranks = len(run.forward)
    layers = run.num_layers // num_ranks
    cut = num_ranks if any(run.head) else 1
    tables = 2 if cut > 1 else 1  # plain: the embedding alone; cut: shares of embedding and head
    parameters = layers * 12 * run.hidden**2 + run.seq * run.hidden + tables * run.vocab * run.hidden / cut
    in_flight = {"vocab": num_ranks + 1, "synctwice": num_ranks + 2, "interlaced": 3 * num_ranks // 2}
    activations = in_flight.get(run.method, num_ranks) * layers * LAYER_BYTES * run.seq * run.hidden
    logits = LOGIT_BYTES * run.seq * run.vocab / cut if cut > 1 else 0
    return STATE_BYTES * parameters + max(activations + logits + CONSTANT_BYTES, STEP_BYTES * parameters)


def rows() -> list[dict[str, str]]:
    overhead = overhead_ms()
    found = []
    for row in published_rows("challenge/vocab_stage_times.csv"):
        run = read_run(row)
        plain, middle, twice = (simulated_ms(run, factor * embedding_us(run)) for factor in (0, 1, 2))
        ends = middle + overhead, plain + overhead * 2 / 3, 1.02 * twice + 1.5 * overhead
        names = ("iteration_ms", "iteration_ms_low", "iteration_ms_high")
        found.append(
            {"id": run.id}
            | {name: f"{end:.1f}" for name, end in zip(names, ends, strict=True)}
            | {"peak_memory_bytes": f"{peak_bytes(run):.0f}"}
        )
    return found


def known_text() -> str:
    """Simulated and measured iterations of plain 1F1B, the overhead added; and peaks."""
    overhead = overhead_ms()
    lines = [f"overhead {overhead:.1f} ms (fitted: the median of these rows)"]
    for run, measured, peak in known().values():
        off, off_peak = (simulated_ms(run) + overhead) / measured - 1, peak_bytes(run) / peak - 1
        lines.append(
            f"{run.id} {run.method} vocabulary {run.vocab}, {run.seq} tokens: time {off:+.2%}, memory {off_peak:+.2%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["known"]:
        print(known_text())
    else:
        write(FOLDER / "vocab_stage_times.csv", rows())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
