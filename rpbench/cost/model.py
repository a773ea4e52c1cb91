"""Model: what a decoder-only transformer weighs and computes, counted from its shape.

Counts are per decoder layer, for the head, and for the whole model. FLOPs and activations come in three
conventions, because published numbers use the first, which is wrong where the heads do not add up to hidden:

    artifact    heads * head_dim taken as hidden; attention over all `seq_len` keys; no router
    corrected   the true width of the heads; otherwise as above
    causal      the true width, and only the keys that a causal mask and a sliding window leave

Source: theoretical analysis in the artifact of RoundPipe (arXiv 2604.27085) for the first convention.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from rpbench.finite import is_finite

Convention = Literal["artifact", "corrected", "causal"]
CONVENTIONS: tuple[Convention, ...] = ("artifact", "corrected", "causal")

Family = Literal["gpt", "llama", "qwen3", "gpt_oss"]
FAMILIES: tuple[Family, ...] = get_args(Family)

BYTES_PER_VALUE = 2  # fp16 and bf16
MOST_LAYERS = 1000  # of DeepNet, the deepest transformer that was trained (Wang et al., arXiv 2203.00555)

_SIZES = ("num_layers", "hidden", "heads", "vocab", "experts_total", "experts_active", "seq_len")
_OPTIONAL_SIZES = ("kv_heads", "head_dim", "intermediate", "sliding_window", "lora_rank", "context", "batch_sequences")

FROM_THE_OTHERS: Any = None  # the value of a size that follows from the others when it is not given


@dataclass(frozen=True)
class Model:
    """The shape of a transformer, and how it is trained.

    Args:
        name: as in `conf/model/`.
        hidden: width of the residual stream.
        vocab: rows of the embedding and of the head.
        kv_heads: heads of keys and values; as many as `heads` if None.
        head_dim: width of one head; hidden / heads if None.
        intermediate: inner width of the MLP, or of one expert; 4 * hidden if None.
        gated_mlp: three matrices (gate, up, down) instead of two.
        experts_total, experts_active: experts a layer has, and those a token visits; no router if 1 and 1.
        tied_embedding: embedding and head share one matrix.
        sliding_window: keys a query sees in every other layer, from the first layer on; None for all.
        seq_len: tokens of one sequence.
        context: longest sequence its positions are made for; None for no limit.
        batch_sequences: sequences of an optimizer step in the run scripts of its source; None where there are none.
        qk_norm, biases, attention_sinks: small parameters: norms of queries and keys; a bias on every linear
            map of a layer; one number a head.
        training_mode: `full`, or `lora` with adapters of rank `lora_rank` on every linear map of every layer.
        published_name: its name in `analysis/published/`, None for a model without published numbers.
        family: whose activation and rotary scaling the modules use (`rpbench/models/family.py`).
        rope_theta: base of the rotary wavelengths.
        norm_eps: what a norm adds to the mean square.
        dropout: share of the embedding's and of every block's output that training sets to 0.

    Raises:
        ValueError: for a size below 1, heads that do not divide, an unknown family, a number out of its range,
            or options that contradict each other.
    """

    name: str
    num_layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = FROM_THE_OTHERS
    head_dim: int = FROM_THE_OTHERS
    intermediate: int = FROM_THE_OTHERS
    gated_mlp: bool = True
    experts_total: int = 1
    experts_active: int = 1
    tied_embedding: bool = False
    sliding_window: int | None = None
    seq_len: int = 2048
    context: int | None = None
    batch_sequences: int | None = None
    qk_norm: bool = False
    biases: bool = False
    attention_sinks: bool = False
    training_mode: Literal["full", "lora"] = "full"
    lora_rank: int | None = None
    published_name: str | None = None
    family: Family = "gpt"
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_numbers(self)
        derived = {"kv_heads": self.heads, "head_dim": _head_dim(self), "intermediate": 4 * self.hidden}
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check_options(self)

    @property
    def q_dim(self) -> int:
        """Width of all queries of one token; differs from `hidden` in many models."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys, or of all values, of one token."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, adapters of `lora` apart."""
        maps = self._linear_maps()
        weights = sum(count * inputs * outputs for count, inputs, outputs in maps)
        biases = sum(count * outputs for count, _, outputs in maps) if self.biases else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return weights + biases + norms + (self.heads if self.attention_sinks else 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters the last stage holds besides its layers: final norm and output matrix, shared or not."""
        return self.hidden + self.vocab * self.hidden

    @property
    def total_parameters(self) -> int:
        """Parameters of the whole model; a shared output matrix counts once, adapters of `lora` do not."""
        ends = self.head_parameters + (0 if self.tied_embedding else self.embedding_parameters)
        return self.num_layers * self.layer_parameters + ends

    @property
    def trainable_layer_parameters(self) -> int:
        """Parameters of one layer that get a gradient: all of them, or the adapters alone.

        An adapter of rank r on a linear map from n to m values adds r * (n + m) parameters.
        """
        if self.lora_rank is None:
            return self.layer_parameters
        widths = sum(count * (inputs + outputs) for count, inputs, outputs in self._linear_maps())
        return self.lora_rank * widths

    @property
    def trainable_parameters(self) -> int:
        """Parameters of the whole model that get a gradient."""
        if self.lora_rank is None:
            return self.total_parameters
        return self.num_layers * self.trainable_layer_parameters

    def layer_forward_flops(self, num_tokens: int, convention: Convention = "corrected") -> float:
        """FLOPs of one layer's forward: matrices and attention, the router apart."""
        q_dim, _ = self._widths(convention)
        attention = 4 * num_tokens * q_dim * self.keys_per_query(convention)
        return 2 * num_tokens * self.layer_matrix_weights(self.experts_active, convention) + attention

    def router_forward_flops(self, num_tokens: int) -> int:
        """FLOPs of one layer's choice of experts, 0 without experts."""
        return 2 * num_tokens * self.hidden * self.experts_total if self.experts_total > 1 else 0

    def head_forward_flops(self, num_tokens: int) -> int:
        """FLOPs of the output matrix."""
        return 2 * num_tokens * self.hidden * self.vocab

    def forward_flops(self, num_tokens: int, convention: Convention = "corrected") -> float:
        """FLOPs of the whole forward, head included, routers apart."""
        layers = self.num_layers * self.layer_forward_flops(num_tokens, convention)
        return layers + self.head_forward_flops(num_tokens)

    def layer_matrix_weights(self, num_experts: int, convention: Convention = "corrected") -> float:
        """Weights of one layer's attention matrices and of `num_experts` experts: no router, bias or norm."""
        q_dim, kv_dim = self._widths(convention)
        return self.hidden * (2 * q_dim + 2 * kv_dim + num_experts * self._mlp_matrices * self.intermediate)

    def keys_per_query(self, convention: Convention = "corrected") -> float:
        """Keys a query is compared with, as a mean over the sequence and over the layers."""
        if convention != "causal":
            return self.seq_len
        everything = _mean_causal_keys(self.seq_len, self.seq_len)
        if self.sliding_window is None:
            return everything
        num_windowed = (self.num_layers + 1) // 2
        windowed = _mean_causal_keys(self.seq_len, self.sliding_window)
        return everything + (windowed - everything) * num_windowed / self.num_layers

    def layer_activation_bytes(self, num_tokens: int, convention: Convention = "corrected") -> float:
        """Bytes one layer's forward keeps for its backward when nothing is recomputed.

        Inputs of both norms and of both blocks (4 hidden), queries and attention output (2 q_dim), keys and
        values (2 kv_dim), and what the MLP keeps of each active expert (3 intermediate, 2 without a gate).

        Source: figure 2 of RoundPipe counts 6 hidden for the first six; that two of them have the width of
        the heads is our reading.
        """
        q_dim, kv_dim = self._widths(convention)
        mlp = self.experts_active * self._mlp_matrices * self.intermediate
        return BYTES_PER_VALUE * num_tokens * (4 * self.hidden + 2 * q_dim + 2 * kv_dim + mlp)

    def boundary_bytes(self, num_tokens: int) -> int:
        """Bytes that pass from one stage to the next."""
        return BYTES_PER_VALUE * num_tokens * self.hidden

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.gated_mlp else 2

    def _widths(self, convention: Convention) -> tuple[float, float]:
        """Widths of the queries and of the keys of one token."""
        if convention == "artifact":
            return self.hidden, self.hidden * self.kv_heads / self.heads
        return self.q_dim, self.kv_dim

    def _linear_maps(self) -> list[tuple[int, int, int]]:
        """(count, inputs, outputs) of every linear map of one layer."""
        h, q, kv, inner = self.hidden, self.q_dim, self.kv_dim, self.intermediate
        attention = [(1, h, q), (2, h, kv), (1, q, h)]
        router = [(1, h, self.experts_total)] if self.experts_total > 1 else []
        experts = [(self.experts_total * (self._mlp_matrices - 1), h, inner), (self.experts_total, inner, h)]
        return attention + router + experts


