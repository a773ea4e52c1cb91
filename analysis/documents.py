"""Documents whose numbers come from claims and are written by a command.

    python -m analysis.documents            write every number and the README's figure
    python -m analysis.documents --check    exit 1 if a number differs from its claim's declared one

`1.24<!--=ID-->` is the declared number of the claim ID, which a reproduction checks against the records: of one of our
own statements (`analysis/claims/expected/statements.csv`) or a published one. The mark follows its number because a
line that begins with one would end its list or paragraph. Write a new number as `?` before its mark. Between
`<!--table=NAME-->` and `<!--/table-->` stands a table from `analysis/kept/`, or the README's headline.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from analysis.claims.catalogue import all_claims
from analysis.claims.expected import statement
from analysis.driver import convergence_study
from rpbench.records.record import write_atomically

ROOT = Path(__file__).parents[1]
_MARK = re.compile(r"(?P<text>[-+\d.,?]*)<!--=(?P<claim>[^>]*?)-->")
_TABLE = re.compile(r"<!--table=(?P<name>[^>]*?)-->\n(?P<text>.*?)<!--/table-->", re.DOTALL)
TABLES: Mapping[str, Callable[[], str]] = {
    "headline": lambda: headline((ROOT / "README.md").read_text(encoding="utf-8")),
    "convergence_study": convergence_study.markdown,
}
_HEADLINE = re.compile(r"^- \*\*Claimed\*\*.*?\n\n", re.DOTALL | re.MULTILINE)
FIGURE = ROOT / "docs" / "figures" / "readme.png"


def documents() -> list[Path]:
    named = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "baselines" / "README.md"]
    return [*(path for path in named if path.exists()), *sorted((ROOT / "docs").rglob("*.md"))]


def written(text: str, number_of: Callable[[str], str]) -> str:
    """The text with the number of every claim and every table filled in; LookupError for an unknown claim or table."""
    text = _TABLE.sub(lambda found: f"<!--table={found['name']}-->\n{table_of(found['name'])}<!--/table-->", text)
    return _MARK.sub(lambda found: f"{number_of(found['claim'])}<!--={found['claim']}-->", text)


def number_of(claim_id: str) -> str:
    """The digits of a claim's number; LookupError, naming the nearest id, for an unknown claim."""
    claims = {claim.id: claim for claim in all_claims()}
    if claim_id not in claims:
        near = difflib.get_close_matches(claim_id, claims, n=1, cutoff=0.4)
        raise LookupError(f"no claim {claim_id!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    text = claims[claim_id].printed
    if text == statement("").text:
        raise LookupError(f"claim {claim_id!r} has no declared value; run python -m analysis.driver.accept")
    return text


def table_of(name: str) -> str:
    if name not in TABLES:
        raise LookupError(f"no table {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]()


def headline(readme: str) -> str:
    """The README's list of the paper's claim, the verdict and its evidence, for a page of `docs/`."""
    found = _HEADLINE.search(readme)
    if found is None:
        raise LookupError("README.md has no list that begins with **Claimed**; the pages take their headline from it")
    return found[0].replace("](docs/", "](")


def stale(paths: Sequence[Path]) -> Iterator[str]:
    """A line for each number and table that is out of date."""
    for path in paths:
        text = path.read_text(encoding="utf-8")

        def place(found: re.Match[str], path: Path = path, text: str = text) -> str:
            return f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"

        for found in _TABLE.finditer(text):
            if found["text"] != table_of(found["name"]):
                yield f"{place(found)}: the table {found['name']} is not the one that is kept"
        for found in _MARK.finditer(text):
            if found["text"] != (due := number_of(found["claim"])):
                yield f"{place(found)}: {found['claim']} says {found['text'] or 'nothing'}, the claim {due}"


def draw_figure(results: Path) -> None:
    """Draw the README's figure from the records of figure 17, if they are there."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from analysis.exhibits.figures.files import png_bytes
    from analysis.exhibits.figures.paper import figure17  # imports matplotlib, which numbers do not need
    from analysis.records.experiments import Experiments, MissingRuns

    try:
        figure = figure17.exhibit(Experiments(results)).draw
    except MissingRuns as lack:
        print(f"the README's figure stays as it is: {lack}", file=sys.stderr)
        return
    assert figure is not None  # this exhibit has one
    FIGURE.write_bytes(png_bytes(figure()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.documents", description="Numbers of documents.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a number is stale")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="of the README's figure")
    options = parser.parse_args(arguments)
    if options.check:
        lines = list(stale(documents()))
        print("\n".join(lines), end="\n" if lines else "")
        return 1 if lines else 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if (new := written(text, number_of)) != text:
            write_atomically(path, new)
            print(path.relative_to(ROOT))
    draw_figure(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
