"""python -m analysis.mutate [--results DIR] [--sample N] [--seed S] [experiment ...]

Falsifies the records of every experiment, one value at a time, and counts how many of the falsified ones the claims
see: the share that turns the exit status of a reproduction red, and by name those that survive. Exit status 0; 1 if the
shares are below what is asked for (every dropped record, every exchange, 99 % of the scalings).
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from analysis.claims import all_claims
from analysis.driver.sweeps import ROOT, experiments
from analysis.mutate.check import LEAST_SCALED, Outcome, check
from analysis.mutate.mutants import DROPPED, EXCHANGED, Mutant, mutants, sampled
from analysis.records.experiments import Experiments, MissingRuns

_SHOWN = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the evidence, and return the exit status."""
    options = _parser().parse_args(arguments)
    found = Experiments(options.results)
    made = [mutant for name in options.experiments or experiments() for mutant in _of(found, name)]
    if not made:
        print(f"{options.results}: no sweep of this code to falsify; run ./reproduce.sh first", file=sys.stderr)
        return 1
    chosen = sampled(made, options.sample, options.seed) if options.sample else made
    outcome = check(found, all_claims(), chosen)
    kinds = {kind: _only(outcome, chosen, kind) for kind in (DROPPED, EXCHANGED, "scaled")}
    _tell(outcome)
    print(json.dumps({kind: {"mutants": each.num_mutants, "seen": each.seen} for kind, each in kinds.items()}))
    enough = kinds[DROPPED].seen == kinds[EXCHANGED].seen == 1 and kinds["scaled"].seen >= LEAST_SCALED
    return 0 if enough else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis.mutate", description="Are falsified records seen?")
    parser.add_argument("experiments", nargs="*", help="which; default: all that were run")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="folder of the records")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of the mutants, chosen by the seed")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _of(found: Experiments, name: str) -> Iterable[Mutant]:
    try:
        return list(mutants(found, name))
    except MissingRuns as lack:
        print(f"left out: {lack}", file=sys.stderr)
        return []


def _only(outcome: Outcome, chosen: Sequence[Mutant], kind: str) -> Outcome:
    def belongs(mutant: Mutant) -> bool:
        return mutant.what == kind or (kind == "scaled" and mutant.what not in (DROPPED, EXCHANGED))

    return Outcome(sum(map(belongs, chosen)), tuple(filter(belongs, outcome.survivors)))


def _tell(outcome: Outcome) -> None:
    counts = Counter((mutant.experiment, mutant.field, mutant.what) for mutant in outcome.survivors)
    print(f"{outcome.num_mutants} mutants, {len(outcome.survivors)} survive", file=sys.stderr)
    for (experiment, field, what), number in counts.most_common(_SHOWN):
        print(f"  {experiment}: {field} {what}, {number} of its records", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
