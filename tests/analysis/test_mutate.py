"""Mutants: drawn from all that a record, a manifest and a table hold, and counted with and without acceptance."""

from itertools import islice
from typing import Any

import pytest

from analysis.claims import all_claims
from analysis.claims.claim import Claim
from analysis.claims.expected import read_table
from analysis.claims.own import consistency, derived, regression, turning
from analysis.mutate.check import (
    ASKED,
    FOUND,
    GONE,
    KINDS,
    MANIFEST,
    ORIGIN,
    TABLE,
    Mutant,
    Outcome,
    check,
    is_acceptance,
    mutants,
    of_statements,
    sampled,
)
from analysis.records.experiments import Experiments

EXPERIMENT = "figure17"


@pytest.fixture(scope="module")
def drawn(experiments: Experiments) -> list[Mutant]:
    return [draw() for _, draw in mutants(experiments, EXPERIMENT)]


def _checked(experiments: Experiments, *chosen: Mutant) -> Outcome:
    resting = [claim for claim in all_claims() if any(need.experiment == EXPERIMENT for need in claim.needs)]
    return check(experiments, resting, chosen)


def _first(drawn: list[Mutant], field: str, what: str) -> Mutant:
    return next(mutant for mutant in drawn if (mutant.field, mutant.what) == (field, what))


def test_every_value_of_every_record_is_falsified(experiments: Experiments, drawn: list[Mutant]) -> None:
    fields = {mutant.field for mutant in drawn}
    row = experiments.checked(EXPERIMENT)[0]
    assert set(row) - {"run_id", "digest", "cell"} <= {field.partition(".")[0] for field in fields}
    assert {"config.charge", "config.model.seq_len", "choices.schedule", "versions.torch", "makespan_s"} <= fields
    assert {"state", "schedule", "model", "run_ids", "num_actions"} <= fields  # the manifest's, and the table's
    assert {mutant.kind for mutant in drawn} == set(KINDS)


def test_what_was_asked_what_is_gone_and_what_a_manifest_says_is_refused_without_any_accepted_value(
    experiments: Experiments,
) -> None:
    outcome = _checked(experiments, *sampled(mutants(experiments, EXPERIMENT), 60, seed=3))
    for kind in (ASKED, GONE, MANIFEST):
        assert outcome.of(kind).num_mutants == (25 if kind == GONE else 60)
        assert outcome.of(kind).seen_otherwise == 1, kind
    assert outcome.of(TABLE).seen == 1
    assert outcome.of(FOUND).seen_otherwise < outcome.of(FOUND).seen
    assert outcome.of(ORIGIN).seen < 1  # the digest in the manifest alone holds it
    assert f"{TABLE} 100.0% of 60" in str(outcome)


def test_a_result_is_seen_without_acceptance_where_something_else_follows_from_it(
    experiments: Experiments, drawn: list[Mutant]
) -> None:
    """The paper printed the makespan; it said nothing of memory."""
    for field, otherwise in (("makespan_s", True), ("tokens_per_step", True), ("peak_memory_bytes", False)):
        outcome = _checked(experiments, _first(drawn, field, "times 1.1"))
        assert (outcome.seen, outcome.seen_otherwise) == (1, otherwise), field


def test_a_changed_statement_is_red(experiments: Experiments) -> None:
    changed = [draw() for _, draw in of_statements()]
    lead = next(each for each in changed if each.line and each.line["claim"] == "ours/lead/published/most")
    assert _checked(experiments, lead).seen == 1


def test_samples_are_the_same_for_a_seed_and_as_large_for_every_kind(experiments: Experiments) -> None:
    found = list(islice(mutants(experiments, EXPERIMENT), 20_000))
    one, other = (list(map(str, sampled(found, 10, seed=seed))) for seed in (1, 2))
    assert one == list(map(str, sampled(found, 10, seed=1))) != other


# --- what is not accepted --------------------------------------------------------------------------------------


def test_no_consistency_and_no_derivation_is_an_acceptance() -> None:
    claims: list[Claim] = [*consistency.claims(), *derived.claims()]
    assert len(claims) > 1000
    assert not any(map(is_acceptance, claims))


def test_every_number_of_time_breaks_an_identity_when_it_alone_is_changed(experiments: Experiments) -> None:
    row = next(row for row in experiments.checked(EXPERIMENT) if row["schedule"] == "roundpipe")
    assert consistency.broken(row) == "holds"
    for name in (
        *("makespan_s", "idle_s", "bubble_makespan", "bubble_span", "bubble_over_ideal", "span_s", "intra_s"),
        *("fill_s", "switch_s", "drain_s", "tokens_per_s", "tokens_per_step", "num_stages", "num_devices"),
    ):
        changed = row | {name: row[name] * 1.1 if isinstance(row[name], float) else row[name] + 1}
        assert row[name] == 0 or consistency.broken(changed) != "holds", name
    assert consistency.broken(row | {"busy_s": [1.1 * busy for busy in row["busy_s"]]}) != "holds"
    assert consistency.broken(row | {"peak_memory_bytes": row["peak_memory_bytes"][:-1]}) != "holds"


@pytest.mark.parametrize("devices, microbatches", [(1, 5), (4, 4), (3, 20), (8, 3)])
def test_the_recurrence_of_1f1b_is_the_closed_form_where_hops_take_no_time(devices: int, microbatches: int) -> None:
    found = derived.one_f_one_b_s(devices, microbatches, 1.0, 2.0, 0.0)
    assert found == pytest.approx(3 * (microbatches + devices - 1))


def test_losses_of_many_updates_are_held_to_what_processors_agree_on_and_orders_to_the_letter() -> None:
    """The accepted tables stand for records; 6 % is what instruction sets make of a loss after 96 updates."""
    rows = {(row["cell.schedule"], row["cell.seed"]): row for row in read_table("convergence")}
    for schedule, factor, same in (("pipedream", 0.94, True), ("pipedream", 0.85, False), ("gpipe", 0.94, False)):
        row = rows[schedule, "0"]
        run = {"num_updates": int(row["num_updates"]), "loss": factor * float(row["loss"])}
        found = regression.compared(run, {"loss": row["loss"]})
        assert (found == regression.AS_ACCEPTED) == same, (schedule, factor)
    for claim in turning.trained_claims():
        runs = [_as_record(rows[need.choices["schedule"], need.choices["seed"]]) for need in claim.needs]
        assert claim.value is not None
        value = claim.value(*runs)
        if isinstance(value, str):
            assert value == "gpipe, xpipe, pipedream_2bw"
            assert claim.value(runs[0] | {"loss": 9.0}, *runs[1:]) != value
        else:
            assert value <= 1e-3 < claim.value(runs[0] | {"loss_curve": [9.0] * 24}, runs[1])


def _as_record(row: dict[str, str]) -> dict[str, Any]:
    curve = [float(text) for text in row["loss_curve"].split(";")]
    return {"schedule": row["cell.schedule"], "loss": float(row["loss"]), "loss_curve": curve}
