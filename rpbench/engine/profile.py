"""Profile: what the actions of a run took, as costs that can be simulated again."""

from statistics import median

from rpbench.cost.table import CostTable, Work
from rpbench.ir.action import Kind
from rpbench.ir.timeline import Timeline


def measured_costs(timeline: Timeline, *, recompute_ahead: bool, hop_s: float = 0.0) -> CostTable:
    """The median time of every kind and stage over its microbatches, in seconds."""
    pre: dict[tuple[Kind, int], list[float]] = {}
    main: dict[tuple[Kind, int], list[float]] = {}
    unit = timeline.units_per_second
    for span in timeline.spans():
        place = span.action.kind, span.action.stage
        pre.setdefault(place, []).append((span.main - span.start) / unit)
        main.setdefault(place, []).append((span.end - span.main) / unit)
    work: dict[Kind, list[Work]] = {}
    for kind, stage in sorted(main):
        works = work.setdefault(kind, [])
        works += [Work(0.0)] * (stage + 1 - len(works))
        ahead = median(pre[kind, stage])
        works[stage] = Work(median(main[kind, stage]), ahead, ahead)
    return CostTable({kind: tuple(works) for kind, works in work.items()}, hop_s, recompute_ahead)
