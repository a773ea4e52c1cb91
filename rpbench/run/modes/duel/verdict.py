"""Verdicts on every contender from the starts of a duel, with one error rate for the whole table.

The unit of replication is a start, a process of its own: all runs in a process share its place in memory. A contender's
value in a start is the mean of its block means. The variance between starts is estimated from all contenders together,
because two starts say next to nothing about one contender; the variance within a start comes from its own blocks. Both
go into the variance of its mean over starts:

    variance = (between - mean of within + own within) / starts        never less than own within / starts

The values of one start share its references. With R references two contenders correlate by 1 / (R + 1), so K contenders
count as fewer independent ones when the variance between starts is estimated.

`low` and `high` are the 95 % interval of one ratio; `sure_low` and `sure_high` hold for the whole table at once
(Bonferroni), and only they decide. A verdict also needs all of `Rules`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from rpbench.records.record import Record
from rpbench.run.modes.duel.runs import Comparisons, Floats


class Started(NamedTuple):
    """A start's runs by contender and column, and facts about the start: seed, turns, seconds, cores."""

    about: dict[str, Any]
    columns: dict[str, dict[str, list[Any]]]


class Ratio(NamedTuple):
    """A median over starts, with the least and the greatest value: starts are too few for an interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median of the starts' ratios, and their range; ValueError unless every start has one of each."""
    ratios = [one / other for one, other in zip(numerators, denominators, strict=True)]
    if not ratios:
        raise ValueError("no start to compare: a ratio needs at least 1")
    return Ratio(median(ratios), min(ratios), max(ratios))


def timed_fields(name: str, starts: Sequence[Started], num_steps: int) -> dict[str, Any]:
    """A contender's runs in every start, and medians over starts of the medians within each."""
    runs = [start.columns[name] for start in starts]
    others = [cores for cores in map(_other_cores, runs) if cores is not None]
    return {
        "makespan_s": _median(runs, "wall_s"),
        "step_time_s": _median(runs, "wall_s") / num_steps,
        "replay_makespan_s": None if runs[0]["replay_s"][0] is None else _median(runs, "replay_s"),
        "cpu_s": _median(runs, "cpu_s"),
        "foreign_cpu_share": median(others) if others else None,
        "starts": [start.about for start in starts],
        "runs": runs,
    }


def _median(runs: Sequence[Mapping[str, Sequence[float]]], key: str) -> float:
    return median(median(start[key]) for start in runs)


def _other_cores(columns: Mapping[str, Sequence[Any]]) -> float | None:
    """Cores that other programs kept busy in a contender's runs; None where unknown."""
    if any(each is None for each in columns["others_s"]):
        return None
    return max(0.0, sum(columns["others_s"]) / sum(columns["elapsed_s"]))


def predictions(row: Record) -> list[float]:
    """The prediction for each start, seconds: the mean of the calibrations before and after it."""
    return [(before + after) / 2 for before, after in pairwise(row["calibrated_makespans_s"])]


def over_predicted(row: Record, clock: str) -> Ratio:
    """Measured over predicted time of each start."""
    return ratio(times(row, clock), predictions(row))


def drift(row: Record) -> float:
    """Spread of the predictions of a duel's calibrations, relative to the least."""
    found = row["calibrated_makespans_s"]
    return float(max(found) / min(found) - 1)


def times(row: Record, clock: str) -> list[float]:
    """The median of a contender's runs in each start by a clock, seconds."""
    return [median(start[f"{clock}_s"]) for start in row["runs"]]


TRIMMED = 0.2  # fraction of a block that its mean leaves out at either end

Verdict = Literal["faster", "slower", "no difference shown", "no verdict"]


@dataclass(frozen=True)
class Rules:
    least_pairs: int = 30  # clean comparisons in each start
    least_minutes: int = 3  # minutes of the clock in which they lie
    half_width: float = 0.02  # largest relative half width of the interval, without the variance between starts
    least_starts: int = 2
    block_length: int = 5  # least number of comparisons in a block of a start
    most_blocks: int = 12
    confidence: float = 0.95  # of each interval by itself, and of all verdicts together


