"""Hold-outs of memory: traits are found again, a held-out row is not seen, tables say what their rows say."""

from dataclasses import replace
from statistics import median

import pytest

from analysis.predictions.clusters.fit import given
from analysis.predictions.clusters.memory_holdout import (
    PAGE,
    PARTS,
    TraitModel,
    fit_traits,
    table_text,
)
from analysis.predictions.tables import read

PART = {part.name: part for part in PARTS}


def test_traits_that_made_the_bytes_are_found_again():
    """Bytes made with a scale of 1.2 and a reserve of 5 GB, by the BLOOM search's rows of several sizes."""
    made = TraitModel(traits={"scale": 1.2, "reserve_bytes": 5e9})
    cases = [
        replace(case, memory_bytes=made.memory_bytes(case))
        for case in PART["BLOOM search"].cases()
        if case.memory_bytes
    ][::3]
    found = fit_traits(("scale", "reserve_bytes"), cases)
    assert found["scale"] == pytest.approx(1.2, rel=0.03)
    assert found["reserve_bytes"] == pytest.approx(5e9, rel=0.15)


def test_imbalance_is_fitted_where_routers_are_not_trained_alone():
    cases = PART["Megatron CI, experts"].cases()
    more, less = (TraitModel(traits={"imbalance": value}) for value in (1.6, 1.2))
    moved = [more.memory_bytes(case) > less.memory_bytes(case) for case in cases]
    trained = [case.job.software.constants["imbalance"] == 1.0 for case in cases]
    assert any(trained)
    assert moved == [not each for each in trained]


def test_every_printed_memory_of_a_part_is_held_out_once_an_axis():
    table = read("clusters_memory")
    for part in PARTS:
        ids = {case.id for case in part.cases()}
        rows = [row for row in table if row["part"] == part.name]
        assert {row["id"] for row in rows} == ids
        assert len(rows) == len(ids) * len(part.axes)


def test_a_held_out_row_is_predicted_without_what_it_printed():
    """SimuMax without its longest rows: the committed bytes are those of a fit on the others alone."""
    part = PART["SimuMax B200"]
    for row in read("clusters_memory"):
        if row["part"] == part.name and row["held_out"] == "length: 131072 tokens":
            seen = [case for case in part.cases() if case.job.seq_len != 131072]
            model = TraitModel(traits=fit_traits(part.traits, seen))
            (case,) = [case for case in part.cases() if case.id == row["id"]]
            assert f"{model.memory_bytes(case):.6g}" == row["predicted_bytes"]
            assert case.job.seq_len == 131072


def test_the_page_says_what_the_table_says():
    text = PAGE.read_text(encoding="utf-8")
    assert text.split("<!--clusters:memory-->\n")[1].split("<!--/clusters:memory-->\n")[0] == table_text(
        read("clusters_memory")
    )


def test_medians_are_those_of_the_rows_and_targets_are_met_or_reported():
    for part, line in zip(PARTS, table_text(read("clusters_memory")).splitlines()[2:], strict=True):
        rows = [row for row in read("clusters_memory") if row["part"] == part.name and row["memory_bytes"]]
        errors = [abs(float(row["predicted_bytes"]) / float(row["memory_bytes"]) - 1) for row in rows]
        held_out = float(line.split(" | ")[3].removesuffix(" %")) / 100
        assert held_out == pytest.approx(median(errors), abs=1e-3)
        assert part.target is None or median(errors) <= part.target


def test_no_run_of_the_bloom_search_that_fits_is_called_out_of_memory():
    rows = [row for row in read("clusters_memory") if row["part"] == "BLOOM search"]
    dead = {case.id for case in given(("bloom_a100_topologies",)) if case.verdict == "oom"}
    assert len(dead) == 4
    assert {row["id"] for row in rows if row["predicted_verdict"] == "oom"} == dead
