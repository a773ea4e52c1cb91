"""The check: does a claim turn red that was not red before?"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis.claims.claim import Claim, judge
from analysis.mutate.mutants import Mutant
from analysis.records.experiments import Experiments, MissingRuns, Record

LEAST_SCALED = 0.99  # of values that were scaled, so many must be seen


@dataclass(frozen=True)
class Outcome:
    """What became of mutants: how many were seen, and those that were not."""

    num_mutants: int
    survivors: tuple[Mutant, ...]

    @property
    def seen(self) -> float:
        """The fraction that turned the status red."""
        return 1 - len(self.survivors) / self.num_mutants if self.num_mutants else 1.0


class _Falsified(Experiments):
    """Experiments in which some records say something else."""

    def __init__(self, true: Experiments, rows: Mapping[str, Record | None]) -> None:
        super().__init__(true.results, true.narrowed)
        object.__setattr__(self, "true", true)
        object.__setattr__(self, "changed", rows)

    def find(self, experiment: str, choices: Mapping[str, str], contender: str | None = None) -> Record | None:
        row = self.true.find(experiment, choices, contender)  # type: ignore[attr-defined]  # set above
        return row if row is None else self.changed.get(row["run_id"], row)  # type: ignore[attr-defined]


def check(experiments: Experiments, claims: Sequence[Claim], mutants: Iterable[Mutant]) -> Outcome:
    """Judge the claims that rest on each mutant's records again."""
    resting = _by_record(experiments, claims)
    green = {claim.id for claim in claims if not judge(claim, experiments).red}
    survivors, number = [], 0
    for mutant in mutants:
        number += 1
        falsified = _Falsified(experiments, mutant.rows)
        touched = {claim.id: claim for run_id in mutant.rows for claim in resting.get(run_id, ()) if claim.id in green}
        if not any(judge(claim, falsified).red for claim in touched.values()):
            survivors.append(mutant)
    return Outcome(number, tuple(survivors))


def _by_record(experiments: Experiments, claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    """Record -> the claims that rest on it, those with the fewest records first: they are judged fastest."""
    found: dict[str, list[Claim]] = {}
    for claim in sorted(claims, key=lambda claim: len(claim.needs)):
        for need in claim.needs:
            try:
                row = experiments.find(need.experiment, need.choices, need.contender)
            except MissingRuns:
                continue
            if row is not None:
                found.setdefault(row["run_id"], []).append(claim)
    return found