def _mean_causal_keys(seq_len: int, window: int) -> float:
    """Mean over a sequence of min(position, window), positions counted from 1."""
    window = min(window, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def _check_sizes(model: Model) -> None:
    for name in _SIZES + _OPTIONAL_SIZES:
        value = getattr(model, name)
        if value is None and name in _OPTIONAL_SIZES:
            continue
        if type(value) is not int or value < 1:
            way_out = ", or null to leave it out" if name in _OPTIONAL_SIZES else ""
            raise ValueError(f"model.{name}={value!r:.60}: a size is a whole number of at least 1{way_out}")
    if model.num_layers > MOST_LAYERS:
        raise ValueError(f"model.num_layers={model.num_layers}: at most {MOST_LAYERS:,}; the deepest that was trained")


def _check_numbers(model: Model) -> None:
    rules = {
        "rope_theta": ("a finite number above 1, e.g. 10000", lambda x: x > 1),
        "norm_eps": ("a finite number above 0, e.g. 1e-5", lambda x: x > 0),
        "dropout": ("a share of at least 0 and below 1, e.g. 0.1", lambda x: 0 <= x < 1),
    }
    for name, (rule, holds) in rules.items():
        value = getattr(model, name)
        if not is_finite(value) or not holds(value):
            raise ValueError(f"model.{name}={value!r}: {rule}")


def _head_dim(model: Model) -> int:
    given: int | None = model.head_dim
    if given is None and model.hidden % model.heads:
        raise ValueError(
            f"model.heads={model.heads} does not divide model.hidden={model.hidden}; "
            "give the width of a head as well: model.head_dim"
        )
    return given or model.hidden // model.heads


def _check_options(model: Model) -> None:
    if model.heads % model.kv_heads:
        raise ValueError(
            f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; "
            f"every key head serves equally many query heads; try model.kv_heads={model.heads}"
        )
    if model.experts_active > model.experts_total:
        raise ValueError(
            f"model.experts_active={model.experts_active}: a token cannot visit more experts than "
            f"model.experts_total={model.experts_total}; lower the first or raise the second"
        )
    if model.context is not None and model.seq_len > model.context:
        raise ValueError(
            f"model.seq_len={model.seq_len}: {model.name} has positions for {model.context} tokens; "
            "take shorter sequences, or lift the limit with model.context=null"
        )
    if model.family not in FAMILIES:
        raise ValueError(f"model.family={model.family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    if model.training_mode not in ("full", "lora"):
        raise ValueError(f"model.training_mode={model.training_mode!r} is unknown; choose full or lora")
    if (model.training_mode == "lora") != (model.lora_rank is not None):
        raise ValueError(
            f"model.training_mode={model.training_mode} with model.lora_rank={model.lora_rank}: "
            "lora needs a rank, full takes none; set both, e.g. training_mode=lora lora_rank=32"
        )
