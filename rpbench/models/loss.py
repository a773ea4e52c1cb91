"""Cross-entropy of a large vocabulary without all its logits: one chunk of tokens at a time.

8,192 tokens and 152,000 words make 2.5 GB of logits in 16 bits, and several times that with their gradient. Here the
logits of a chunk live until their part of the gradient has been added, during the forward.
"""

from typing import Any

import torch

CHUNK_TOKENS = 4096


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int = CHUNK_TOKENS
) -> torch.Tensor:
    """Mean cross-entropy of `hidden @ weight.T` against `labels`, a scalar of at least float32.

    `hidden` is (N, H), `weight` (V, H), `labels` (N,). Raises ValueError without tokens, for `chunk_tokens` below 1, or
    if `hidden` and `labels` differ in length.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: a chunk holds at least 1 token")
    if labels.shape != hidden.shape[:1] or not len(labels):
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, labels are {tuple(labels.shape)}: give (N, H) and (N,), N at least 1"
        )
    total: torch.Tensor = _SummedLoss.apply(hidden, weight, labels, chunk_tokens, torch.is_grad_enabled())
    return total / len(labels)


class _SummedLoss(torch.autograd.Function):
    """Sum of the tokens' losses; its gradients are computed in forward and scaled in backward.

    Gradients of the mean might be too small for fp16.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int, with_grad: bool
    ) -> torch.Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: torch.Tensor | None = None
        total = hidden.new_zeros((), dtype=exact)
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            column = labels[chunk].unsqueeze(1)
            logits = (hidden[chunk] @ weight.T).to(exact)  # (C, V)
            logits.sub_(logits.amax(-1, keepdim=True))
            of_label = logits.gather(1, column)
            mass = logits.exp_().sum(-1, keepdim=True)
            total += (mass.log() - of_label).sum()
            if not needs_hidden and not needs_weight:
                continue
            logits.div_(mass)  # now the probabilities
            logits.scatter_add_(1, column, torch.full_like(mass, -1.0))  # and now d loss / d logits
            gradients = logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradients, weight, out=grad_hidden[chunk])
            if needs_weight:
                grad_weight = add_product(grad_weight, gradients.T, hidden[chunk], exact)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (scale,) = grad_outputs
        return (
            None if grad_hidden is None else grad_hidden * scale,
            None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def add_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """total + left @ right, in place if there is a `total`; `dtype` may be wider than that of the factors."""
    if total is None:
        return (left @ right).to(dtype)
    return total.addmm_(left, right) if dtype == left.dtype else total.add_(left @ right)
