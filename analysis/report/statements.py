"""Statements: verdicts of claims grouped by what they state, with one verdict each, and their counts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from analysis.claims.claim import DECIDES, EVALUATED, KINDS, Claim, Verdict
from analysis.records.runs import grouped

# The list of statements can be filtered by these, in the order of the page; the kind is that of our values' evidence.
FILTERS = {
    "verdict": attrgetter("verdict"),
    "kind": attrgetter("claim.evidence"),
    "whose": attrgetter("claim.whose"),
    "section": attrgetter("claim.section"),
}


@dataclass(frozen=True)
class Statement:
    """One statement; each cell is the verdict on one of its numbers."""

    cells: tuple[Verdict, ...]

    @property
    def verdict(self) -> str:
        kinds = {cell.kind for cell in self.cells}
        return next(kind for kind in DECIDES if kind in kinds)

    @property
    def claim(self) -> Claim:
        """The claim of its first cell."""
        return self.cells[0].claim

    @property
    def words(self) -> str:
        before, _, after = split_words([cell.claim.statement for cell in self.cells])
        return before + (f" … {after}" if after else "")

    @property
    def own_words(self) -> list[str]:
        """The words of each cell that the others do not share; all words of a single cell."""
        texts = [cell.claim.statement for cell in self.cells]
        before, own, _ = split_words(texts)
        return own if len(texts) > 1 and before != texts[0] else texts

    @property
    def outcome(self) -> str:
        """Such as `12 reproduced, 1 contradicted`."""
        counts = Counter(cell.kind for cell in self.cells)
        return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])


class Count(NamedTuple):
    """Numbers of statements and of cells."""

    statements: int
    cells: int


def statements(verdicts: Iterable[Verdict]) -> list[Statement]:
    """The statements of verdicts, in the order of their first cells."""
    found = grouped(verdicts, lambda verdict: verdict.claim.statement_id or verdict.claim.id)
    return [Statement(tuple(cells)) for cells in found.values()]


def grouped_by(name: str, found: Iterable[Statement]) -> dict[str, list[Statement]]:
    """Statements by one of `FILTERS`, in the order of first occurrence."""
    return grouped(found, FILTERS[name])


def counted(name: str, found: Iterable[Statement]) -> dict[str, Count]:
    """Counts of statements and cells by one of `FILTERS`; a verdict counts the cells that have it."""
    groups = grouped_by(name, found)
    if name == "verdict":
        cells = Counter(cell.kind for those in groups.values() for each in those for cell in each.cells)
        return {kind: Count(len(groups.get(kind, ())), cells[kind]) for kind in KINDS if cells[kind]}
    return {each: Count(len(those), sum(len(one.cells) for one in those)) for each, those in groups.items()}


def choices(found: Sequence[Statement]) -> dict[str, dict[str, Count]]:
    return {name: counted(name, found) for name in FILTERS}


def judged(found: Sequence[Statement]) -> list[Statement]:
    """Statements for which something was compared."""
    return [each for each in found if each.verdict in EVALUATED]


def split_words(texts: Sequence[str]) -> tuple[str, list[str], str]:
    """The common beginning of texts in whole words, the middle of each, and their common end.

    Without a common beginning: the first text, all texts, and no end.
    """
    split = [text.split() for text in texts]
    before = _num_alike(split)
    if not before:
        return texts[0], list(texts), ""
    after = _num_alike([words[before:][::-1] for words in split])
    own = [" ".join(words[before : len(words) - after]).strip(":,") for words in split]
    end = " ".join(split[0][len(split[0]) - after :])
    return " ".join(split[0][:before]).rstrip(":,"), own, end


def _num_alike(split: Sequence[Sequence[str]]) -> int:
    """The number of equal words at the beginning of all lists."""
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*split, strict=False)))
