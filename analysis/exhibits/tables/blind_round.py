"""The blind round: figures 12, 13, 15 and 16 as predicted before they were seen, and as they came out."""

import pandas as pd

from analysis.exhibits.cells import label, table, theirs
from analysis.exhibits.exhibit import Shown, columns_of, exhibited
from analysis.predictions.outcomes import GROUPS, SEALED, SEALED_COMMIT, coverage, outcomes, verdicts
from analysis.predictions.tables import FOLDER
from analysis.records.experiments import Experiments

_SEALED = "analysis/predictions/sealed/"
_PRESENT = "analysis/predictions/"
_COLUMNS = columns_of("blind_round")


@exhibited("blind_round")
def exhibit(_: Experiments) -> Shown:
    """Every group of withheld cells: the sealed errors, and those of the present model."""
    sealed, present, rows = outcomes(SEALED), outcomes(FOLDER), []
    for group in GROUPS:
        before, after = pd.Series(group.errors(sealed)), pd.Series(group.errors(present))
        inside = coverage([cell for cell in sealed if group.holds(cell)])[0]
        rows.append(
            (
                label(group.name),
                theirs(len(before), "d", _SEALED),
                theirs(before.median(), ".1%", _SEALED),
                theirs(before.max(), ".1%", _SEALED),
                theirs(inside, "d", _SEALED),
                theirs(after.median(), ".1%", _PRESENT),
                theirs(after.max(), ".1%", _PRESENT),
            )
        )
    right = (
        "{} of {} verdicts of {}".format(*verdicts(sealed, name), words)
        for name, words in (("throughput", "throughput"), ("max_seq_len", "longest sequences"))
    )
    inside, known = coverage(sealed)
    words = {"commit": SEALED_COMMIT, "right": " and ".join(right), "inside": inside, "known": known}
    return Shown(table(_COLUMNS, rows), words=words)
