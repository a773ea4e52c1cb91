"""Bytes that a layer keeps of one microbatch for its backward, under any software.

16-bit values, T tokens (Korthikanti et al., arXiv 2205.05198, table 2, taken apart so that grouped keys, gates, latent
attention and experts fit in):

    inputs of both norms and of both blocks             8 h                 whole, or cut with sequence parallelism
    queries, keys, values, output of attention          2 (q + k + v + o)   cut over tensor shards
    what the MLP keeps                                  2 (3 f | 2 f)       cut over tensor shards
    masks of dropout                                    2 h
    scores of unfused attention                         5 a s               cut over tensor shards

Eager kernels keep more of it (`EagerKernels.kept_bytes`).
"""

from rpbench.mesh.layers.layer_seconds import Setting, eager_kernels
from rpbench.workload.parts import Layer


def layer_bytes(setting: Setting, layer: Layer) -> float:
    """Bytes one layer keeps of one microbatch, if nothing but attention's scores is made again."""
    if setting.software.kernels in ("eager", "fused"):
        return eager_kernels(setting).kept_bytes()
    own, software = setting.architecture, setting.software
    keys = own.heads if own.latent else own.key_value_heads
    attention = own.heads * (own.score_dim + own.value_dim) + keys * (own.score_dim + own.value_dim)
    cut, whole = 2.0 * attention, (8.0 + 2.0 * (own.dropout > 0)) * own.hidden
    if own.latent:
        whole += 2.0 * (own.latent.query_rank + own.latent.key_value_rank + own.latent.rotary_dim) * 2
    copies = 3.0 if own.gated else 2.0
    if layer.routed and own.experts:
        busiest = own.experts.active * software.constants["imbalance"]
        cut += 2.0 * copies * (busiest * own.experts.inner + own.experts.shared_inner)
        cut += 4.0 * busiest * own.hidden
    else:
        cut += 2.0 * copies * own.inner
    if software.attention == "unfused" and setting.recompute != "selective":
        cut += (5.0 if own.dropout else 2.0) * own.heads * setting.seq_len
    return setting.tokens * (whole / setting.spread + cut / setting.mesh.tensor)


def mean_layer_bytes(setting: Setting) -> float:
    """The mean over a model's layers; layers that predict further tokens are in it."""
    own = setting.architecture
    kinds = {kind: layer_bytes(setting, kind) for kind in dict.fromkeys(own.layers)}
    return sum(kinds[kind] for kind in own.layers) / own.num_layers
