"""Measured: constants of `cost=analytic` that a machine has for itself, by their names in its `measured`.

Calibration sets all but `expert_pass_s`, the interpreter's launches for an expert, which differ between platforms, and
sets `engine_issues_ahead` on accelerators alone. They come before the numbers of `conf/software/`, which hold for any
machine.
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
    """The constant that holds a part's factor on one term; seconds for the term `layer`."""
    return f"engine_{part}_{term}" + ("_s" if term == "layer" else "")


# Seconds of each half of a split backward over those of a whole one. The first half includes the cost of putting the
# second off, in the recomputation too; together they are more than 1.
HALVES = ("engine_input_grad_share", "engine_weight_grad_share")
FACTORS = tuple(factor_name(part, term) for part, terms in PARTS.items() for term in terms)
# 1 where the host issues work ahead of an accelerator: the time to issue a layer hides behind the layer's own work.
ISSUES_AHEAD = "engine_issues_ahead"
ON_HOST = ("step", "head_step", "embedding_step")  # parts that run on the host, not on an accelerator
CALIBRATED = ("half_rate_width", *FACTORS, *HALVES)
MEASURED = ("expert_pass_s", ISSUES_AHEAD, *CALIBRATED)


def has_engine(names: Iterable[str]) -> bool:
    """Whether any of these constants is about the engine."""
    return not set(FACTORS).isdisjoint(names)
