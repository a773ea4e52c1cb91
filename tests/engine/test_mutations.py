"""Whatever is changed in a schedule's text, it is refused or it trains as plain training does."""

import random
from collections import Counter

import pytest
from judging import judged
from mutations import mutants
from schedule_texts import FORMS, LOWERED, text_of

from rpbench.registry import entries

NUM_CHUNKS = 20


def faults(seed: int, number: int) -> tuple[Counter[str], list[str]]:
    """How many of some mutants came to which end, and those that came to a bad one, with their texts."""
    counts, found = Counter[str](), list[str]()
    for place, (name, text) in enumerate(mutants(seed, number)):
        verdict = judged(text, random.Random(1_000_000 * seed + place))
        counts[verdict.what] += 1
        if verdict.what not in ("refused", "same"):
            found.append(f"{name}: {verdict.what} ({seed}, {place}): {verdict.detail}\n{text}")
        if verdict.what == "refused" and not 0 < len(verdict.detail.splitlines()) <= 9:
            found.append(f"{name}: refused in so many words ({seed}, {place}): {verdict.detail}\n{text}")
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
    rng, verdicts = random.Random(0), {}
    for name in entries():
        for form in (*FORMS, LOWERED):
            try:
                text = text_of(name, form, rng)
            except ValueError:
                continue
            verdicts[name, form] = judged(text, rng)
    assert {verdict.what for verdict in verdicts.values()} <= {"same", "refused"}, verdicts
    for (name, form), verdict in verdicts.items():
        bare = name == "zenflow" and form not in ("plain", LOWERED)  # no host that steps the rest
        if (
            form in ("plain", "steps", LOWERED) and not bare
        ):  # communication may be lowered into a circle, and is refused
            assert verdict.what == "same", (name, form, verdict)
