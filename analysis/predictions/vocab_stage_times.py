"""Iteration times of runs with a cut head, predicted from measured stage times.

    python -m analysis.predictions.vocab_stage_times      write vocab_stage_times.csv
    python -m analysis.predictions.vocab_stage_times known    plain 1F1B against its measured iterations

The stage times of 24 runs on eight A100 are given, their iterations are not. Each run is simulated in the order of its
method (`vocab_orders`) with the times of every stage, and three things are added that the given times leave out:

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
"""

import sys
from collections.abc import Sequence
from functools import cache
from statistics import fmean, median
from typing import Any, NamedTuple

from analysis.predictions.tables import FOLDER, Row, as_csv
from analysis.predictions.vocab_orders import build_order
from rpbench.cost.published import published_rows
from rpbench.cost.table import CostTable, Work
from rpbench.ir.action import Kind
from rpbench.ir.schedule import Shape
from rpbench.records.record import write_atomically
from rpbench.registry import entries
from rpbench.sim.longest_path import simulate

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
        """Of a boundary tensor: one sequence a microbatch."""
        return VALUE_BYTES * self.seq * self.hidden


def read_run(row: dict[str, str]) -> Run:
    """A run of a row of either file."""
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
    """Time of one step in the order of the run's method.

    Args:
        embedding_us: of a rank's share of the embedding's gradient, for one microbatch.
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
    (base,) = (
        other
        for other, _, _ in known().values()
        if (other.method, other.vocab, other.seq) == ("base", run.vocab, run.seq)
    )
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


def rows() -> list[Row]:
    """A row for every run that is asked for."""
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
    """Write the table, or print the known runs."""
    if list(arguments) == ["known"]:
        print(known_text())
    else:
        write_atomically(FOLDER / "vocab_stage_times.csv", as_csv(rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
