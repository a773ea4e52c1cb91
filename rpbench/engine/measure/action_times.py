"""Profile: what the actions of a run took, as costs that can be simulated again."""

from statistics import median

from rpbench.cost.table import CostTable, Work, members_of
from rpbench.ir.action import Kind
from rpbench.ir.timeline import Timeline


def measured_costs(timeline: Timeline, *, recompute_ahead: bool, hop_s: float = 0.0) -> CostTable:
    """The median time of every kind and stage over its microbatches, in seconds.

    What ran only together with something else took what is left of the time of both.
    """
    pre: dict[tuple[Kind, int], list[float]] = {}
    main: dict[tuple[Kind, int], list[float]] = {}
    shape = timeline.schedule.shape
    unit = timeline.units_per_second / shape.num_parts  # costs are those of whole microbatches
    together = []
    for span in timeline.spans():
        place = span.action.kind, span.action.stage
        if span.action.sub:
            together.append(span)
            continue
        pre.setdefault(place, []).append((span.main - span.start) / unit)
        main.setdefault(place, []).append((span.end - span.main) / unit)
    alone = {place: median(times) + median(pre[place]) for place, times in main.items()}
    for span in together:
        places = members_of(span.action)
        new = [place for place in places if place not in alone]
        if len(new) == 1:
            known = sum(alone[place] for place in places if place in alone)
            pre.setdefault(new[0], []).append(0.0)
            main.setdefault(new[0], []).append(max(0.0, (span.end - span.start) / unit - known))
    num_stages = max(shape.num_stages, shape.num_backward_stages)
    work: dict[Kind, list[Work]] = {}
    for kind, stage in sorted(main):
        works = work.setdefault(kind, [Work(0.0)] * num_stages)
        ahead = median(pre[kind, stage])
        works[stage] = Work(median(main[kind, stage]), ahead, ahead)
    return CostTable({kind: tuple(works) for kind, works in work.items()}, hop_s, recompute_ahead)
