"""Unequal: terms of a step whose sequences differ in length.

A search assumes microbatches of mean cost, each as large in memory as the largest; its plans are then timed with the
real lengths (`rpbench.commands.advising.advise_around`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil

from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.pieces import mean_times
from rpbench.cost.table import LayerTimes
from rpbench.mesh.layer_bytes import sizes_of
from rpbench.mesh.layers.layer_seconds import Setting
from rpbench.mesh.layers.layer_times import pipeline_setting, times_of
from rpbench.mesh.software import usual_software
from rpbench.plan.contest.terms import Terms


@dataclass(frozen=True)
class UnequalTerms(Terms):
    """Terms of sequences of unequal lengths."""

    lengths: tuple[int, ...] = ()  # tokens of every sequence of a step; microbatches take sequences in this order

    def tokens(self, sequences: float) -> int:
        """Mean tokens of so many sequences."""
        return round(sequences * sum(self.lengths) / len(self.lengths))


def dealt(lengths: Sequence[int], sequences: float) -> list[tuple[int, ...]]:
    """The lengths of the sequences in every microbatch of so many sequences; those that are cut are whole."""
    size = ceil(sequences)
    return [tuple(lengths[first : first + size]) for first in range(0, len(lengths), size)]


def weighted(lengths: Sequence[int]) -> int:
    """The length of equal sequences whose tokens attend to as many keys on average: the sum of squares over the sum."""
    return round(sum(length * length for length in lengths) / sum(lengths))


def with_lengths(terms: Terms, basis: Basis, lengths: Sequence[int]) -> UnequalTerms:
    """The same terms for sequences of unequal lengths, as many as a step has.

    Args:
        basis: of the terms.
    """
    kernels = usual_software(terms.cluster.measured)

    def setting(own: Sequence[int], part: float) -> Setting:
        model = replace(terms.model, seq_len=weighted(own))
        return pipeline_setting(model, terms.cluster, terms.num_devices, kernels, part * sum(own), basis)

    def timed(sequences: float) -> LayerTimes:
        each, part = dealt(lengths, sequences), sequences / ceil(sequences)
        known = {own: times_of(setting(own, part)) for own in dict.fromkeys(each)}
        return mean_times([known[own] for own in each])

    def sized(sequences: float) -> ModelBytes:
        largest = max(dealt(lengths, sequences), key=sum)
        part = sequences / ceil(sequences)
        return sizes_of(setting(largest, part), round(part * sum(largest)))

    given = {each.name: getattr(terms, each.name) for each in fields(terms) if not each.name.startswith("_")}
    return UnequalTerms(**(given | {"timed": timed, "sized": sized}), lengths=tuple(lengths))
