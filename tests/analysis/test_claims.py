"""Claims: every verdict can be reached, numbers decide it, and a suite that measured nothing is never green."""

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifests import replaced

from analysis.claims import Claim, Need, Verdict, all_claims, evaluate, judge, summary_text, tally
from analysis.claims.catalogue import red_text
from analysis.claims.claim import EVALUATED, KINDS
from analysis.claims.expected import Expected
from analysis.claims.own.regression import AS_ACCEPTED, compared, written
from analysis.records.experiments import Experiments
from analysis.records.published import Printed, printed, table

CLAIMS = {claim.id: claim for claim in all_claims()}
NOTHING = Experiments(Path("no such folder"))
MAKESPAN = CLAIMS["figure17/1f1b/llama31_8b/makespan_ms"]


def claim(text: str, value: float | str, **more: Any) -> Claim:
    """A claim that needs no run."""
    plain: dict[str, Any] = {"section": "s", "source": "a paper", "statement": "so it is", "metric": "m", "unit": "ms"}
    return Claim(
        id="c",
        published=Printed(text, "a table"),
        evidence="derived",
        value=lambda: value,
        **(plain | more),
    )


def verdict(text: str, value: float | str, **more: Any) -> Verdict:
    return judge(claim(text, value, **more), NOTHING)


def without(experiments: Experiments, run_ids: tuple[str, ...]) -> Experiments:
    rows = experiments.cells("figure17")
    return replaced(experiments, "figure17", rows[~rows["run_id"].isin(run_ids)])


def find(experiments: Experiments, need: Need) -> dict[str, Any] | None:
    return experiments.find(need.experiment, need.choices, need.contender)


# --- the catalogue -------------------------------------------------------------------------------------------


def test_there_are_well_over_a_hundred_claims_and_each_says_where_it_comes_from() -> None:
    assert len(CLAIMS) == len(all_claims()) > 600
    for each in CLAIMS.values():
        assert each.source
        assert each.section
        assert each.statement
        assert each.evidence in ("published", "derived", "simulated", "predicted", "measured")
        assert each.not_testable or each.needs or each.made_from, each.id


def test_every_printed_number_of_figure_17_is_a_claim() -> None:
    cells = [each for each in CLAIMS if each.startswith("figure17/") and "/asynchronous/" not in each]
    assert len(cells) == 25 * 15
    assert sum(each.startswith("steady_state/") for each in CLAIMS) == 20


@pytest.mark.parametrize("name", ["planner", "discrepancies", "throughput", "max_seq_len", "headline", "figure2"])
def test_no_row_of_a_published_table_is_left_out(name: str) -> None:
    """Every row's number stands in a claim's source; an empty cell has none."""
    columns = {"planner": "forward_stages", "discrepancies": "published_value", "throughput": "tokens_per_s"}
    columns |= {"max_seq_len": "max_seq_len_published_k", "headline": "async_over_sync_gain", "figure2": "ratio"}
    used = [each.published for each in CLAIMS.values() if each.published and f"{name}.csv, " in each.published.source]
    for row in table(name):
        value = row[columns[name]] or row.get("status", "")
        assert any(item.text == value and row["source"] in item.source for item in used), row


def test_measurements_of_other_machines_are_predicted_or_missed_by_a_declared_value() -> None:
    found = [judge(each, NOTHING) for each in CLAIMS.values() if each.predicts and not each.needs]
    assert len(found) > 180
    assert {verdict.kind for verdict in found} == {"predicted", "our model misses"}
    assert [verdict.claim.id for verdict in found if verdict.red] == []
    missed = next(verdict for verdict in found if verdict.kind == "our model misses" and verdict.difference)
    another = replace(missed.claim, value=lambda: 1.01 * float(missed.value or 0))
    assert judge(another, NOTHING).red


