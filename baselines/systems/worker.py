"""Worker: one rank of a system; RANK, WORLD_SIZE and MASTER_ADDR in the environment, as torchrun sets them.

It runs the cases of a file, and rank 0 prints a line of JSON for each. `rpbench.torch_runtime.processes.ranks` also
sends cases to ranks that stay alive. With `verify` a case is compared with plain training; where a method of ours
computes the same, the answer has the losses of both (ours from rank 0).
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from baselines.systems.case import Case, System, our_losses
from rpbench.engine.backends import accelerator
from rpbench.engine.backends.device import brought_here
from rpbench.engine.layout import layout_of
from rpbench.engine.reference import largest_difference, largest_relative_difference, train_reference
from rpbench.engine.state.gradients import Tensors
from rpbench.ir.partition import symmetric
from rpbench.side_processes import answers_only

TIMEOUT_S = 120  # a collective that takes longer has lost a rank

Measure = Callable[[Tensors, Tensors], float]

# System -> its module and class; imported when asked for.
SYSTEMS: Mapping[str, tuple[str, str]] = {
    "torch_pipelining": ("baselines.systems.torch_pipelining", "TorchPipeline"),
    "fsdp2": ("baselines.systems.fsdp2", "Fsdp2"),
    "released": ("baselines.systems.released", "Released"),
    "deepspeed": ("baselines.systems.deepspeed", "DeepSpeed"),
}


def main(arguments: list[str]) -> int:
    """Run the cases of a file; 0 if all ended, 2 if the request was wrong."""
    if len(arguments) != 1:
        print("usage: torchrun --nproc-per-node 2 -m baselines.systems CASE.json", file=sys.stderr)
        return 2
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]:
        print(f"{', '.join(missing)} not set: start this under torchrun", file=sys.stderr)
        return 2
    out = answers_only()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        cases = Cases()
        for line in filter(None, map(str.strip, Path(arguments[0]).read_text().splitlines())):
            answer = _answer(cases, line)
            if dist.get_rank() == 0:
                print(json.dumps(answer), file=out, flush=True)
    finally:
        dist.destroy_process_group()
    return 0


class Cases:
    """Runs cases. The last one stays prepared: asked again, it runs from the same weights."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._system: System | None = None

    def run(self, case: Case) -> dict[str, Any]:
        """This rank's results of a case; raises as `make`, on every rank alike."""
        torch.set_num_threads(1)
        if case.device != "cpu":
            accelerator.choose_kernels(repeatable=case.verify)
        if self._system is None or case != self._case:
            self._system = None  # before another one takes memory
            self._system, self._case = make(case), case
        return _run(self._system, case)


def _answer(cases: Cases, line: str) -> dict[str, Any]:
    try:
        return cases.run(Case.from_json(line))
    except ValueError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def make(case: Case) -> System:
    """This rank's part of a system; ValueError for an unknown one, or a case that does not fit."""
    if case.system not in SYSTEMS:
        raise ValueError(f"system={case.system!r}: one of {', '.join(SYSTEMS)}")
    module, name = SYSTEMS[case.system]
    system: System = getattr(import_module(module), name)(case)
    return system


def _run(system: System, case: Case) -> dict[str, Any]:
    system.prepare()
    _settle(case)
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    system.train()
    _settle(case)
    answer: dict[str, Any] = {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - used,
        "actions": system.actions,
    }
    if case.device != "cpu":
        torch.accelerator.empty_cache()  # the next case finds all of the memory free
    if case.verify:
        answer |= _verified(system, case)
    if case.verify and case.device == "cpu" and system.ours is not None:
        sums = torch.tensor(system.losses[-case.num_steps :], dtype=torch.float64)
        dist.all_reduce(sums)
        answer["losses"] = (sums / dist.get_world_size()).tolist()  # means over the microbatches of all ranks
        if dist.get_rank() == 0:
            answer["our_losses"] = our_losses(system.ours, case, dist.get_world_size())
    return answer


def _settle(case: Case) -> None:
    """Wait until the accelerator has nothing left to do."""
    if case.device != "cpu":
        torch.accelerator.synchronize()


def _verified(system: System, case: Case) -> dict[str, float]:
    """How far this rank's modules are from plain training of the whole model in this process."""
    workload = case.workload()
    if case.device != "cpu":
        workload = brought_here(workload)
    partition = symmetric((len(workload.modules) - 2,))
    groups = {(0, step + 1): (tuple(case.microbatches(step)),) for step in range(case.num_steps)}
    reference = train_reference(
        workload,
        layout_of(partition),
        groups,
        case.settings(),
        num_steps=case.num_steps,
        updates=case.optimizer is not None,
    )
    own = system.modules

    def differ(found: Tensors, expected: Tensors, measure: Measure = largest_difference) -> float:
        return measure(
            {place: value.cpu() for place, value in found.items()},
            {place: value.cpu() for place, value in expected.items() if place[0] in own},
        )

    found, expected = system.gradients(), reference.gradients[-1]
    return {
        "device_grad_max_rel_diff": differ(found, expected, largest_relative_difference),
        "grad_max_abs_diff": differ(found, expected),
        "weight_max_abs_diff": differ(system.weights(), reference.masters),
    }
