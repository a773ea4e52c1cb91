"""The first screen of the report: what the paper claims, the verdict, how it is known, and what we found ourselves.

Sentences name claims in braces; each becomes its number with a link. One that was not evaluated has its declared value.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis.claims.claim import CONTRADICTED, EVALUATED, REPRODUCED, Verdict
from analysis.report.findings import Number
from analysis.report.statements import Statement

PAPER = "https://arxiv.org/abs/2604.27085"
_LATE = "ours/figure10/{}/late"


@dataclass(frozen=True)
class Line:
    """A line of the first screen.

    Args:
        head: what it is about.
        parts: its words, and numbers among them.
        declared: whether some number is the declared one, because its runs are not there.
    """

    head: str
    parts: tuple[str | Number, ...]
    declared: bool = False


def opening(verdicts: Iterable[Verdict], found: Sequence[Statement]) -> list[Line]:
    """The claim, the verdict, and how it is known."""
    known = {verdict.claim.id: verdict for verdict in verdicts}
    return [
        _line(
            known,
            "Claimed",
            "{headline/abstract/lowest_speedup} to {headline/abstract/highest_speedup} times the best baseline on "
            "eight RTX 4090, and fine-tuning (LoRA) of Qwen3-235B on these 24-GB cards, where no baseline runs.",
        ),
        _line(known, "Verdict", f"Confirmed in part. {_simulation(known)} {_against(found)} {_MODEL}"),
        Line(
            "How we know",
            (
                "Simulated from the paper's layer times, and predicted; the figures of the A800 blind, before they "
                "were seen. Its machines were not at hand; the engine has run on one H200.",
            ),
        ),
    ]


def own_findings(verdicts: Iterable[Verdict]) -> list[Line]:
    """Three things that we found."""
    known = {verdict.claim.id: verdict for verdict in verdicts}
    return [_line(known, head, text) for head, text in _FINDINGS.items()]


_MODEL = (
    "That 235B runs is predicted; of the twelve bars our model of the hardware was given, {ours/predictions/held} hold."
)
_FINDINGS = {
    "The lead is smaller when rivals are tuned": (
        "RoundPipe over the best classic schedule, one synchronous call: {ours/lead/published/least} to "
        "{ours/lead/published/most} times on the published cuts, {ours/lead/searched/least} to "
        "{ours/lead/searched/most} when every cut is searched."
    ),
    "At equal tuning the winner depends on the model": (
        "The fastest that fits eight RTX 4090, everything charged and one search for all, over RoundPipe one step "
        "late: "
        f"{{{_LATE.format('qwen3_1p7b')}}} times on Qwen3-1.7B, {{{_LATE.format('llama31_8b')}}} on Llama-3.1-8B, "
        f"{{{_LATE.format('gpt_oss_20b')}}} on GPT-OSS-20B, {{{_LATE.format('qwen3_32b')}}} on Qwen3-32B and "
        f"{{{_LATE.format('qwen3_235b_lora')}}} on Qwen3-235B; 1 is RoundPipe itself."
    ),
    "What is charged decides who wins": (
        "Of 60 pairs of schedules hops turn {turning/pairs/hops}, shared links and the optimizer "
        "{turning/pairs/transfers}, memory {turning/pairs/memory}."
    ),
}


def _line(known: Mapping[str, Verdict], head: str, text: str) -> Line:
    names = re.split(r"\{([^}]+)\}", text)
    parts = [_number(known[part]) if place % 2 else part for place, part in enumerate(names)]
    declared = any(known[name].kind not in EVALUATED for name in names[1::2])
    return Line(head, tuple(part for part in parts if part), declared)


def _number(verdict: Verdict) -> Number:
    claim = verdict.claim
    declared = claim.published.text if claim.published else ""
    return Number(claim.shown(verdict.value) if verdict.kind in EVALUATED else declared, claim.id)


def _simulation(known: Mapping[str, Verdict]) -> str:
    """How many cells of the published simulation come out."""
    cells: dict[str, set[str]] = {}
    for name, verdict in known.items():
        if name.startswith("figure17/") and not name.startswith("figure17/asynchronous/"):
            cells.setdefault(name.rpartition("/")[0], set()).add(verdict.kind)
    met = sum(kinds == {REPRODUCED} for kinds in cells.values())
    return f"{met} of {len(cells)} cells of its simulation come out to the last digit."


def _against(found: Sequence[Statement]) -> str:
    theirs = [each for each in found if each.whose == "the paper's"]
    against = sum(each.verdict == CONTRADICTED for each in theirs)
    return f"{against} of {len(theirs)} statements taken from it are contradicted."