def test_no_published_number_is_typed_a_second_time() -> None:
    """No constant of the claims' code and words is a published value; numbers of up to three digits prove nothing."""
    published = {text for name in ("bubble", "figure2", "figure5", "headline", "throughput") for text in _numbers(name)}
    assert "42.0793" in published
    typed = set()
    folder = Path(__file__).parents[2] / "analysis" / "claims"
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and not isinstance(node.value, bool):
                typed |= set(str(node.value).replace(",", " ").split())
    for path in folder.rglob("*.yaml"):
        typed |= set(re.split(r"[\s,:\"\[\]{}]+", path.read_text(encoding="utf-8")))
    assert typed & published == set()


def _numbers(name: str) -> set[str]:
    return {text for row in table(name) for text in row.values() if sum(c.isdigit() for c in text) > 3 and _is(text)}


def _is(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def test_a_claim_has_a_value_or_says_what_a_test_needs() -> None:
    with pytest.raises(ValueError, match="not both"):
        claim("1", 1.0, not_testable="a machine")
    with pytest.raises(ValueError, match="not both"):
        replace(claim("1", 1.0), value=None)
    with pytest.raises(ValueError, match="nothing published"):
        replace(claim("1", 1.0), published=None)


# --- verdicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value, more, kind",
    [
        ("42.08", 42.0849, {}, "reproduced"),
        ("42.08", 42.0851, {}, "contradicted"),
        ("9727.6322", 9727.63225, {}, "reproduced"),  # a tie: either print is right
        ("9727.6322", 9727.63226, {}, "contradicted"),
        ("7", 7.4, {}, "reproduced"),
        ("7", 7.4, {"tolerance": 0.0}, "contradicted"),  # a count
        ("42.08", 42.5, {"wide_tolerance": 0.5}, "within tolerance"),
        ("42.08", 43.0, {"wide_tolerance": 0.5}, "contradicted"),
        ("38.39", 35.09, {"relation": "<="}, "reproduced"),
        ("38.39", 38.40, {"relation": "<="}, "contradicted"),
        ("mobius", "mobius", {}, "reproduced"),
        ("mobius", "fsdp", {}, "contradicted"),
        ("4", float("nan"), {}, "failed"),
    ],
)
def test_the_difference_decides(text: str, value: float | str, more: dict, kind: str) -> None:
    found = verdict(text, value, **more)
    assert found.kind == kind
    assert found.red == (kind in ("contradicted", "failed"))


def test_an_expected_contradiction_is_no_fault_and_its_absence_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.claims.claim.expected", lambda _: Expected("38.39", 0.005))
    declared = verdict("42.08", 38.39, contradiction="the cut is not tuned: {value} %")
    assert (declared.kind, declared.red, declared.reason) == ("contradicted", False, "the cut is not tuned: 38.39 %")
    other = verdict("42.08", 38.38, contradiction="the cut is not tuned: {value} %")
    assert (other.kind, other.red) == ("contradicted", True)
    assert "another value than declared: 38.38, declared was 38.39" in other.explanation
    gone = verdict("42.08", 42.08, contradiction="the cut is not tuned")
    assert (gone.kind, gone.red) == ("reproduced", True)
    assert "expected to be contradicted" in gone.explanation


def test_a_contradicting_value_is_shown_with_digits_that_differ() -> None:
    assert claim("330", 1.0, tolerance=0.05).shown(330.304) == "330.3"
    assert claim("5.75", 1.0).shown(5.7549) == "5.75"


def test_a_claim_whose_code_breaks_is_red_and_the_others_are_judged() -> None:
    broken = replace(claim("1", 1.0), value=lambda: 1 / 0)
    first, second = evaluate([broken, replace(claim("1", 1.0), id="d")], NOTHING)
    assert (first.kind, first.red) == ("failed", True)
    assert "ZeroDivisionError" in first.reason
    assert second.kind == "reproduced"


@given(
    units=st.integers(-(10**9), 10**9),
    decimals=st.integers(0, 4),
    shift=st.floats(-3, 3).filter(lambda x: abs(abs(x) - 0.5) > 1e-3),
)
def test_half_a_unit_of_the_last_digit_is_the_bound(units: int, decimals: int, shift: float) -> None:
    unit = 10.0**-decimals
    found = verdict(f"{units * unit:.{decimals}f}", (units + shift) * unit)
    assert found.kind == ("reproduced" if abs(shift) < 0.5 else "contradicted")


