"""Everything the report shows, in its order, as far as the records go."""

from collections.abc import Callable

from analysis.exhibits.exhibit import Exhibit
from analysis.exhibits.figures import (
    atlas,
    calibrated,
    convergence,
    dispatch,
    duel,
    figure2,
    figure3,
    figure5,
    figure17,
    gains,
    goodput,
    hop_latency,
    predicted,
    predicted_curves,
    prediction,
    steady_state,
    systems,
    thousand_devices,
    timelines,
    tradeoff,
    tuning,
    turning,
    uneven_head,
    what_if,
)
from analysis.exhibits.tables import (
    blind_round,
    causal,
    comparison,
    contest,
    equivalence,
    kept_duels,
    plans,
    prediction_score,
    published_cells,
    published_runs,
    torch_duel,
)
from analysis.records.experiments import Experiments, MissingRuns

# Identity of an exhibit -> what makes it of the records; the order is that of the report.
_MAKERS: dict[str, Callable[[Experiments], Exhibit]] = {
    "figure17": figure17.exhibit,
    "published_cells": published_cells.exhibit,
    "steady_state": steady_state.exhibit,
    "causal": causal.exhibit,
    "figure3": figure3.exhibit,
    "tuning": tuning.exhibit,
    "lead": tuning.lead_exhibit,
    "gains": gains.exhibit,
    "plans": plans.exhibit,
    "dispatch": dispatch.exhibit,
    "tradeoff": tradeoff.exhibit,
    "hop_latency": hop_latency.exhibit,
    "thousand_devices": thousand_devices.exhibit,
    "uneven_head": uneven_head.exhibit,
    "turning": turning.exhibit,
    "goodput": goodput.exhibit,
    "duel": duel.exhibit,
    "calibrated": calibrated.exhibit,
    "torch_duel": torch_duel.exhibit,
    "equivalence": equivalence.exhibit,
    "figure10": comparison.simulated,
    "figure10_bars": published_runs.exhibit,
    "figure10_options": contest.exhibit,
    "baselines_cpu": comparison.measured,
    "prediction": prediction.exhibit,
    "convergence": convergence.exhibit,
    "figure2": figure2.exhibit,
    "figure5": figure5.exhibit,
    "figure10_published": systems.throughput,
    "figure11_published": systems.sequence_length,
    "cost": systems.cost,
    "figure10_predicted": predicted.figure10,
    "figure11_predicted": predicted.figure11,
    "prediction_bars": prediction_score.bars,
    "prediction_errors": prediction_score.errors,
    "prediction_misses": prediction_score.misses,
    "figure12_predicted": predicted.figure12,
    "figure13_predicted": predicted.figure13,
    "figure14_predicted": predicted_curves.cost,
    "figure15_predicted": predicted_curves.scaling,
    "figure16_predicted": predicted_curves.seqlen,
    "blind_round": blind_round.exhibit,
    "five_duels": kept_duels.five,
    "aa_duel": kept_duels.same,
    "what_if": what_if.exhibit,
    "atlas": atlas.exhibit,
    "timelines": timelines.exhibit,
}


def exhibits(experiments: Experiments) -> tuple[list[Exhibit], list[tuple[str, str]]]:
    """What can be made of the records, and (identity, what is missing) of the rest."""
    made, missing = [], []
    for name, maker in _MAKERS.items():
        try:
            made.append(maker(experiments))
        except MissingRuns as lack:
            missing.append((name, str(lack)))
    return made, missing
