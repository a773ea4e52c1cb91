"""The sealed predictions beside what came out: the score as it was stated, and that the seal holds."""

import hashlib
from statistics import median

import pytest

from analysis.predictions import outcomes
from analysis.predictions.outcomes import SEALED, Outcome, coverage, verdicts

# First digits of the tables' SHA-256, as committed before the measurements were seen.
SEAL = {
    "throughput": "61038061317070c4",
    "max_seq_len": "813a08be9a3ba01c",
    "scaling": "aa260c67ec7084d8",
    "seqlen_sensitivity": "582578eaa077fbfb",
    "cost_efficiency": "13fe9af63de581dd",
}


@pytest.mark.parametrize("name", SEAL)
def test_sealed_tables_stay_as_they_were_committed(name):
    assert hashlib.sha256((SEALED / f"{name}.csv").read_bytes()).hexdigest()[:16] == SEAL[name]


@pytest.fixture(scope="module")
def sealed():
    return outcomes.outcomes()


def _errors(found, name):
    return next(group for group in outcomes.GROUPS if group.name == name).errors(found)


def test_the_sealed_score_is_the_one_that_was_stated(sealed):
    """RoundPipe dense within 7.5 %, scaling 24 of 24 within 6 %, lengths of sequences 8 of 8 within 8.3 %; medians."""
    assert round(_errors(sealed, "RoundPipe on A800, dense")[-1], 3) == 0.075
    dense = _errors(sealed, "scaling, dense")
    assert len(dense) == 24
    assert dense[-1] < 0.06
    lengths = _errors(sealed, "sequence lengths")
    assert len(lengths) == 8
    assert round(lengths[-1], 3) == 0.083
    assert round(median(_errors(sealed, "baselines on A800")), 2) == 0.11
    assert round(median(_errors(sealed, "longest sequences on A800")), 2) == 0.11
    assert verdicts(sealed, "throughput") == (33, 35)
    assert verdicts(sealed, "max_seq_len") == (28, 30)
    assert coverage(sealed, ("throughput",)) == (18, 28)  # 19 of 29 with the library's second run of one cell


def test_misses_are_the_ones_that_were_stated(sealed):
    found = {
        (cell.system, cell.model): cell.error
        for cell in sealed
        if cell.table == "throughput" and cell.error is not None
    }
    stated = {
        ("roundpipe", "gpt-oss-20b"): -0.25,
        ("roundpipe", "qwen3-235b-lora"): -0.16,
        ("fsdp", "gpt-oss-20b"): 0.36,
        ("fsdp", "qwen3-32b"): 0.64,
        ("megatron-tp", "gpt-oss-20b"): 0.37,
        ("megatron-pp", "llama-3.1-8b"): -0.30,
    }
    for cell, error in stated.items():
        assert found[cell] == pytest.approx(error, abs=0.006)
    assert 1 + found["megatron-pp", "qwen3-235b-lora"] > 7  # seven times too fast


def test_a_measurement_outside_its_interval_counts_as_outside():
    cell = Outcome("throughput", "fsdp", "qwen3-32b", "8", 12.0, 11.0, 13.0, 10.0, "ok", "ok")
    assert cell.error == pytest.approx(0.2)
    assert cell.inside is False
    failed = Outcome("throughput", "fsdp", "qwen3-32b", "8", 12.0, 11.0, 13.0, None, "ok", "OOM")
    assert failed.error is failed.inside is None
    assert coverage([cell, failed]) == (0, 1)
    assert verdicts([cell, failed], "throughput") == (1, 2)


def test_the_present_tables_are_no_worse_where_the_model_was_changed():
    before, after = (outcomes.outcomes(folder) for folder in (outcomes.SEALED, outcomes.FOLDER))
    for name in ("RoundPipe on A800, dense", "RoundPipe on A800, experts", "scaling, experts"):
        assert median(_errors(after, name)) < median(_errors(before, name))
        assert _errors(after, name)[-1] < _errors(before, name)[-1]
