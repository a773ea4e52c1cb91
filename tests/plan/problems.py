"""What the planner's tests share: the published models as problems, and random small ones."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from nearby import nearby

from rpbench.cost.published import published_partition, published_times
from rpbench.cost.table import LayerTimes
from rpbench.plan import Problem
from rpbench.registry import entries, entry
from rpbench.workload.architecture import Architecture, architecture

ROOT = Path(__file__).parents[2]
MODELS = {
    "qwen3-1.7b": "qwen3_1p7b",
    "llama-3.1-8b": "llama31_8b",
    "gpt-oss-20b": "gpt_oss_20b",
    "qwen3-32b": "qwen3_32b",
    "qwen3-235b-lora": "qwen3_235b_lora",
}
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "roundpipe")


def load(model: str) -> Architecture:
    """A published model from its configuration."""
    return architecture(MODELS[model])


def published(schedule: str, model: str, **changes: Any) -> Problem:
    """A cell of figure 17: 8 devices, 16 microbatches, the rules of the artifact's simulator."""
    generator = entry(schedule)
    given: dict[str, Any] = {
        "entry": generator,
        "times": published_times(model),
        "num_ranks": 8,
        "num_microbatches": 16,
        "recompute_ahead": generator.recompute_ahead,
        "fused_ahead": generator.separate_cuts,
        "published": published_partition(schedule, model),
    }
    return Problem(**{**given, **changes})


def small(schedule: str, times: LayerTimes, num_ranks: int, **changes: Any) -> Problem:
    """A problem of few layers, with as many microbatches as every schedule takes."""
    return Problem(entry(schedule), times, num_ranks, changes.pop("num_microbatches", 2 * num_ranks), **changes)


def uniform(num_layers: int, head: float = 0.0, hop: float = 0.1) -> LayerTimes:
    """Equal layers: forward 1, recomputation 1, backward 2."""
    ones = [1.0] * num_layers
    return LayerTimes(ones, ones, [2.0] * num_layers, head_forward=head, head_backward=2 * head, hop=hop)


@st.composite
def random_problems(draw: st.DrawFn) -> Problem:
    """A registered schedule, up to 8 layers of any times, up to 4 devices."""
    layers = draw(st.integers(1, 8))
    time = st.floats(0.1, 4)
    per_layer = [draw(st.lists(time, min_size=layers, max_size=layers)) for _ in range(5)]
    heads = {name: draw(time) for name in ("head_forward", "head_backward", "head_input_grad", "head_weight_grad")}
    halves = {"input_grad": per_layer[3], "weight_grad": per_layer[4]}
    times = LayerTimes(*per_layer[:3], **heads, **halves, hop=draw(st.floats(0, 1)))  # type: ignore[arg-type]
    name, ranks = draw(st.sampled_from(sorted(entries()))), draw(st.integers(1, 4))
    microbatches = 2 * ranks
    if not entry(name).separate_cuts:
        ranks, _, microbatches = nearby(name, ranks, entry(name).chunks or 1, microbatches)
    return small(name, times, ranks, num_microbatches=microbatches)
