"""What every exhibit asks and answers, which of them the first page shows, and what became of the claims behind it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.claims.claim import CONTRADICTED, MISSED, NOT_TESTABLE, REPRODUCED, Verdict
from analysis.exhibits.exhibit import Exhibit
from analysis.report.statements import judged, statements

# The answers of the first page, in their order; the figures of the rest stand on their own pages.
FIRST = (
    "figure10",
    "figure17",
    "steady_state",
    "tuning",
    "figure3",
    "tradeoff",
    "convergence",
    "figure2",
    "figure5",
    "prediction",
    "what_if",
    "thousand_devices",
    "duel",
)


@dataclass(frozen=True)
class Judgement:
    """What became of the claims about an exhibit.

    Args:
        kind: the kind of verdict that decides; empty where no claim is about it.
        text: the same in a few words, with its counts.
    """

    kind: str
    text: str


def answer(exhibit: Exhibit) -> str:
    """What an exhibit answers: its caption ends with it."""
    sentences = _sentences(exhibit.caption)
    return sentences[-1] if sentences else ""


def _sentences(text: str) -> list[str]:
    """Sentences of a caption: a full stop before a blank and a capital ends one, one inside a number does not."""
    found: list[str] = []
    start = 0
    for at in range(1, len(text) - 2):
        if text[at] == "." and text[at + 1] == " " and text[at + 2].isupper() and text[at - 1].isalnum():
            found.append(text[start : at + 1])
            start = at + 2
    return [*found, text[start:]] if text[start:] else found


def judgement(exhibit: Exhibit, verdicts: Sequence[Verdict]) -> Judgement:
    """The verdict on what an exhibit shows: contradicted as soon as one of the statements about it is."""
    about = statements(_about(exhibit, verdicts))
    evaluated = judged(about)
    if not about:
        return Judgement("", "no published statement")
    if not evaluated:
        return Judgement(NOT_TESTABLE, f"none of {len(about)} statements testable here")
    counts = Counter(each.verdict for each in evaluated)
    against = counts[CONTRADICTED] + counts[MISSED]
    if against:
        kind = CONTRADICTED if counts[CONTRADICTED] else MISSED
        return Judgement(kind, f"{against} of {len(evaluated)} statements {kind}")
    return Judgement(REPRODUCED, f"all {len(evaluated)} statements hold")


def _about(exhibit: Exhibit, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Claims that bear an exhibit's name, or else those that rest on its records."""
    own = f"{exhibit.id.split('_')[0]}/"
    named = [verdict for verdict in verdicts if verdict.claim.id.startswith(own)]
    runs = set(exhibit.records)
    return named or [verdict for verdict in verdicts if runs.intersection(verdict.run_ids)]
