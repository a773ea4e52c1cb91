"""Important columns: those of a matrix whose gradients are largest, as masks over its elements.

Columns are those of the last dimension; what has one dimension only is important as a whole. Of equal columns the first
is taken.

Source: ZenFlow in DeepSpeed (runtime/zenflow), after a description of that code. How many columns a fraction is of a
small matrix (rounded down, at least one) is ours.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction

import torch

from rpbench.engine.state.gradient_sums.gradients import Place, Tensors
from rpbench.engine.state.ownership import Piece, take


def num_important(num_columns: int, topk: Fraction) -> int:
    """How many of a matrix's columns a fraction is."""
    return max(1, int(topk * num_columns)) if topk else 0


def important(gradient: torch.Tensor | None, like: torch.Tensor, topk: Fraction) -> torch.Tensor:
    """True where an element of a parameter is important, in the parameter's shape.

    Args:
        gradient: of all microbatches of a step; None: no microbatch used the parameter, all columns are equal.
        like: the parameter.
        topk: the fraction of the columns; 0: nothing is important, whatever its shape.
    """
    if like.dim() < 2 or not topk:
        return torch.full(like.shape, bool(topk), device=like.device)
    columns = like.shape[-1]
    sizes = torch.zeros(columns) if gradient is None else gradient.to(like.dtype).abs().reshape(-1, columns).sum(0)
    chosen = torch.argsort(sizes, descending=True, stable=True)[: num_important(columns, topk)]
    mask = torch.zeros(columns, dtype=torch.bool, device=like.device)
    mask[chosen] = True
    return mask.expand(like.shape).contiguous()


def none_of(tensors: Mapping[Place, torch.Tensor]) -> Tensors:
    """Masks of nothing."""
    return {place: torch.zeros(tensor.shape, dtype=torch.bool) for place, tensor in tensors.items()}


def of_pieces(masks: Tensors, pieces: Iterable[Piece] | None) -> Tensors:
    """The masks of what an owner has: flat pieces, or all."""
    return masks if pieces is None else take(masks, pieces)
