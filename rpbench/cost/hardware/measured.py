"""Constants of `cost=analytic` for one machine: the names in its `measured`.

They replace the numbers of `conf/software/`, which are for any machine. Calibration sets all but `expert_pass_s`, the
seconds of an expert's launches, and sets `engine_issues_ahead` on accelerators only.
"""

from collections.abc import Iterable

TERMS = ("layer", "products", "traffic", "weights")

# Parts of the engine's work -> the terms of each; `rpbench.mesh.layers.engine_kernels` says what the terms count.
PARTS: dict[str, tuple[str, ...]] = {
    "forward": ("layer", "products", "traffic"),
    "recompute": ("layer", "products", "traffic"),  # with graph
    "backward": ("layer", "products", "traffic", "weights"),
    "head_forward": ("layer", "products", "traffic", "weights"),
    "head_backward": ("layer", "weights"),
    "embedding_forward": ("layer",),
    "embedding_backward": ("layer", "weights"),
    "step": ("layer", "weights"),
    "head_step": ("layer", "weights"),
    "embedding_step": ("layer", "weights"),
}


def factor_name(part: str, term: str) -> str:
    """The constant with a part's factor on one term; it has seconds for the term `layer`."""
    return f"engine_{part}_{term}" + ("_s" if term == "layer" else "")


# Seconds of each half of a split backward over those of a whole one. The first half includes the cost of the split, in
# the recomputation too; together they are more than 1.
HALVES = ("engine_input_grad_share", "engine_weight_grad_share")
FACTORS = tuple(factor_name(part, term) for part, terms in PARTS.items() for term in terms)
# 1 where the host issues work ahead of an accelerator: the time to issue a layer overlaps with the layer's own work.
ISSUES_AHEAD = "engine_issues_ahead"
ON_HOST = ("step", "head_step", "embedding_step")  # parts that run on the host, not on an accelerator
CALIBRATED = ("half_rate_width", *FACTORS, *HALVES)
MEASURED = ("expert_pass_s", ISSUES_AHEAD, *CALIBRATED)


def has_engine(names: Iterable[str]) -> bool:
    """Whether any of these constants is a factor of the engine."""
    return not set(FACTORS).isdisjoint(names)
