"""Asynchronous RoundPipe as it would run: calls back to back, the rotation carried on."""

from collections.abc import Iterator

from analysis.claims.claim import Claim, section
from analysis.claims.evidence import steady_state
from analysis.claims.printed import cell, rows
from analysis.exhibits.style import model_name
from analysis.records.paper import PUBLISHED_MODELS

# A hundredth of a percentage point: the last digit of the reference simulation, which is not the paper's.
_ONE_UNIT = 0.01


@section(20, "Asynchronous steps, simulated back to back")
def claims() -> Iterator[Claim]:
    """Twenty values of an independent simulation: five models, calls of 8, 9, 10 and 16 microbatches."""
    for model, name in PUBLISHED_MODELS.items():
        for row in rows("async_bubble", model=name, kind="simulated"):
            num_microbatches = int(row["num_microbatches_per_call"])
            yield Claim(
                id=f"steady_state/{model}/{num_microbatches}",
                whose="another public source's",
                source="independent simulation of the artifact's model, 60 calls; the paper shows no such number",
                statement=(
                    f"RoundPipe on {model_name(model)}: bubble between the ends of calls 20 and 50, "
                    f"{num_microbatches} microbatches a call"
                ),
                metric="bubble between the ends of calls",
                unit="%",
                published=cell("async_bubble", "bubble_percent", row, f"{name}, {num_microbatches} microbatches"),
                wide_tolerance=_ONE_UNIT,
                needs=(steady_state(model, num_microbatches),),
                value=lambda run: 100 * run["bubble_between_ends"],
            )