@dataclass(frozen=True)
class StartFinding:
    """A contender in one start: its ratio to the references with the exact interval of its blocks."""

    ratio: float
    low: float
    high: float
    num_pairs: int
    num_disturbed: int
    num_minutes: int
    logs: Floats = field(repr=False, compare=False)  # block means of the logarithms

    @property
    def half_width(self) -> float:
        """Relative half width of the interval; the same for the inverse ratio."""
        return math.log(self.high / self.low) / 2 if self.low else math.inf

    def lacks(self, rules: Rules) -> str:
        """Why this start does not count; empty if it does."""
        if self.num_pairs < rules.least_pairs:
            spoilt = f", other programs spoilt {self.num_disturbed}" if self.num_disturbed else ""
            return f"{self.num_pairs} clean comparisons of at least {rules.least_pairs}{spoilt}"
        if self.num_minutes < rules.least_minutes:
            return f"comparisons in {self.num_minutes} minutes of at least {rules.least_minutes}"
        return ""

    def is_enough(self, rules: Rules) -> bool:
        """Whether starts like this one are enough together."""
        return not self.lacks(rules) and self.half_width <= rules.half_width * math.sqrt(rules.least_starts)


@dataclass(frozen=True)
class Finding:
    """A contender in all starts; `ratio` is its speed over the references'."""

    ratio: float
    low: float
    high: float
    sure_low: float
    sure_high: float
    verdict: Verdict
    reason: str
    starts: tuple[StartFinding, ...]


