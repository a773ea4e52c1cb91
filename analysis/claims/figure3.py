"""Figure 3: the ideal bubble of interleaved schedules, and how far above it the simulated ones stay."""

from collections.abc import Iterator

from analysis.claims.claim import Claim, Record, section
from analysis.claims.evidence import figure17, roofline
from analysis.claims.printed import Printed, printed
from analysis.exhibits.style import method_name, model_name
from analysis.records.paper import PUBLISHED_MODELS

_ABOVE = Printed("above", "RoundPipe, section 2.3: real interleaved schedules stay above the ideal bubble")


@section(70, "Figure 3: ideal and simulated bubbles", "RoundPipe, figure 3 (section 2.3)")
def claims() -> Iterator[Claim]:
    """The ideal of each model, and both looped schedules above it."""
    for model, name in PUBLISHED_MODELS.items():
        yield Claim(
            id=f"figure3/{model}/ideal",
            statement=f"{model_name(model)}: bubble of an interleaved pipeline of equal layers, 16 microbatches",
            metric="ideal bubble",
            unit="%",
            published=printed("figure3", "ideal_bubble_percent", model=name),
            evidence="derived",
            needs=(roofline("artifact", "8x_rtx4090", model),),
            value=lambda run: 100 * run["ideal_bubble"],
        )
    for model in PUBLISHED_MODELS:
        for schedule in ("interleaved_1f1b", "looped_bfs"):
            yield Claim(
                id=f"figure3/{model}/{schedule}_above_ideal",
                statement=f"{method_name(schedule)} on {model_name(model)} simulates above the ideal bubble",
                metric="simulated against ideal bubble",
                published=_ABOVE,
                needs=(figure17(schedule, model), roofline("artifact", "8x_rtx4090", model)),
                value=_against_ideal,
            )


def _against_ideal(run: Record, ideal: Record) -> str:
    return "above" if run["bubble_makespan"] > ideal["ideal_bubble"] else "not above"
