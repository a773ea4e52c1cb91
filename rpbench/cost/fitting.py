"""Fitting: as little recomputation as the memory allows, stage by stage.

Stages keep their activations from the last one up, for it has fewest microbatches in flight, as long as every device
that holds them has room.
"""

from collections.abc import Callable, Sequence

Stages = tuple[int, ...]


def fitting_stages(peak_bytes: Callable[[Sequence[int]], int], num_stages: int, limit_bytes: int | None) -> Stages:
    """The backward stages that recompute nothing.

    Args:
        peak_bytes: of the fullest device, by the stages that keep their activations.
        limit_bytes: of a device; None: no limit, and every stage keeps them.
    """
    everyone = tuple(range(num_stages))
    if limit_bytes is None or peak_bytes(everyone) <= limit_bytes:
        return everyone
    chosen: Stages = ()
    if peak_bytes(chosen) > limit_bytes:
        return chosen
    for stage in reversed(everyone):
        more = tuple(sorted((stage, *chosen)))
        if peak_bytes(more) <= limit_bytes:
            chosen = more
    return chosen
