"""Bytes that a layer keeps of one microbatch for its backward, under any software.

16-bit values, T tokens (Korthikanti et al., arXiv 2205.05198, table 2, taken apart so that grouped keys, gates, latent
attention and experts fit in):

    inputs of both norms and of both blocks             8 h                 whole, or cut with sequence parallelism
    attention's heads and the MLP's inner values        2 (2 q + 2 kv + 3 f | 2 f)  cut over tensor shards
    narrow queries and keys of latent attention         4 (widths)          whole, or cut with sequence parallelism
    what goes into experts and comes out                4 h a visit         cut over tensor shards
    masks of dropout                                    2 h
    scores of unfused attention                         5 a s               cut over tensor shards

The first two rows are those of figure 2 of RoundPipe (`Counts.kept_values`). Eager kernels keep more
(`EagerKernels.kept_bytes`).
"""

from dataclasses import replace
from typing import Any

from rpbench.cost.footprint.sizes import ModelBytes, model_bytes
from rpbench.mesh.layers.layer_seconds import Setting, eager_kernels, padded_vocab
from rpbench.workload.counts import BYTES_PER_VALUE, Layer

WEIGHT_SHARE = 0.55  # fraction of a layer's activations that the gradient of the weights still needs


def layer_bytes(setting: Setting, layer: Layer) -> float:
    """Bytes one layer keeps of one microbatch, if at most attention's scores are recomputed."""
    if setting.software.kernels in ("eager", "fused"):
        return eager_kernels(setting).kept_bytes()
    own, software = setting.architecture, setting.software
    inner, visits = float(own.inner), 0.0
    if layer.routed and own.experts:
        visits = own.experts.active * software.constants["imbalance"]  # of the busiest experts
        inner = visits * own.experts.inner + own.experts.shared_inner
    whole, cut = (float(BYTES_PER_VALUE) * values for values in own.kept_values(inner))
    whole += 2.0 * (own.dropout > 0) * own.hidden
    cut += 4.0 * visits * own.hidden
    if own.latent:
        whole += 2.0 * (own.latent.query_rank + own.latent.key_value_rank + own.latent.rotary_dim) * 2
    if software.attention == "unfused" and setting.recompute != "selective":
        cut += (5.0 if own.dropout else 2.0) * own.heads * setting.seq_len
    return setting.microbatch_tokens * (whole / setting.spread + cut / setting.mesh.tensor)


def input_bytes(setting: Setting) -> float:
    """Bytes of a layer's input, for one microbatch."""
    return float(BYTES_PER_VALUE) * setting.microbatch_tokens * setting.architecture.hidden / setting.spread


def working_bytes(setting: Setting) -> float:
    """Bytes of the further buffers that a backward needs."""
    return 8.0 * setting.microbatch_tokens * setting.architecture.hidden


def logits_bytes(setting: Setting) -> float:
    """Bytes of the logits of one microbatch, from its forward to the end of its backward."""
    return setting.software.logit_bytes * setting.microbatch_tokens * padded_vocab(setting) / setting.mesh.tensor


def with_software(sizes: ModelBytes, setting: Setting) -> ModelBytes:
    """The sizes with the software's logits, buffers and activations held until W.

    Of the logits, W needs the gradient, in 16 bits.
    """
    found: dict[str, Any] = {"logits": logits_bytes(setting), "working": working_bytes(setting)}
    until = min(1.0, BYTES_PER_VALUE / setting.software.logit_bytes)
    tied = setting.architecture.tied
    return replace(sizes, **found, until_weights=WEIGHT_SHARE, logits_until_weights=until, tied=tied)


def sizes_of(setting: Setting, num_tokens: int) -> ModelBytes:
    """Sizes of a model on one host, in bytes, under the setting's software.

    All layers have the mean size, which includes the layers that predict further tokens. Kernels that are not tiled
    keep gradients in 16 bits and a whole layer until W, and recompute a stage from its input.
    """
    own, software = setting.architecture, setting.software
    kinds = {kind: layer_bytes(setting, kind) for kind in dict.fromkeys(own.layers)}
    kept = sum(kinds[kind] for kind in own.layers) / own.num_layers
    if software.kernels != "tiled":
        return model_bytes(own, num_tokens, kept)
    found = with_software(model_bytes(replace(own, vocab=padded_vocab(setting)), num_tokens, kept), setting)
    inputs = round(input_bytes(setting))
    layers = tuple(layer._replace(inputs=inputs * (layer.activations > 0)) for layer in found.layers)
    found = replace(found, logits=round(found.logits), working=round(found.working), layers=layers)
    return replace(found, summed_bytes=software.accumulate_bytes, reduced_bytes=software.gradient_bytes)
