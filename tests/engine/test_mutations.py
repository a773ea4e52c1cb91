"""Whatever is changed in a schedule's text, it is refused or it trains as plain training does."""

import random
from collections import Counter

import pytest
from judging import judged
from mutations import bases, mutants

NUM_CHUNKS = 20


def faults(seed: int, number: int) -> tuple[Counter[str], list[str]]:
    """How many of some mutants came to which end, and those that came to a bad one, with their texts."""
    counts, found, rng = Counter[str](), list[str](), random.Random(seed)
    for name, text in mutants(seed, number):
        verdict = judged(text, rng)
        counts[verdict.what] += 1
        if verdict.what not in ("refused", "same"):
            found.append(f"{name}: {verdict.what}: {verdict.detail}\n{text}")
        if verdict.what == "refused" and not 0 < len(verdict.detail.splitlines()) <= 9:
            found.append(f"{name}: refused in so many words: {verdict.detail}\n{text}")
    return counts, found


def test_a_sample_of_mutants_is_refused_or_right():
    counts, found = faults(seed=12, number=70)
    assert not found, "\n".join(found)
    assert counts["same"] >= 10
    assert counts["refused"] >= 30


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_ten_thousand_mutants_are_refused_or_right(chunk):
    counts, found = faults(seed=1000 + chunk, number=10_000 // NUM_CHUNKS)
    assert not found, "\n".join(found)
    assert counts["same"] >= 50


@pytest.mark.slow
def test_what_is_mutated_is_refused_or_right_as_it_is():
    """The texts that the mutants are made of: a registered schedule in a form that its passes make."""
    verdicts = {name: judged(text, random.Random(0)) for name, text in bases().items()}
    assert {verdict.what for verdict in verdicts.values()} <= {"same", "refused"}, verdicts
    for name, verdict in verdicts.items():
        bare = name.startswith("zenflow") and not name.endswith((" plain", " lowered"))  # no host that steps the rest
        if name.endswith((" plain", " steps", " lowered", " sent")) and not bare:
            assert verdict.what == "same", (name, verdict)
