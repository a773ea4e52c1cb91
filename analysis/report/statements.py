"""Statements: claims grouped by what they say; one verdict each, counted over sections and kinds of evidence."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter

from analysis.claims.claim import DECIDES, EVALUATED, KINDS, Verdict
from analysis.records.runs import grouped

# Fields by which a list of statements can be filtered, in their order on the page.
FILTERS = ("verdict", "kind", "whose", "section")


@dataclass(frozen=True)
class Statement:
    """One statement with its verdict; a cell is one of its numbers."""

    cells: tuple[Verdict, ...]

    @property
    def verdict(self) -> str:
        kinds = {cell.kind for cell in self.cells}
        return next(kind for kind in DECIDES if kind in kinds)

    @property
    def section(self) -> str:
        return self.cells[0].claim.section

    @property
    def whose(self) -> str:
        return self.cells[0].claim.whose

    @property
    def kind(self) -> str:
        """The kind of evidence that our values are."""
        return self.cells[0].claim.evidence

    @property
    def id(self) -> str:
        return self.cells[0].claim.statement_id or self.cells[0].claim.id

    @property
    def words(self) -> str:
        before, _, after = split_words([cell.claim.statement for cell in self.cells])
        return before + (f" … {after}" if after else "")

    @property
    def own_words(self) -> list[str]:
        """The words of each cell beyond those that all share; all words of an only cell."""
        texts = [cell.claim.statement for cell in self.cells]
        before, own, _ = split_words(texts)
        return own if len(texts) > 1 and before != texts[0] else texts

    @property
    def outcome(self) -> str:
        """The verdicts of its cells, such as `12 reproduced, 1 contradicted`."""
        counts = Counter(cell.kind for cell in self.cells)
        return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])


@dataclass(frozen=True)
class Count:
    """Numbers of statements and of cells."""

    statements: int
    cells: int


def statements(verdicts: Iterable[Verdict]) -> list[Statement]:
    """The statements that verdicts are cells of, in the order of their first cells."""
    found = grouped(verdicts, lambda verdict: verdict.claim.statement_id or verdict.claim.id)
    return [Statement(tuple(cells)) for cells in found.values()]


def grouped_by(name: str, found: Iterable[Statement]) -> dict[str, list[Statement]]:
    """Statements by one of `FILTERS`, in the order of their first ones."""
    return grouped(found, attrgetter(name))


def counted(name: str, found: Iterable[Statement]) -> dict[str, Count]:
    """Statements by one of `FILTERS`, verdicts in the order in which they are told, and cells: of a verdict those that
    came out so, wherever they stand, else all of the statements.
    """
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

    Texts without a common beginning are named by the first of them, and each has all of its own.
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
    """The number of words at the beginning that all lists share."""
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*split, strict=False)))