def find_start(found: Comparisons, rules: Rules) -> StartFinding:
    """The comparison of a contender in one start."""
    clean = found.clean
    values, num = found.log_ratios[clean], int(clean.sum())
    minutes = len(np.unique(found.at_s[clean] // 60))
    num_blocks = min(rules.most_blocks, num // rules.block_length)
    if num_blocks < 2:
        return StartFinding(math.nan, 0.0, math.inf, num, len(clean) - num, minutes, np.array([]))
    logs = block_means(values, num_blocks)
    low, high = order_interval(logs, rules.confidence)
    ratio = math.exp(float(logs.mean()))
    return StartFinding(ratio, math.exp(low), math.exp(high), num, len(clean) - num, minutes, logs)


def judge(
    table: Mapping[str, Sequence[StartFinding]], num_references: int, rules: Rules, num_verdicts: int | None = None
) -> dict[str, Finding]:
    """The finding of every contender from its starts, each compared with `num_references`.

    `num_verdicts` share one error rate; by default those of this table.
    """
    sound = {name: [start for start in starts if start.logs.size] for name, starts in table.items()}
    means = [np.array([start.logs.mean() for start in starts]) for starts in sound.values()]
    between = _Between(means, [_within(starts) for starts in sound.values()], num_references)
    share = 1 - (1 - rules.confidence) / (num_verdicts or len(table))
    return {name: _find(tuple(table[name]), sound[name], between, rules, share) for name in table}


class _Between:
    """The variance between starts, estimated from all contenders together."""

    def __init__(self, means: Sequence[Floats], within: Sequence[float], num_references: int) -> None:
        several = [number for number, row in enumerate(means) if len(row) > 1]
        self.variance = mean_square([means[number] for number in several])
        self.mean_within = float(np.mean([within[number] for number in several])) if several else 0.0
        common, num = 1 / (num_references + 1), len(several)
        worth = 1 / (1 / num + (1 - 1 / num) * common**2) if num else 0.0
        self.freedom = worth * float(np.mean([len(means[number]) - 1 for number in several])) if several else 0.0


def _within(starts: Sequence[StartFinding]) -> float:
    """Variance of the value of a start, from its blocks."""
    return float(np.mean([start.logs.var(ddof=1) / start.logs.size for start in starts])) if starts else 0.0


def _find(
    starts: tuple[StartFinding, ...], sound: Sequence[StartFinding], between: _Between, rules: Rules, share: float
) -> Finding:
    reason = _lacks(starts, rules)
    if not sound:
        return Finding(math.nan, 0.0, math.inf, 0.0, math.inf, "no verdict", reason, starts)
    centre = float(np.mean([start.logs.mean() for start in sound]))
    own = _within(sound)
    variance = max(between.variance - between.mean_within + own, own)
    error = math.sqrt(variance / len(sound))
    freedom = max(1, int(between.freedom))
    near, far = (error * student_quantile(confidence, freedom) for confidence in (rules.confidence, share))
    if len(sound) < rules.least_starts:
        far = math.inf
    low, high, sure_low, sure_high = (math.exp(centre + each) for each in (-near, near, -far, far))
    verdict: Verdict = "faster" if sure_low > 1 else "slower" if sure_high < 1 else "no difference shown"
    verdict = "no verdict" if reason else verdict
    return Finding(math.exp(centre), low, high, sure_low, sure_high, verdict, reason, starts)


def _lacks(starts: Sequence[StartFinding], rules: Rules) -> str:
    if len(starts) < rules.least_starts:
        return f"{len(starts)} starts of at least {rules.least_starts}"
    lacking = [f"start {number}: {lack}" for number, start in enumerate(starts, 1) if (lack := start.lacks(rules))]
    width = math.sqrt(sum(start.half_width**2 for start in starts)) / len(starts)
    if not lacking and width > rules.half_width:
        return f"half width {100 * width:.1f} % of at most {100 * rules.half_width:g} %"
    return "; ".join(lacking)


# --- block means, order statistics, and quantiles of Student's t


def block_means(values: Floats, num_blocks: int) -> Floats:
    """Trimmed means of equally long blocks of neighbours; ValueError for fewer values than blocks.

    Neighbours in time are correlated and distant blocks hardly, so the variance of the mean follows from the blocks and
    not from single values. Means are trimmed because single runs are interrupted.
    """
    if len(values) < num_blocks:
        raise ValueError(f"{len(values)} values in {num_blocks} blocks: a block holds at least 1")

    def trimmed_mean(block: Floats) -> float:
        cut = int(TRIMMED * len(block))
        return float(np.sort(block)[cut : len(block) - cut].mean())

    return np.array([trimmed_mean(block) for block in np.array_split(values, num_blocks)])


def order_interval(values: Floats, confidence: float) -> tuple[float, float]:
    """The interval of a median between order statistics: exact for any continuous distribution of independent values.

    It is interpolated between the two pairs of order statistics whose confidence is next; it is infinite where even the
    least and the greatest value have less confidence.

    Source: Hettmansperger and Sheather, "Confidence intervals based on interpolated order statistics", Statistics and
    Probability Letters 4 (1986).
    """
    ordered, num = np.sort(values), len(values)
    covered = [1 - 2 * sum(math.comb(num, k) for k in range(depth)) / 2**num for depth in range(1, num // 2 + 1)]
    depths = [depth for depth, share in enumerate(covered, start=1) if share >= confidence]
    if not depths:
        return -math.inf, math.inf
    depth = depths[-1]
    low, high = float(ordered[depth - 1]), float(ordered[num - depth])
    if depth == len(covered):
        return low, high
    inner = (covered[depth - 1] - confidence) / (covered[depth - 1] - covered[depth])
    weight = (num - depth) * inner / (depth + (num - 2 * depth) * inner)
    low += weight * (float(ordered[depth]) - low)
    high -= weight * (high - float(ordered[num - depth - 1]))
    return low, high


@cache
def student_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| <= t) = confidence for Student's distribution.

    Source: the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4, bisected.
    """
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """P(|T| <= t)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    return (angle + inside) * 2 / math.pi if odd else inside


def mean_square(rows: Sequence[Floats]) -> float:
    """Variance of values around the mean of their own row, over all rows; 0 where no row has two."""
    freedom = sum(len(row) - 1 for row in rows)
    return sum(float(((row - row.mean()) ** 2).sum()) for row in rows) / freedom if freedom > 0 else 0.0
