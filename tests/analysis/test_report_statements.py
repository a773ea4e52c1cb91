"""Statements of the report: one verdict each, counted with their cells, and found by what is in the address."""

import re
from collections import Counter
from dataclasses import replace
from urllib.parse import parse_qs

from report_page import Page

from analysis.claims.claim import CONTRADICTED, KINDS, NOT_IN_QUICK, REPRODUCED, Verdict
from analysis.report.content import Content
from analysis.report.statements import FILTERS, Statement, choices, counted, statements


def test_one_cell_against_a_statement_is_against_it(full_content: Content) -> None:
    many = max(statements(full_content.verdicts), key=lambda each: len(each.cells))
    fine = tuple(replace(cell, kind=REPRODUCED) for cell in many.cells)
    assert Statement(fine).verdict == REPRODUCED
    assert Statement((replace(fine[0], kind=NOT_IN_QUICK), *fine[1:])).verdict == REPRODUCED
    mixed = Statement((*fine[1:], replace(fine[0], kind=CONTRADICTED)))
    assert (mixed.verdict, mixed.outcome) == (CONTRADICTED, f"{len(fine) - 1} reproduced, 1 contradicted")
    assert counted("verdict", [mixed])[REPRODUCED].statements == 0
    assert counted("verdict", [mixed])[REPRODUCED].cells == len(fine) - 1


def test_counts_add_up_to_all_statements_and_all_cells(full_content: Content) -> None:
    found = statements(full_content.verdicts)
    for name, options in choices(found).items():
        assert sum(count.statements for count in options.values()) == len(found), name
        assert sum(count.cells for count in options.values()) == len(full_content.verdicts), name
    cells = Counter(verdict.kind for verdict in full_content.verdicts)
    assert {kind: count.cells for kind, count in counted("verdict", found).items()} == cells


def _links(text: str) -> list[dict[str, str]]:
    """What links to narrowed lists choose."""
    found = (link.partition("#")[2] for link in Page(text).links)
    return [{key: values[0] for key, values in parse_qs(anchor).items()} for anchor in found if "=" in anchor]


def test_tiles_and_sections_lead_to_their_statements(texts: dict[str, str], full_content: Content) -> None:
    found = statements(full_content.verdicts)
    offered = choices(found)
    links = _links(texts["report.html"])
    assert [link for link in links if len(link) == 1] == [{"verdict": kind} for kind in offered["verdict"]]
    for link in links:
        assert set(link) <= set(FILTERS)
        chosen = [each for each in found if all(FILTERS[name](each) == value for name, value in link.items())]
        assert chosen or len(link) == 2, link
        assert all(value in offered[name] for name, value in link.items())


def test_what_was_contradicted_can_be_searched_for(texts: dict[str, str]) -> None:
    rows = [line for line in texts["claims.html"].splitlines() if line.startswith("  <tr data-verdict=")]
    against = [row for row in rows if 'data-verdict="contradicted"' in row]
    assert against
    assert all(re.search(r"<td>[^<]*contradicted[^<]*</td></tr>$", row) for row in against)  # what is read is searched


def test_every_kind_of_verdict_decides_something() -> None:
    claim = None
    for kind in KINDS:
        assert Statement((Verdict(claim, kind),)).verdict == kind  # type: ignore[arg-type]
