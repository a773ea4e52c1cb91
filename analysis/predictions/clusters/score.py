"""Score: predicted seconds against measured ones, whoever predicted them: errors, order of pairs, intervals.

Errors are predicted / measured - 1; pairs are of one model and device, more than 5 % apart in pace a device and token.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import log
from statistics import median
from typing import NamedTuple

from analysis.predictions.clusters.case import Case

CLEAR = 1.05
Predicted = Mapping[str, float]  # id -> seconds of a step, or bytes


class Score(NamedTuple):
    """The score of some predictions.

    Args:
        rows: that are compared.
        median, p90: of absolute errors.
        bias: median of the errors.
        right, pairs: pairs in the right order, of those that are clearly apart.
        inside: share of rows in their intervals; None without intervals.
    """

    rows: int
    median: float
    p90: float
    bias: float
    right: int
    pairs: int
    inside: float | None

    @property
    def order(self) -> str:
        """Share of pairs in the right order, in percent; a dash where there are few."""
        return f"{100 * self.right / self.pairs:.0f}" if self.pairs >= 5 else "-"


def score(cases: Sequence[Case], predicted: Predicted, widths: Mapping[str, float] | None = None) -> Score:
    """The score of predicted steps.

    Args:
        cases: given rows; those without a prediction do not count.
        widths: half the width of each row's interval, as a logarithm.
    """
    measured = {case.id: case.step_time_s for case in cases if case.id in predicted and case.step_time_s}
    errors = {name: predicted[name] / value - 1 for name, value in measured.items()}
    right, pairs = _pairs([case for case in cases if case.id in measured], predicted)
    return _scored(errors, right, pairs, widths)


def score_bytes(cases: Sequence[Case], predicted: Predicted, widths: Mapping[str, float]) -> Score:
    """The same of peak bytes, which have no order."""
    measured = {case.id: case.memory_bytes for case in cases if case.id in predicted and case.memory_bytes}
    return _scored({name: predicted[name] / value - 1 for name, value in measured.items()}, 0, 0, widths)


def _scored(errors: Mapping[str, float], right: int, pairs: int, widths: Mapping[str, float] | None) -> Score:
    sizes = sorted(map(abs, errors.values()))
    inside = None
    if widths is not None:
        inside = sum(abs(log(1 + error)) <= widths[name] for name, error in errors.items()) / len(errors)
    p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return Score(len(errors), median(sizes), p90, median(errors.values()), right, pairs, inside)


def _pairs(cases: Sequence[Case], predicted: Predicted) -> tuple[int, int]:
    groups = defaultdict(list)
    for case in cases:
        assert case.step_time_s is not None
        scale = case.devices / case.tokens
        job = case.job
        key = (job.architecture.name, job.architecture.hidden, job.machine.device.name) if job else case.set_name
        groups[key].append((case.step_time_s * scale, predicted[case.id] * scale))
    right = pairs = 0
    for members in groups.values():
        for (a, ours_a), (b, ours_b) in combinations(members, 2):
            if max(a, b) > CLEAR * min(a, b):
                pairs += 1
                right += (a > b) == (ours_a > ours_b)
    return right, pairs


def part_of(case: Case) -> str:
    """The set of a row; models with experts apart from dense ones where a set has both."""
    if case.set_name not in ("megatron_bridge", "dgxc_benchmarking", "nemo_automodel") or case.job is None:
        return case.set_name
    return f"{case.set_name}, {'experts' if case.job.architecture.experts else 'dense'}"
