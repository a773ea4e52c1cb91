"""What the simulator's tests share: a published cell, assembled without a request."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from rpbench.cost.published import published_partition, published_times
from rpbench.cost.table import CostTable
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry

MODELS = ("qwen3-1.7b", "llama-3.1-8b", "gpt-oss-20b", "qwen3-32b", "qwen3-235b-lora")


class Cell(NamedTuple):
    schedule: Schedule
    costs: CostTable


@pytest.fixture(scope="session")
def published_cell() -> Callable[..., Cell]:
    """A schedule and model of figure 17 with the artifact's partition, timings and simulator rules."""

    def assemble(
        name: str,
        model: str,
        *,
        num_microbatches: int = 16,
        num_steps: int = 1,
        fused_ahead: bool = True,
        **options: object,
    ) -> Cell:
        generator = entry(name)
        partition = published_partition(name, model)
        shape = Shape(
            8,
            len(partition.forward),
            num_microbatches,
            len(partition.backward),
            num_steps=num_steps,
            fused=partition.fused,
        )
        costs = published_times(model).table(
            partition, recompute_ahead=generator.recompute_ahead, fused_ahead=partition.fused and fused_ahead
        )
        return Cell(generator.build(shape, **options).with_partition(partition), costs)

    return assemble
