"""Mutated tables on torch's runtime over gloo, beside what the communication simulator says of them.

    PYTHONPATH=.:tests python tests/torch_runtime/tables_on_gloo.py --tables 1000

prints one JSON object, and a line a verdict to stderr. A table hangs where all of its ranks sleep and use no processor
time for a while; one that only takes long does not.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch_cases import FAITHFUL, schedule_near

from rpbench.ir.schedule import ScheduleError
from rpbench.torch_runtime.communication.execution import Queues
from rpbench.torch_runtime.communication.tokens import COMPUTE, Table, Token, check_table, read_table
from rpbench.torch_runtime.communication.verdict import judge
from rpbench.torch_runtime.lowering import lower
from rpbench.torch_runtime.versions import has_waits, load_runtime

# What the simulator says -> what gloo does.
EXPECTED = {"alive": "right", "mixed": "wrong", "broken": "raised", "dead": "hangs"}
RIGHT, WRONG, RAISED = "right", "wrong", "raised"  # what a rank writes
QUIET_S = 0.6  # without processor time of any rank: nothing will come
LONGEST_S = 60.0
POLL_S = 0.05
BROKEN_LEFT_OUT = 0.9  # they hardly differ from each other


class Checked(nn.Module):
    """x -> 2 w x + 1 with w = 1: a value, and a gradient, tell stage and microbatch; others than expected are noted."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.stage, self.above, self.wrong = stage, num_stages - 1 - stage, False

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        first = 1 + float(number) / 1024
        self._check(x, (first + 1) * 2**self.stage - 1)
        y = 2 * self.weight * x + 1
        y.register_hook(lambda gradient: self._check(gradient, first * 2**self.above))
        return y

    def _check(self, found: torch.Tensor, expected: float) -> None:
        self.wrong |= found.flatten().tolist() != [expected]


def run_rank(table: Table, rank: int, folder: Path) -> str:
    """One rank's step, and whether all it computed with was as expected."""
    store = dist.FileStore(str(folder / "store"), len(table.rows))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(table.rows))
    count = 1 + max(part.microbatch or 0 for row in table.rows for token in row for part in token.parts)
    boundary = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    stages = [
        PipelineStage(
            Checked(stage, len(table.rank_of)),
            stage,
            len(table.rank_of),
            torch.device("cpu"),
            input_args=(boundary,),
            output_args=(boundary,),
        )
        for stage in sorted(stage for stage, holder in table.rank_of.items() if holder == rank)
    ]
    runtime = load_runtime()._PipelineScheduleRuntime(
        stages, count, loss_fn=lambda y, c: (y * c).sum(), scale_grads=False
    )
    (folder / f"rows{rank}.csv").write_text(table.to_csv())
    runtime._load_csv(str(folder / f"rows{rank}.csv"), format="compute_comms")
    numbers = torch.arange(count, dtype=torch.float64).reshape(count, 1)
    first = 1 + numbers / 1024
    runtime.step(first, target=first, number=numbers, losses=[], return_outputs=False)
    return WRONG if any(stage.submod.wrong for stage in stages) else RIGHT


def run_on_gloo(table: Table) -> str:
    """What a table does: `right`, `wrong`, `raised` or `hangs`."""
    with tempfile.TemporaryDirectory(prefix="rpbench-gloo-") as name:
        ranks = [_fork(table, rank, Path(name)) for rank in range(len(table.rows))]
        try:
            return _watch(ranks, Path(name))
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _fork(table: Table, rank: int, folder: Path) -> int:
    """A rank's process; it stays when it is through, or those that wait for it would see its connections close."""
    pid = os.fork()
    if pid:
        return pid
    said = RAISED
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        torch.set_num_threads(1)
        with suppress(Exception):
            said = run_rank(table, rank, folder)
        (folder / f"part{rank}").write_text(said)
        (folder / f"part{rank}").rename(folder / f"said{rank}")
        signal.pause()
    finally:
        os._exit(1)