# --- records -------------------------------------------------------------------------------------------------


def test_every_number_of_the_25_cells_is_reproduced(experiments: Experiments) -> None:
    cells = [c for c in all_claims() if {need.experiment for need in c.needs} == {"figure17"} and not c.contradiction]
    found = [item for item in evaluate(cells, experiments) if item.kind not in ("within tolerance", "predicted")]
    assert len(found) > 375
    assert [(item.claim.id, item.reason) for item in found if item.kind != "reproduced"] == []
    assert all(item.run_ids for item in found)


def test_closed_forms_come_out_as_declared(experiments: Experiments) -> None:
    chosen = [c for c in all_claims() if {need.experiment for need in c.needs} == {"roofline"}]
    found = evaluate(chosen, experiments)
    assert len(found) > 60
    assert [(item.claim.id, item.explanation) for item in found if item.red] == []
    assert {item.kind for item in found} == {"reproduced", "contradicted"}


def test_tables_alone_give_the_headline_numbers() -> None:
    chosen = [c for c in all_claims() if not c.needs and not c.not_testable]
    found = evaluate(chosen, NOTHING)
    assert len(found) > 20
    assert [(item.claim.id, item.explanation) for item in found if item.red] == []


def test_another_number_in_the_record_flips_the_verdict(experiments: Experiments) -> None:
    true = judge(MAKESPAN, experiments)
    assert (true.kind, true.red) == ("reproduced", False)
    rows = experiments.cells("figure17").copy()
    rows.loc[rows["run_id"] == true.run_ids[0], "makespan_s"] += 1e-6
    false = judge(MAKESPAN, replaced(experiments, "figure17", rows))
    assert (false.kind, false.red) == ("contradicted", True)
    assert "differs by 0.001 ms" in false.reason


def test_a_missing_run_turns_its_claims_red(experiments: Experiments) -> None:
    run_ids = judge(MAKESPAN, experiments).run_ids
    found = evaluate(all_claims(), without(experiments, run_ids))
    lost = [item for item in found if item.claim.id.startswith("figure17/1f1b/llama31_8b/")]
    assert {item.kind for item in lost} == {"missing"}
    assert all(item.red for item in lost)
    assert "experiment=figure17 (1f1b llama31_8b)" in lost[0].reason
    assert lost[0].claim.id in red_text(lost)


def test_a_run_outside_the_plan_is_no_fault(experiments: Experiments) -> None:
    fewer = without(experiments, judge(MAKESPAN, experiments).run_ids)

    def planned(need: Need) -> bool:
        return need.experiment != "figure17"

    assert judge(MAKESPAN, fewer, planned).kind == "not in this scope"
    assert not judge(MAKESPAN, fewer, planned).red
    assert judge(MAKESPAN, experiments, planned).kind == "reproduced"  # a run that is there counts


def test_a_claim_of_two_experiments_misses_what_was_planned(experiments: Experiments) -> None:
    """One has been run, the other not: only if that was to be run is its absence a fault."""
    both = claim("1", 1.0, needs=(*MAKESPAN.needs, Need("partitions", {"partition": "even"})))
    for in_plan, kind in ((("figure17",), "not in this scope"), (("figure17", "partitions"), "missing")):
        found = judge(both, experiments, lambda need, known=in_plan: need.experiment in known)
        assert found.kind == kind
        assert found.reason.startswith("experiment=partitions has not been run here")


def test_planned_is_evaluated_and_not_testable_and_missing(experiments: Experiments) -> None:
    found = evaluate(all_claims(), experiments)
    *sections, everything = tally(found).values()
    rest = ("not testable here", "not in this scope", "missing", "failed")
    assert everything.total() == len(CLAIMS) == sum(everything[kind] for kind in (*EVALUATED, *rest))
    assert sum(each.total() for each in sections) == everything.total()
    assert everything["missing"] > 0
    assert everything["failed"] == 0
    text = summary_text(found)
    assert str(len(CLAIMS)) in text.splitlines()[-1]
    assert all(kind in text.splitlines()[0] for kind in KINDS if everything[kind])


