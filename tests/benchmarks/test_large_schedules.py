"""What large schedules take: made, checked and laid out as a graph, timed. Prints processor seconds, asserts none.

python -m pytest tests/benchmarks/test_large_schedules.py -m benchmarks -n 0 -s
"""

import subprocess
import sys
import time
from itertools import pairwise
from resource import RUSAGE_CHILDREN, getrusage

import pytest
from sizes import sized

from rpbench.cost.constant import unit_times
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entries
from rpbench.run.scheduled import collection_paused
from rpbench.sim.checked import checked_graph
from rpbench.sim.longest_path import simulate_graph

pytestmark = pytest.mark.benchmarks

DEVICES, MICROBATCHES = sized((64, 512), (4, 8))
BAR_S = 5.0


def partition_of(entry):
    """One layer a stage; where the directions are cut apart, 3 backward stages for 2 forward ones."""
    if entry.separate_cuts:
        return Partition(split_evenly(3 * DEVICES, 2 * DEVICES), (*(1,) * (3 * DEVICES), 0), fused=True)
    if entry.tensor_parallel:  # no pipeline: every device works on every stage, and every share waits for all
        return symmetric((1,))
    chunks = entry.chunks or (2 if entry.looped else 1)
    return symmetric((1,) * (DEVICES * chunks))


def seconds_of(entry):
    """Processor seconds of each part, and the number of actions."""
    partition = partition_of(entry)
    stages = len(partition.forward), len(partition.backward)
    shape = Shape(DEVICES, stages[0], MICROBATCHES, stages[1], fused=partition.fused)
    marks = [time.process_time()]
    with collection_paused():
        schedule = entry.build(shape).with_partition(partition)
        marks.append(time.process_time())
        graph, _ = checked_graph(schedule)
    marks.append(time.process_time())
    shards = DEVICES if entry.shards_head else 0
    simulate_graph(graph, unit_times(partition.num_layers).table(partition, num_head_shards=shards))
    marks.append(time.process_time())
    return [after - before for before, after in pairwise(marks)], schedule.num_actions


def test_every_schedule():
    print(f"\n{DEVICES} devices x {MICROBATCHES} microbatches; the bar is {BAR_S:g} s together")
    seconds_of(entries()["1f1b"])  # loads the compiled kernels
    for name, entry in entries().items():
        try:
            parts, num_actions = seconds_of(entry)
        except ValueError as error:
            print(f"  {name:20} refused: {str(error).splitlines()[0][:90]}")
            continue
        made, checked, timed = parts
        over = "  OVER THE BAR" if sum(parts) > BAR_S else ""
        print(
            f"  {name:20} {num_actions:8,} actions: made {made:6.2f}, checked {checked:5.2f}, timed {timed:5.2f}, "
            f"together {sum(parts):6.2f} s{over}",
            flush=True,
        )


def test_a_thousand_devices(tmp_path):
    """The command as a user gives it; the bar is 5 s."""
    command = ["schedule=1f1b", "cost=constant", f"num_devices={sized(1024, 4)}", f"num_microbatches={sized(1024, 4)}"]
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "rpbench", *command, f"results_dir={tmp_path}"], check=True, capture_output=True
    )
    after = getrusage(RUSAGE_CHILDREN)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    print(f"\n1f1b, 1,024 devices x 1,024 microbatches: {user:.1f} s, and {system:.1f} s in the system")
