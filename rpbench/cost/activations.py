"""What a layer's forward leaves for the two halves of its backward, without recomputation."""

from typing import NamedTuple

from rpbench.workload.architecture import Architecture


class LayerActivations(NamedTuple):
    """Bytes of one microbatch in one layer.

    Args:
        whole: from F on.
        for_weights: the part that only W lets go; the rest goes at I.
    """

    whole: int
    for_weights: int


# Nothing is known of the layers: then nothing goes before W.
UNKNOWN = LayerActivations(1, 1)


def layer_activations(model: Architecture, num_tokens: int) -> LayerActivations:
    """Bytes a decoder layer of that hidden size, number of heads and sequence length keeps.

    34 B S H + 5 A B S^2 in all, 32 B S H of them for the weight gradients (B sequences of S tokens, H hidden, A heads).

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 2.1 (M_B and M_W), after Korthikanti et
    al., "Reducing Activation Recomputation in Large Transformer Models", MLSys'23, equation 1: 16 bits, attention
    scores kept, no tensor parallelism.
    """
    return LayerActivations(
        num_tokens * (34 * model.hidden + 5 * model.heads * model.seq_len), num_tokens * 32 * model.hidden
    )
