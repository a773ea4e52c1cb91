"""The cut of a bound pipeline. Which one a published run had is not public.

Supposed is the one that the artifact's simulator has for 1F1B, where it fits the devices. Where it does not, the
fastest cut that fits, tried over what first and last stage hold, with the stages between as equal as they can be.
"""

from functools import lru_cache

from rpbench.cost.published import published_partition
from rpbench.ir.partition import Partition, symmetric
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.predict.case import FUSED, Case
from rpbench.predict.footprint import pipeline_stage


def bound_cut(case: Case) -> Partition:
    """The artifact's cut, or the one with the fastest slowest stage that fits; if none fits, that which lacks least."""
    return symmetric(_best(_Key(case)))


def _artifacts(case: Case) -> list[tuple[int, ...]]:
    if case.num_devices != 8 or not case.model.published_name:
        return []
    return [published_partition("1f1b", case.model.published_name).forward]


class _Key:
    """A case as a key of a cache: what a cut depends on."""

    def __init__(self, case: Case) -> None:
        self.case = case
        settings = case.settings
        self._identity = (case.model, case.num_devices, settings, tuple(sorted(case.basis.values.items())))

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._identity == other._identity


@lru_cache(maxsize=256)
def _best(key: _Key) -> tuple[int, ...]:
    case = key.case
    times = times_of(setting_of(case.model, case.microbatch_tokens, case.basis, FUSED))
    layer = times.forward[0] + times.recompute[0] + times.backward[0]
    head = times.head_forward + times.head_backward
    limit = case.basis.get("device_memory_bytes", float("inf")) - case.basis.get("reserved_memory_bytes", 0.0)
    sizes: dict[tuple[int, int], float] = {}

    def size(stage: int, count: int) -> float:
        if (stage, count) not in sizes:
            sizes[stage, count] = sum(pipeline_stage(case, case.basis, stage, count).values())
        return sizes[stage, count]

    def lacks(cut: tuple[int, ...]) -> float:
        return max(0.0, max(size(stage, count) for stage, count in enumerate(cut)) - limit)

    def rank(cut: tuple[int, ...]) -> tuple[float, float, int]:
        slowest = max(layer * count + head * (stage == len(cut) - 1) for stage, count in enumerate(cut))
        return lacks(cut), slowest, -min(cut)

    for cut in _artifacts(case):
        if lacks(cut) == 0:
            return cut
    return min(_candidates(case.model.num_layers, case.num_devices), key=rank)


def _candidates(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    if num_stages == 1:
        return [(num_layers,)]
    if num_stages == 2:
        return [(num_layers - last, last) for last in range(num_layers + 1)]
    most = -(-num_layers // num_stages) + 1
    return [
        (first, *_even(num_layers - first - last, num_stages - 2), last)
        for last in range(min(most, num_layers) + 1)
        for first in range(min(most, num_layers - last) + 1)
    ]


def _even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))