def _watch(ranks: list[int], folder: Path) -> str:
    used, since, began = -1, time.monotonic(), time.monotonic()
    while time.monotonic() - began < LONGEST_S:
        time.sleep(POLL_S)
        said = [path.read_text() for path in folder.glob("said*")]
        if RAISED in said:
            return RAISED
        if len(said) == len(ranks):
            return WRONG if WRONG in said else RIGHT
        now = sum(map(_ticks, ranks))
        if now != used:
            used, since = now, time.monotonic()
        elif time.monotonic() - since > QUIET_S:
            break
    return "hangs"


def _ticks(pid: int) -> int:
    """Processor time of a process; one that runs, or waits for a core, never has the same twice."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.monotonic_ns() if fields[0] == "R" else int(fields[11]) + int(fields[12])


# --- mutations ------------------------------------------------------------------------------------------------

Rows = list[list[Token]]


def swap(rows: Rows, draw: random.Random) -> None:
    """Two messages of a row."""
    row = draw.choice(rows)
    one, other = draw.sample([place for place, token in enumerate(row) if token.is_message], 2)
    row[one], row[other] = row[other], row[one]


def move(rows: Rows, draw: random.Random) -> None:
    """A message to another place of its row."""
    row = draw.choice(rows)
    token = row.pop(draw.choice([place for place, token in enumerate(row) if token.is_message]))
    row.insert(draw.randrange(len(row) + 1), token)


def drift(rows: Rows, draw: random.Random) -> None:
    """A message a few places to one side."""
    row = draw.choice(rows)
    place = draw.choice([place for place, token in enumerate(row) if token.is_message])
    token = row.pop(place)
    row.insert(max(0, min(len(row), place + draw.choice([-3, -2, -1, 1, 2, 3]))), token)


def lose(rows: Rows, draw: random.Random) -> None:
    """One end of a message."""
    row = draw.choice(rows)
    row.pop(draw.choice([place for place, token in enumerate(row) if token.is_message]))


def exchange(rows: Rows, draw: random.Random) -> None:
    """Two computations beside each other, of a stage that is not the last."""
    row = draw.choice(rows)
    last = max(token.stage for row in rows for token in row)
    places = [
        place
        for place in range(len(row) - 1)
        if all(token.kind in COMPUTE and token.stage < last for token in row[place : place + 2])
    ]
    if places:
        place = draw.choice(places)
        row[place], row[place + 1] = row[place + 1], row[place]


MUTATIONS: tuple[Callable[[Rows, random.Random], None], ...] = (swap, move, drift, drift, lose, exchange)


@cache
def lowered(name: str, num_ranks: int, num_microbatches: int) -> Table:
    """A table of ours."""
    return read_table(lower(schedule_near(name, num_ranks, num_microbatches)).to_csv(waits=has_waits()))


def mutated(draw: random.Random) -> Table:
    """A table of ours with one to three mutations that leaves its computations complete."""
    while True:
        table = lowered(draw.choice(FAITHFUL), draw.choice([2, 3, 4]), draw.choice([2, 4, 6]))
        rows = [list(row) for row in table.rows]
        for _ in range(draw.choice([1, 1, 2, 3])):
            draw.choice(MUTATIONS)(rows, draw)
        found = Table(tuple(map(tuple, rows)), table.chain_length)
        with suppress(ScheduleError):
            check_table(found)
            said = judge(found, Queues.EDGE)
            if said.verdict == "broken" and draw.random() < BROKEN_LEFT_OUT:
                continue
            # Before 2.15 torch computes from whatever a buffer held, without an error, where a neighbour has not run.
            if not any("of the same rank has not run" in why for why in said.execution.faults.values()):
                return found


def main() -> int:
    """Compare and print; 1 if any differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, seen, differ = random.Random(asked.seed), Counter[str](), []
    for number in range(asked.tables):
        table = mutated(draw)
        said, found = judge(table, Queues.EDGE), run_on_gloo(table)
        seen[f"{said.verdict}: {found}"] += 1
        if found != EXPECTED[said.verdict]:
            differ.append({"table": number, "said": said.verdict, "found": found, "rows": table.to_csv()})
    for line, count in sorted(seen.items()):
        print(f"{line:20} {count}", file=sys.stderr)
    print(json.dumps({"torch": torch.__version__, "seed": asked.seed, "seen": dict(seen), "differ": differ}))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
