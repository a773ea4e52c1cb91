"""python -m analysis.mutate [--results DIR] [--sample N] [--seed S] [experiment ...]

Falsifies one value at a time in records, manifests and tables of accepted values, and counts how many are noticed,
because the lookup of the record refuses it or a claim turns red; once more without claims on values that we accepted
ourselves. Names survivors. Exit status 0; 1 if too few of a kind are noticed (`LEAST_SEEN` in
analysis/mutate/check.py), 2 without a sweep.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from analysis.claims import all_claims
from analysis.driver.sweeps import ROOT, experiments
from analysis.mutate.check import KINDS, ORIGIN, Draw, check, mutants, of_statements, sampled
from analysis.records.experiments import Experiments, MissingRuns
from rpbench.records.manifest import manifest_names, no_sweep_in

SAMPLE = 500
_SHOWN = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the evidence; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m analysis.mutate", description="Are falsehoods noticed?")
    parser.add_argument("experiments", nargs="*", help="which; default: all that were run")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="folder of the records")
    parser.add_argument(
        "--sample", type=int, default=SAMPLE, metavar="N", help=f"so many of each kind, by the seed (default {SAMPLE})"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not manifest_names(options.results):
        print(no_sweep_in(options.results), file=sys.stderr)
        return 2
    found = Experiments(options.results)
    chosen = sampled(_drawn(found, options.experiments or experiments()), options.sample, options.seed)
    if not any(mutant.rows for mutant in chosen):
        print(f"{options.results}: no sweep of this code to falsify; run ./reproduce.sh first", file=sys.stderr)
        return 1
    outcome = check(found, all_claims(), chosen)
    print(f"{outcome}; {len(outcome.survivors)} survive", file=sys.stderr)
    held = (mutant for mutant in outcome.survivors if mutant.kind != ORIGIN)
    counts = Counter((mutant.experiment, mutant.field, mutant.what) for mutant in held)
    for (experiment, field, what), number in counts.most_common(_SHOWN):
        print(f"  {experiment}: {field} {what}, {number} of its records", file=sys.stderr)
    names = {"mutants": "num_mutants", "seen": "seen", "without_accepted_values": "seen_otherwise"}
    counted = {kind: {key: getattr(outcome.of(kind), name) for key, name in names.items()} for kind in KINDS}
    print(json.dumps(counted))
    return 0 if outcome.is_enough else 1


def _drawn(found: Experiments, names: Iterable[str]) -> Iterator[tuple[str, Draw]]:
    for name in names:
        try:
            yield from mutants(found, name)
        except MissingRuns as lack:
            print(f"left out: {lack}", file=sys.stderr)
    yield from of_statements()


if __name__ == "__main__":
    sys.exit(main())
