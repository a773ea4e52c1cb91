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

_QUESTIONS = {
    "figure17": "Does the published simulation of every schedule come out the same?",
    "published_cells": "Which printed numbers of figure 17 are met to the last digit?",
    "steady_state": "How large is the bubble when steps follow one another?",
    "causal": "What if RoundPipe's fused stage waits for what it needs?",
    "figure3": "How far are the simulated bubbles from the ideal ones?",
    "tuning": "Who wins when everybody's stages are searched, not RoundPipe's alone?",
    "lead": "How much of RoundPipe's lead is left on equal terms?",
    "gains": "Which choice gains how much?",
    "plans": "Which cuts does the search find, and which the released planner?",
    "dispatch": "What does it cost to hand work to devices as it comes?",
    "tradeoff": "How much memory buys how small a bubble?",
    "hop_latency": "How much does every schedule lose when the link gets slower?",
    "thousand_devices": "What is left of the lead on a thousand devices?",
    "uneven_head": "Who suffers from a large vocabulary?",
    "turning": "Which level of detail turns the ranking of schedules?",
    "goodput": "How much of a run is left when ranks die?",
    "duel": "Who is faster when all train for real on this machine?",
    "calibrated": "Can a run on this machine be predicted from a minute of measuring?",
    "torch_duel": "What does a table of ours cost on torch's own pipeline runtime?",
    "equivalence": "Do all schedules compute the same gradients?",
    "figure10": "Which system trains fastest on eight RTX 4090, on equal terms?",
    "baselines_cpu": "What do all systems do when they train for real on two cores?",
    "prediction": "How far is the simulation from the published measurements?",
    "convergence": "What do late weights cost in learning?",
    "figure2": "Recompute, or reload?",
    "figure5": "How many sequences an upload make a device compute-bound?",
    "figure10_bars": "How far are simulated systems from the published bars of figure 10?",
    "figure10_options": "Which settings do the fastest systems take?",
    "figure10_published": "How fast is every system, as published?",
    "figure11_published": "How long a sequence does every system train on, as published?",
    "cost": "What do a billion tokens cost on an RTX 4090 server?",
    "figure10_predicted": "How fast should every system be?",
    "figure11_predicted": "How long a sequence should every system train on?",
    "figure12_predicted": "How fast should every system be on eight A800?",
    "figure13_predicted": "How long a sequence should fit on eight A800?",
    "figure14_predicted": "What should a billion tokens cost?",
    "figure15_predicted": "How should throughput grow with the number of devices?",
    "figure16_predicted": "How should throughput change with the length of sequences?",
    "prediction_bars": "Does the prediction keep the bars it was given beforehand?",
    "prediction_errors": "How far off is every predicted throughput?",
    "prediction_misses": "Where is the prediction wrong?",
    "blind_round": "What was predicted blind, and what came out?",
    "five_duels": "Do duels of other days say the same?",
    "aa_duel": "How often is the same work taken for different?",
    "what_if": "Which system wins on which machine?",
    "atlas": "What does every schedule look like?",
    "timelines": "Where does the time go, action by action?",
}


@dataclass(frozen=True)
class Judgement:
    """What became of the claims about an exhibit.

    Args:
        kind: the kind of verdict that decides; empty where no claim is about it.
        text: the same in a few words, with its counts.
    """

    kind: str
    text: str


def question(exhibit: Exhibit) -> str:
    """What an exhibit asks; its title where no question was put."""
    return exhibit.question or _QUESTIONS.get(exhibit.id, exhibit.title)


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