NOT_WHOLE = {"hand_cuts", "steady_causal", "equivalence", "baselines_cpu"}  # of the experiments that are made up


def test_every_run_that_a_claim_needs_can_be_found(full_experiments: Experiments) -> None:
    """Of all experiments but those that the fixture does not make up whole."""
    whole = {*full_experiments.names()} - NOT_WHOLE
    needs = {need for each in all_claims() for need in each.needs if need.experiment in whole}
    assert len(needs) > 150
    assert [str(need) for need in needs if find(full_experiments, need) is None] == []


def test_nothing_stays_missing_with_all_experiments(full_experiments: Experiments) -> None:
    """The values are made up, so verdicts are not; but each is reached by comparing."""
    whole = {*full_experiments.names()} - NOT_WHOLE
    kinds = {item.kind for item in evaluate(all_claims(), full_experiments) if _is_made_up(item.claim, whole)}
    assert kinds <= set(EVALUATED) | {"not testable here"}


def _is_made_up(each: Claim, whole: set[str]) -> bool:
    # Made-up records hold no more than exhibits need; what follows from whole ones is judged on records that were run.
    of_whole_records = each.id.startswith(("consistency/", "derived/figure10/", "trained/order/"))
    return not of_whole_records and {need.experiment for need in each.needs} <= whole


def test_an_experiment_that_was_not_run_turns_its_claims_red() -> None:
    needs = (Need("figure99"),)
    found = judge(claim("1", 1.0, needs=needs), NOTHING)
    assert (found.kind, found.red) == ("missing", True)
    assert found.reason == "experiment=figure99 has not been run here: python -m rpbench -m experiment=figure99"
    assert judge(claim("1", 1.0, needs=needs), NOTHING, lambda need: False).kind == "not in this scope"


# --- printed numbers -----------------------------------------------------------------------------------------


def test_a_printed_number_keeps_its_digits_and_its_place() -> None:
    cell = printed("bubble", "bubble_ratio_percent", scheduler="1f1b", model="llama-3.1-8b")
    assert cell is not None
    assert (cell.text, cell.value, cell.decimals, cell.half_unit) == ("42.0793", 42.0793, 4, 0.5e-4)
    assert cell.source.startswith("analysis/published/bubble.csv, bubble_ratio_percent of 1f1b, llama-3.1-8b: ")
    assert printed("headline", "best_baseline", model="qwen3-235b-lora") is None


def test_a_lookup_that_fits_no_row_or_several_is_an_error() -> None:
    with pytest.raises(LookupError, match="0 rows"):
        printed("bubble", "makespan_ms", scheduler="zigzag", model="llama-3.1-8b")
    with pytest.raises(LookupError, match="5 rows"):
        printed("bubble", "makespan_ms", scheduler="1f1b")


def test_one_point_of_the_second_half_of_a_late_methods_long_curve_may_be_anywhere():
    """A jump of its loss is another one on another processor."""
    curve = [5 - 0.1 * point for point in range(12)] + [3.3] * 12
    with_a_jump, expected = [*curve[:19], 3.9, *curve[20:]], {"loss_curve": written(curve)}
    late = {"num_updates": 96, "staleness_steps": 3}
    assert compared(late | {"loss_curve": with_a_jump}, expected) == AS_ACCEPTED
    for other in ({"num_updates": 24}, {"staleness_steps": 0}):
        assert compared(late | other | {"loss_curve": with_a_jump}, expected) != AS_ACCEPTED
    early, two = [*curve[:5], 5.5, *curve[6:]], [*with_a_jump[:-1], 3.9]
    for other in (early, two, curve[:-1], [*curve, 3.3], [*curve[:-1], None], [*curve[:-1], float("nan")]):
        assert compared(late | {"loss_curve": other}, expected) != AS_ACCEPTED
