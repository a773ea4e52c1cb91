"""The check: is a falsehood refused where records are looked up, or does a claim turn red that was not red before?"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.claims.claim import Claim, judge
from analysis.claims.expected import STATEMENTS
from analysis.claims.own.regression import claim_of
from analysis.claims.printed import Printed
from analysis.mutate.mutants import ASKED, FOUND, GONE, KINDS, MANIFEST, TABLE, Mutant
from analysis.records import identity
from analysis.records.experiments import ENDED, Experiments, MissingRuns, Record
from rpbench.records import record
from rpbench.records.manifest import Cell

# Of each kind so many must be noticed. What a record says of its origin is held by the digest in its manifest alone,
# which is taken to be written anew here.
LEAST_SEEN = {ASKED: 0.99, FOUND: 0.8, GONE: 1.0, MANIFEST: 1.0, TABLE: 0.95}


@dataclass(frozen=True)
class Fate:
    """The fate of a mutant.

    Args:
        seen: by anything.
        seen_otherwise: by something else than a value that we have accepted ourselves.
    """

    mutant: Mutant
    seen: bool
    seen_otherwise: bool


@dataclass(frozen=True)
class Outcome:
    """The fates of all mutants."""

    fates: tuple[Fate, ...]

    def of(self, kind: str) -> "Outcome":
        """Of the mutants of a kind."""
        return Outcome(tuple(fate for fate in self.fates if fate.mutant.kind == kind))

    @property
    def num_mutants(self) -> int:
        return len(self.fates)

    @property
    def seen(self) -> float:
        """The fraction that is noticed."""
        return _fraction(fate.seen for fate in self.fates)

    @property
    def seen_otherwise(self) -> float:
        """The fraction that is noticed without any value that we have accepted ourselves."""
        return _fraction(fate.seen_otherwise for fate in self.fates)

    @property
    def survivors(self) -> tuple[Mutant, ...]:
        return tuple(fate.mutant for fate in self.fates if not fate.seen)

    @property
    def is_enough(self) -> bool:
        """Whether as many are seen as have to be."""
        return all(self.of(kind).seen >= least for kind, least in LEAST_SEEN.items())

    def __str__(self) -> str:
        """The fractions of every kind, as `result 97 % (61 % without accepted values)`."""
        parts = [(kind, self.of(kind)) for kind in KINDS]
        return "; ".join(f"{kind} {_shares(kind, each)} of {each.num_mutants}" for kind, each in parts if each.fates)


def _fraction(found: Iterable[bool]) -> float:
    counts = Counter(found)
    return counts[True] / counts.total() if counts else 1.0


def _shares(kind: str, each: Outcome) -> str:
    without = "" if kind == TABLE else f" ({each.seen_otherwise:.1%} without accepted values)"
    return f"{each.seen:.1%}{without}"


def is_acceptance(claim: Claim) -> bool:
    """Whether what a claim is held to was written down by `analysis.driver.accept` from our own records."""
    return claim.whose == "ours"


class _Falsified(Experiments):
    """Experiments in which some records say something else."""

    def __init__(self, true: Experiments, rows: Mapping[str, Record | None]) -> None:
        super().__init__(true.results, true.narrowed)
        object.__setattr__(self, "true", true)
        object.__setattr__(self, "changed", rows)

    def find(self, experiment: str, choices: Mapping[str, str], contender: str | None = None) -> Record | None:
        row = self.true.find(experiment, choices, contender)  # type: ignore[attr-defined]  # set above
        changed = None if row is None else self.changed.get(row["run_id"])  # type: ignore[attr-defined]
        return row if row is None or changed is None else row | changed


def check(experiments: Experiments, claims: Sequence[Claim], mutants: Iterable[Mutant]) -> Outcome:
    """Look each mutant's records up, and judge the claims that rest on them again."""
    judged = _Judged(experiments, claims)
    return Outcome(tuple(map(judged.fate, mutants)))


class _Judged:
    def __init__(self, experiments: Experiments, claims: Sequence[Claim]) -> None:
        self._experiments = experiments
        self._green = {claim.id: claim for claim in claims if not judge(claim, experiments).red}
        self._resting = dict(_by_record(experiments, list(self._green.values())))

    def fate(self, mutant: Mutant) -> Fate:
        """Whether a mutant is noticed."""
        if mutant.line is not None:
            return Fate(mutant, self._is_red(self._accepted(mutant), self._experiments), seen_otherwise=False)
        if mutant.cell is not None and not self._answers(mutant.cell, mutant.experiment):
            return Fate(mutant, seen=True, seen_otherwise=True)
        if any(self._is_refused(mutant, run_id, row) for run_id, row in mutant.rows.items()):
            return Fate(mutant, seen=True, seen_otherwise=True)
        falsified = _Falsified(self._experiments, mutant.rows)
        touched = {each.id: each for run_id in mutant.rows for each in self._resting.get(run_id, ())}
        others = [claim for claim in touched.values() if not is_acceptance(claim)]
        otherwise = any(self._is_red(claim, falsified) for claim in others)
        ours = (claim for claim in touched.values() if is_acceptance(claim))
        return Fate(mutant, otherwise or any(self._is_red(claim, falsified) for claim in ours), otherwise)

    def _is_red(self, claim: Claim | None, experiments: Experiments) -> bool:
        return claim is None or judge(claim, experiments).red

    def _accepted(self, mutant: Mutant) -> Claim | None:
        """The claim that a changed line of a table makes; None for one that belongs to no claim any more."""
        line = mutant.line
        assert line is not None
        if mutant.experiment != STATEMENTS:
            return claim_of(mutant.experiment, line)
        claim = self._green.get(line["claim"])
        if claim is None or claim.published is None:
            return None
        return replace(
            claim, published=Printed(line["value"], claim.published.source), tolerance=float(line["tolerance"] or 0)
        )

    def _answers(self, cell: Cell, experiment: str) -> bool:
        """Whether the records of a cell as the manifest has it now are its own."""
        rows = {row["run_id"]: row for row in self._experiments.checked(experiment)}
        return cell.state in ENDED and not any(
            identity.problem(rows[run_id], experiment, cell, cell.digests) for run_id in cell.run_ids if run_id in rows
        )

    def _is_refused(self, mutant: Mutant, run_id: str, row: Record | None) -> bool:
        """Whether a record is refused where it is looked up, by whoever has written its digest anew everywhere."""
        if row is None:
            return True
        forged = row | {"run_id": record.run_id(record.identity_of(row))} if "surroundings" in row else dict(row)
        forged["digest"] = record.digest(forged)
        if record.defect(forged, forged["run_id"]):
            return True
        cells = self._experiments.cells_of(mutant.experiment)
        cell = next(cell for cell in cells if run_id in cell.run_ids)
        return identity.problem(forged, mutant.experiment, cell, (forged["digest"],)) is not None


def _by_record(experiments: Experiments, claims: Sequence[Claim]) -> Iterator[tuple[str, list[Claim]]]:
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
    yield from found.items()
