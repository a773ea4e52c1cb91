"""One quantity, one number: what two exhibits print of a record in one unit is equal, or a label says why not."""

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import pytest

from analysis.documents import ROOT
from analysis.exhibits import style
from analysis.exhibits.exhibit import Cell, Exhibit, Table
from analysis.report.content import Content
from analysis.report.opening import findings

# Words of labels that name another measure than the label without them: bubbles by other rules, parts of one, clocks.
MEASURES = (
    *("between the ends", "switch and intra", "of span", "over ideal", "fill", "switch", "drain", "intra"),
    *("from the calibration", "predicted", "emulated", "processor time", "clock"),
)
NEAR = 0.08  # two numbers that are no further apart look like one quantity


class Printed(NamedTuple):
    """A number of one record, as an exhibit prints it."""

    exhibit: str
    label: str
    cell: Cell

    @property
    def unit(self) -> str:
        found = re.search(r"\(([^()]*)\)$", self.label)
        return found[1] if found else self.label

    @property
    def measure(self) -> str:
        return next((words for words in MEASURES if words in self.label), "")

    @property
    def decimals(self) -> int:
        return len(self.cell.text.partition(".")[2])


def _printed(exhibits: list[Exhibit]) -> Iterator[Printed]:
    for each in exhibits:
        for row in each.table.rows if each.table else ():
            for label, cell in zip(each.table.columns, row, strict=True):
                if len(cell.run_ids) == 1 and isinstance(cell.value, (int, float)):
                    yield Printed(each.id, label, cell)


def differing(exhibits: list[Exhibit]) -> Iterator[str]:
    """Pairs of exhibits whose labels say one thing, and whose numbers of one record another."""
    by_record = defaultdict(list)
    for printed in _printed(exhibits):
        by_record[printed.cell.run_ids[0], printed.unit].append(printed)
    for printed in by_record.values():
        for one, other in combinations(printed, 2):
            if one.exhibit == other.exhibit or one.measure != other.measure:
                continue
            values = (float(one.cell.value), float(other.cell.value))
            digits = min(one.decimals, other.decimals)
            is_near = abs(values[0] - values[1]) <= NEAR * max(map(abs, values))
            if is_near and round(values[0], digits) != round(values[1], digits):
                yield f"{one.exhibit}, {one.label}: {one.cell.text}; {other.exhibit}, {other.label}: {other.cell.text}"


def test_exhibits_agree_on_every_record_they_share(full_content: Content):
    assert len({printed.exhibit for printed in _printed(full_content.exhibits)}) > 15
    assert list(differing(full_content.exhibits)) == []


def test_two_measures_under_one_label_are_seen():
    def printing(name: str, label: str, value: float) -> Exhibit:
        cell = Cell(value, f"{value:.2f}", ("run",))
        return Exhibit(name, "", (), "", id=name, table=Table(("model", label), ((Cell("m", "m"), cell),)))

    one = printing("one", "bubble (%)", 2.2220)
    assert list(differing([one, printing("other", "N = 8 (%)", 2.2480)]))
    assert not list(differing([one, printing("other", "N = 8, between the ends (%)", 2.2480)]))
    assert not list(differing([one, printing("other", "N = 8 (%)", 2.2201)]))


def test_a_label_of_the_findings_has_one_number_for_each_subject(full_content: Content):
    said = defaultdict(set)
    for finding in findings(full_content.verdicts):
        for subject, numbers in finding.rows:
            for column, number in zip(finding.columns[1:], numbers, strict=True):
                said[column, subject].add(number.text)
    assert "back to back, N = 8 (%)" in {column for column, _ in said}
    assert {key: texts for key, texts in said.items() if len(texts) > 1} == {}


def test_no_waiting_is_below_not_waiting(full_content: Content):
    """Both columns of the causal finding are of one measure, so that waiting cannot look faster than not waiting."""
    claims = {verdict.claim.id: verdict.claim for verdict in full_content.verdicts}
    found = next(each for each in findings(full_content.verdicts) if "back to back, N = 8, waiting (%)" in each.columns)
    run = {"bubble_steady": 0.25, "bubble_between_ends": 0.5}
    for _, numbers in found.rows:
        back_to_back, waiting = (claims[number.claim] for number in numbers[2:])
        assert back_to_back.value(run) == waiting.value(run) == pytest.approx(25)


@pytest.mark.parametrize("field", style.BUBBLES)
def test_a_bubble_is_defined_in_the_same_words_everywhere(field: str, full_content: Content):
    page = (ROOT / "docs" / "bubbles.md").read_text(encoding="utf-8")
    assert f"| `{field}` | {style.BUBBLES[field]} |" in page
    for each in full_content.exhibits:
        if field in each.caption and field in ("bubble_steady", "bubble_between_ends"):
            assert style.BUBBLES[field] in each.caption, each.id


@pytest.mark.parametrize("name", ["steady_state", "figure17", "tuning", "figure10"])
def test_exhibits_of_steps_back_to_back_name_their_bubble(name: str, full_content: Content):
    assert "bubble_steady" in next(each.caption for each in full_content.exhibits if each.id == name)
