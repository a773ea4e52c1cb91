"""Our own statements: numbers that README, captions and findings say, each with what it is declared to be.

A statement is a number computed from records. `analysis/claims/expected/statements.csv` has the value that documents
print and how far a new run may be from it; documents take their numbers from there (`analysis.documents`).
"""

from collections.abc import Callable
from typing import Any

from analysis.claims.claim import Claim, Value
from analysis.claims.evidence import Need
from analysis.claims.expected import FOLDER, STATEMENTS, statement
from analysis.claims.printed import Printed

_SOURCE = f"analysis/claims/{FOLDER.name}/{STATEMENTS}.csv"


def stated(
    name: str, words: str, unit: str, needs: tuple[Need, ...], value: Callable[..., Value], **more: Any
) -> Claim:
    """A statement of ours.

    Args:
        name: its id, which documents and the expected table know it by.
        words: what it says, without the number.
        needs, value: the runs it follows from, and how.
    """
    declared = statement(name)
    return Claim(
        id=name,
        statement=words,
        unit=unit,
        published=Printed(declared.text, f"{_SOURCE}, {name}"),
        tolerance=declared.tolerance,
        needs=needs,
        value=value,
        **({"source": "this project", "whose": "ours"} | more),
    )
