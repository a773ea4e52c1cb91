"""Closed forms of memory in arrays: bytes of the fullest device of all plans of a search at once.

The forms are those of `rpbench.mesh.memory`, with layers as their mean where kinds differ, and with the textbook's
microbatches in flight instead of those of the order itself.
"""

from typing import Any, NamedTuple

import numpy as np

from rpbench.cost.footprint.sizes import LAYERS_GATHERED
from rpbench.mesh.parameters import states_of
from rpbench.mesh.plan_search.plans import SHARED, Floats, Plans
from rpbench.mesh.software import Software

Columns = dict[str, Floats]


class RankLayers(NamedTuple):
    """Layers of ranks as `split_evenly` deals them, larger stages in the middle: of the fullest, the first, the last.

    Args:
        fullest_rank: the first of those with most layers.
    """

    most: Floats
    first: Floats
    last: Floats
    fullest_rank: Floats


def rank_layers(layers: int, p: Floats, v: Floats) -> RankLayers:
    """The layers of the ranks of plans with p ranks and v chunks, each with one of the stages in turn."""
    base, extra = np.floor(layers / (p * v)), layers % (p * v)
    begin = np.floor((p * v - extra + 1) / 2)  # the first larger stage; the others follow it
    end, over = begin + extra, extra % p

    def larger(rank: Floats) -> Floats:
        found: Floats = np.floor((end - 1 - rank) / p) - np.floor((begin - 1 - rank) / p)
        return found

    around = (over == 0) | (begin % p + over > p)
    return RankLayers(
        base * v + np.ceil(extra / p),
        base * v + larger(np.zeros_like(p)),
        base * v + larger(p - 1),
        np.where(around, 0.0, begin % p),
    )


def end_matrices(tied: bool, p: Floats) -> Floats:
    """Matrices of embedding and head on an end of a pipeline: one, or two where it is both ends and they differ."""
    return np.where(p == 1, 1.0 if tied else 2.0, 1.0)


def peak_bytes(
    software: Software,
    tied: bool,
    plans: Plans,
    columns: Columns,
    ranks: RankLayers,
    p: Floats,
    v: Floats,
    m: Floats,
    n: Floats,
) -> Floats:
    """Bytes of the first rank, of the first of those with most layers, or of the last, whichever has most."""
    names = np.array(plans.schedules)[plans.schedule]
    alone = p == 1
    ends = columns["matrix"] * end_matrices(tied, p)
    of_loss = columns["logits"] + np.where(names == "gpipe", m - 1, 0.0) * columns["logits_waiting"]
    found = np.zeros_like(p)
    for rank, layers, matrix, logits in (
        (np.zeros_like(p), ranks.first, ends, alone),
        (ranks.fullest_rank, ranks.most, np.where(ranks.fullest_rank % (p - 1 + alone) == 0, ends, 0.0), alone),
        (p - 1, ranks.last, ends, True),
    ):
        held = _states_bytes(software, plans, columns, layers, matrix, n)
        held += _in_flight(names, rank, p, v, m) * layers * columns["kept"] + columns["working"]
        found = np.maximum(found, held + np.where(logits, of_loss, 0.0))
    return found


def _in_flight(names: "np.ndarray[Any, Any]", rank: Floats, p: Floats, v: Floats, m: Floats) -> Floats:
    """Microbatches whose activations a rank keeps, in the usual closed forms."""
    found = np.minimum(m, p - rank)
    found = np.where(names == "interleaved_1f1b", np.minimum(m, p + (p - 1 - 2 * rank) / v), found)
    found = np.where(names == "zb_h2", np.minimum(m, np.maximum(1.0, 2 * (p - rank) - 1)), found)
    return np.where(names == "gpipe", m, found)


def expert_shards(columns: Columns, replicas: Floats) -> Floats:
    """Devices that share the states of an expert; as `Mesh.expert_shard_group`."""
    found: Floats = np.maximum(1.0, np.minimum(replicas, replicas * columns["tensor"] / columns["expert"]))
    return found


def _states_bytes(
    software: Software, plans: Plans, columns: Columns, layers: Floats, matrix: Floats, n: Floats
) -> Floats:
    """Bytes of weights, gradients and optimizer of ranks with that many layers."""
    others = expert_shards(columns, n)
    found = np.zeros_like(n)
    for size, shards in ((columns["dense"] * layers + matrix, n), (columns["experts"] * layers, others)):
        parts = [sum(states_of(software, what, size, size / shards)) for what in SHARED]
        found = found + np.select([plans.shared == number for number in range(len(SHARED))], parts)
    layer = columns["dense"] + columns["experts"]
    gathered = np.where(plans.shared == SHARED.index("parameters"), 2.0 * LAYERS_GATHERED * layer, 0.0)
    scattered = np.where(plans.shared >= SHARED.index("gradients"), software.accumulate_bytes * layer, 0.0)
    whole: Floats = found + gathered + scattered
    return whole
