"""Counts: the parts of a decoder-only transformer, and what it weighs and computes, counted from its shape.

Counts are per decoder layer, for the head, and for the whole model. Where layers differ, those of "a layer" are the
mean over them, so that `num_layers` times the mean is right; layers that predict further tokens are in it. FLOPs and
activations come in three conventions, because published numbers use the first, which is wrong where the heads do not
add up to hidden:

    artifact    heads * head_dim taken as hidden; attention over all `seq_len` keys; no router
    corrected   the true width of the heads; otherwise as above
    causal      the true width, and only the keys that a causal mask and a sliding window leave

Source: theoretical analysis in the artifact of RoundPipe (arXiv 2604.27085) for the first convention.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar


@dataclass(frozen=True)
class Experts:
    """Experts of a layer; ValueError for a size below 1, or more active experts than there are."""

    total: int
    active: int  # experts that a token visits
    inner: int  # inner width of one expert
    shared_inner: int = 0  # inner widths of all shared experts together; 0 for none
    node_limit: int = 0  # nodes that the experts of one token may stand on, by routing; 0 for any number

    def __post_init__(self) -> None:
        check_sizes("experts", self, optional=("shared_inner", "node_limit"))
        if self.active > self.total:
            raise ValueError(
                f"model.experts.active={self.active}: a token cannot visit more experts than "
                f"model.experts.total={self.total}; lower the first or raise the second"
            )


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); ValueError for a size below 1."""

    query_rank: int  # width that queries are compressed to; 0: they are not
    key_value_rank: int  # width that keys and values together are compressed to
    plain_dim: int  # width of a query's part without rotary positions
    rotary_dim: int  # width of its part with them
    value_dim: int  # width of a head's value

    def __post_init__(self) -> None:
        check_sizes("latent", self, optional=("query_rank",))


class Layer(NamedTuple):
    """A kind of layer: with experts or not, and the keys a query sees (None: all before it)."""

    routed: bool
    window: int | None


class Linear(NamedTuple):
    """Equal linear maps of one layer."""

    part: Literal["attention", "mlp", "experts", "router"]  # what they belong to
    inputs: int
    outputs: int
    matrices: int = 1  # how many there are of this shape
    visits: int = 1  # those of them that a token meets
    name: str = ""  # as adapters are told where to stand (PEFT's `target_modules`)


def mean_keys(seq_len: int, window: int | None) -> float:
    """Keys a query sees under a causal mask, as a mean over a sequence: of min(position, window), counted from 1."""
    window = seq_len if window is None else min(window, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def _joined(maps: list[Linear], name: str) -> list[Linear]:
    """Linear maps with those that are fused as one, in the first one's place; routed experts keep theirs."""
    parts = [each for each in maps if each.name in FUSED[name] and each.part != "experts"]
    if not parts:
        return maps
    one = parts[0]._replace(outputs=sum(each.outputs for each in parts), name=name)
    return [one if each is parts[0] else each for each in maps if each is parts[0] or each not in parts]


def check_sizes(what: str, sizes: object, optional: tuple[str, ...]) -> None:
    """Raise ValueError unless sizes are whole numbers of at least 1; those in `optional` may be 0."""
    for name, value in vars(sizes).items():
        if type(value) is not int or value < (name not in optional):
            raise ValueError(f"model.{what}.{name}={value!r:.60}: a size is a whole number of at least 1")


N = TypeVar("N", int, float)
Convention = Literal["artifact", "corrected", "causal"]
CONVENTIONS: tuple[Convention, ...] = ("artifact", "corrected", "causal")

BYTES_PER_VALUE = 2  # fp16 and bf16
# A frozen value of QLoRA: 4 bits, and 0.127 for the constants of its block, themselves quantised (arXiv 2305.14314,
# section 3).
BYTES_PER_FROZEN = (4 + 0.127) / 8


# Maps of the same input that some families have as one.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

FROM_THE_OTHERS: Any = None  # the value of a size that follows from the others when it is not given
Family = Literal["gpt", "llama", "qwen3", "gpt_oss"]


@dataclass(frozen=True)
class Counts:
    """The fields of an `Architecture`, and the counts that follow from them."""

    name: str  # as in `conf/model/`
    num_layers: int
    hidden: int  # width of the residual stream
    heads: int
    vocab: int  # rows of the embedding and of the head
    key_value_heads: int = FROM_THE_OTHERS  # heads of keys and values; as many as `heads` if None
    head_dim: int = FROM_THE_OTHERS  # width of one head; hidden / heads if None
    inner: int = FROM_THE_OTHERS  # inner width of an MLP; 4 * hidden if None; that of an expert is in `experts`
    gated: bool = True  # three matrices in an MLP (gate, up, down) instead of two
    tied: bool = False  # embedding and output matrix are one
    experts: Experts | None = None
    num_dense_layers: int = 0  # first layers without experts
    latent: Latent | None = None
    windows: tuple[int | None, ...] = ()  # keys a query sees, in turn over the layers; empty or None for all
    learned_positions: int = 0  # rows of a table of positions; 0 for rotary or none
    num_prediction_layers: int = 0  # layers that predict further tokens, each with a pass through the head
    dropout: float = 0.0  # share of the embedding's and of every block's output that training sets to 0
    biases: bool = False  # a bias on every linear map of a layer
    qk_norm: bool = False  # norms of queries and keys
    attention_sinks: bool = False  # one number a head
    # outputs of attention's maps besides queries, keys and values, as a mean over the layers: a gate on its output, or
    # the further maps of linear attention
    attention_gate: int = 0
    fused: tuple[str, ...] = ()  # linear maps that are one, as an adapter sees them: qkv_proj, gate_up_proj
    # parameters besides matrices, where a family has others than the flags say (norms, biases of some maps, sinks)
    layer_vectors: int | None = None  # of a layer; None: two norms, and what the flags say
    end_vectors: int | None = None  # of both ends; None: a final norm
    seq_len: int = 2048  # tokens of one sequence
    context: int | None = None  # longest sequence its positions are made for; None for no limit
    # sequences of an optimizer step in the run scripts of its source; None where there are none
    batch_sequences: int | None = None
    # lora: adapters beside frozen weights; qlora: these in 4 bits
    training_mode: Literal["full", "lora", "qlora"] = "full"
    lora_rank: int | None = None  # of the adapters
    # linear maps with an adapter, as PEFT names those of a Llama (`q_proj`), or `attention`, `mlp`; empty: all
    lora_targets: tuple[str, ...] = ()
    # the first layers, which are not trained, nor is the embedding below them unless the head shares it: no gradients,
    # no optimizer state, and no backward through them
    frozen_layers: int = 0
    optimizer_bits: int = 32  # of each of Adam's two moments; 8 are block-wise, with the embedding's in 32
    published_name: str | None = None  # its name in `analysis/published/`, None for a model without published numbers
    family: Family = "gpt"  # whose activation and rotary scaling the modules use (`rpbench/models/layers.py`)
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # what a norm adds to the mean square

    # --- shape -----------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, in order; prediction layers come last."""
        windows = self.windows or (None,)
        kinds = [
            Layer(self.experts is not None and number >= self.num_dense_layers, windows[number % len(windows)])
            for number in range(self.num_layers)
        ]
        return (*kinds, *(kinds[-1],) * self.num_prediction_layers)

    @cached_property
    def kinds(self) -> dict[bool, float]:
        """Whether layers have experts -> their number over `num_layers`; {kind: 1.0} if all are of one kind."""
        found = Counter(layer.routed for layer in self.layers)
        return {routed: count / self.num_layers for routed, count in found.items()}

    @property
    def score_dim(self) -> int:
        """Width of a head's query in the product with the keys."""
        return self.head_dim if self.latent is None else self.latent.plain_dim + self.latent.rotary_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def q_dim(self) -> int:
        """Width of all queries of one token, as a mean of queries and outputs; differs from `hidden` in many models."""
        return self.heads * (self.score_dim + self.value_dim) // 2

    @property
    def kv_dim(self) -> int:
        """Width of all keys, or of all values, of one token, as a mean of both."""
        key_value_heads = self.heads if self.latent else self.key_value_heads
        return key_value_heads * (self.score_dim + self.value_dim) // 2

    @property
    def expert_visits(self) -> float:
        """Routed experts that a token visits in a layer; 0 without experts."""
        return self.experts.active * self.kinds[True] if self.experts and True in self.kinds else 0.0

    @cached_property
    def inner_visits(self) -> float:
        """Sum of the inner widths that a token visits in a layer's MLP and experts."""
        return self._mean(lambda routed: sum(width * visits for width, visits, _ in self._widths_inside(routed)))

    @cached_property
    def inner_at_once(self) -> float:
        """Inner width of a token held at one time where a layer's experts run one after another."""
        return max(
            width * (visits / count) for routed in self.kinds for width, visits, count in self._widths_inside(routed)
        )

    def linear_maps(self, routed: bool) -> list[Linear]:
        """Every linear map of a layer with or without experts."""
        found = [Linear("attention", inputs, outputs, name=name) for name, inputs, outputs in self._attention_widths()]
        for inner, visits, count in self._widths_inside(routed):
            part: Literal["mlp", "experts"] = "mlp" if count == 1 else "experts"
            into = ("gate_proj", "up_proj")[not self.gated :]
            found += [Linear(part, self.hidden, inner, count, visits, name) for name in into]
            found.append(Linear(part, inner, self.hidden, count, visits, "down_proj"))
        if routed and self.experts:
            found.append(Linear("router", self.hidden, self.experts.total, name="router"))
        for name in self.fused:
            found = _joined(found, name)
        return found

    def attention_maps(self) -> tuple[tuple[int, int, bool, bool], ...]:
        """(inputs, outputs, inputs are cut, outputs are cut) of attention's fused products, for tensor parallelism."""
        h, a = self.hidden, self.heads
        if self.latent is None:
            fused = (a + 2 * self.key_value_heads) * self.head_dim + self.attention_gate
            return (h, fused, False, True), (a * self.head_dim, h, True, False)
        own, scores = self.latent, a * self.score_dim
        queries = (
            ((h, own.query_rank, False, False), (own.query_rank, scores, False, True))
            if own.query_rank
            else ((h, scores, False, True),)
        )
        keys = (
            (h, own.key_value_rank + own.rotary_dim, False, False),
            (own.key_value_rank, a * (own.plain_dim + own.value_dim), False, True),
        )
        return (*queries, *keys, (a * self.value_dim, h, True, False))

    def mlp_maps(self, inner: int) -> tuple[tuple[int, int, bool, bool], ...]:
        """`attention_maps` for an MLP of that inner width; gate and up are one product."""
        return (self.hidden, (1 + self.gated) * inner, False, True), (inner, self.hidden, True, False)

    # --- parameters ------------------------------------------------------------------------------------------

    def dense_parameters(self, layer: Layer) -> int:
        """Parameters of a layer without its routed experts and adapters."""
        vectors = self.layer_vectors
        if vectors is None:
            norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
            vectors = norms + (self.heads if self.attention_sinks else 0)
        return self._weights(each for each in self.linear_maps(layer.routed) if each.part != "experts") + vectors

    def expert_parameters(self, layer: Layer) -> int:
        """Parameters of all routed experts of a layer."""
        return self._weights(each for each in self.linear_maps(layer.routed) if each.part == "experts")

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer without adapters."""
        return round(self._mean(lambda routed: self._parameters(Layer(routed, None))))

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, positions included."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the last stage besides its layers: final norm and output matrix, shared or not."""
        return self._end_vectors + self.vocab * self.hidden

    @cached_property
    def total_parameters(self) -> int:
        """Parameters of the whole model; a shared output matrix counts once, adapters of `lora` do not."""
        return (
            sum(map(self._parameters, self.layers))
            + self.embedding_parameters
            + self._end_vectors
            + (0 if self.tied else self.vocab * self.hidden)
        )

    @property
    def trainable_layer_parameters(self) -> int:
        """Parameters of one layer that get a gradient: all of them, or the adapters alone.

        An adapter of rank r on a linear map from n to m values adds r * (n + m) parameters.
        """
        if self.lora_rank is None:
            return self.layer_parameters
        widths = self._mean(
            lambda routed: sum(m.matrices * (m.inputs + m.outputs) for m in self.linear_maps(routed) if self.adapted(m))
        )
        return round(self.lora_rank * widths)

    def adapted(self, each: Linear) -> bool:
        """Whether an adapter stands beside a linear map."""
        if self.lora_rank is None:
            return False
        group = {"attention": "attention", "mlp": "mlp", "experts": "mlp"}.get(each.part, "")
        return not self.lora_targets or bool({"all", each.name, group} & set(self.lora_targets))

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of one layer's weights, adapters apart: 16 bits each, and 4 of a frozen map under `qlora`."""
        if self.training_mode != "qlora":
            return BYTES_PER_VALUE * self.layer_parameters
        maps = self._mean(
            lambda routed: sum(
                m.matrices * m.inputs * m.outputs for m in self.linear_maps(routed) if m.part != "router"
            )
        )
        return round(BYTES_PER_VALUE * (self.layer_parameters - maps) + BYTES_PER_FROZEN * maps)

    @property
    def trainable_parameters(self) -> int:
        """Parameters of the whole model that get a gradient."""
        if self.lora_rank is None:
            below = 0 if self.trains_embedding else self.embedding_parameters
            return self.total_parameters - below - sum(map(self._parameters, self.layers[: self.frozen_layers]))
        return self.num_layers * self.trainable_layer_parameters

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding gets a gradient: from the layers above it, or from a head that shares it."""
        return self.lora_rank is None and (self.frozen_layers == 0 or self.tied)

    # --- FLOPs -----------------------------------------------------------------------------------------------

    def layer_forward_flops(self, num_tokens: float, convention: Convention = "corrected") -> float:
        """FLOPs of one layer's forward: matrices and attention without the router."""
        q_dim, _ = self._widths(convention)
        attention = 4 * num_tokens * q_dim * self.keys_per_query(convention)
        return 2 * num_tokens * self.layer_matrix_weights(None, convention) + attention

    def router_forward_flops(self, num_tokens: int) -> float:
        """FLOPs of one layer's choice of experts, 0 without experts."""
        total = self.experts.total if self.experts else 0
        return self._mean(lambda routed: 2 * num_tokens * self.hidden * total * routed)

    def head_forward_flops(self, num_tokens: int) -> int:
        """FLOPs of the output matrix, for predictions of further tokens as well."""
        return 2 * num_tokens * self.hidden * self.vocab * (1 + self.num_prediction_layers)

    def forward_flops(self, num_tokens: int, convention: Convention = "corrected") -> float:
        """FLOPs of the whole forward, head included, routers apart."""
        layers = self.num_layers * self.layer_forward_flops(num_tokens, convention)
        return layers + self.head_forward_flops(num_tokens)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward of one token: products, routers included, and causal attention."""
        found = 0.0
        for layer in self.layers:
            weights = sum(each.visits * each.inputs * each.outputs for each in self.linear_maps(layer.routed))
            found += 6 * weights + 12 * self.q_dim * mean_keys(seq_len, layer.window)
        return found + 3 * self.head_forward_flops(1)

    def layer_matrix_weights(self, num_experts: int | None, convention: Convention = "corrected") -> float:
        """Weights of one layer's attention, MLP and `num_experts` routed experts (None: those that a token visits),
        without router, biases and norms.
        """

        def of_kind(routed: bool) -> float:
            inside = 0
            for width, visits, count in self._widths_inside(routed):
                inside += (visits if count == 1 or num_experts is None else num_experts) * (2 + self.gated) * width
            if self.latent is not None:
                return sum(i * o for _, i, o in self._attention_widths()) + self.hidden * inside
            q_dim, kv_dim = self._widths(convention)
            return self.hidden * (2 * q_dim + 2 * kv_dim + self.attention_gate + inside)

        return self._mean(of_kind)

    def keys_per_query(self, convention: Convention = "corrected") -> float:
        """Keys a query is compared with, as a mean over the sequence and over the layers."""
        if convention != "causal":
            return self.seq_len * len(self.layers) / self.num_layers if self.num_prediction_layers else self.seq_len
        everything = mean_keys(self.seq_len, None)
        found = everything * (len(self.layers) / self.num_layers)
        for window, count in Counter(layer.window for layer in self.layers).items():
            found += (mean_keys(self.seq_len, window) - everything) * count / self.num_layers
        return found

    # --- bytes -----------------------------------------------------------------------------------------------

    def layer_activation_bytes(self, num_tokens: int, convention: Convention = "corrected") -> float:
        """Bytes one layer's forward keeps for its backward when nothing is recomputed.

        Inputs of both norms and of both blocks (4 hidden), queries and attention output (2 q_dim), keys and
        values (2 kv_dim), and what the MLP keeps of each active expert (3 inner, 2 without a gate).

        Source: figure 2 of RoundPipe counts 6 hidden for the first six; that two of them have the width of
        the heads is our reading.
        """
        return BYTES_PER_VALUE * num_tokens * sum(self.kept_values(self.inner_visits, convention))

    def kept_values(self, inner: float, convention: Convention = "corrected") -> tuple[float, float]:
        """Values that a layer keeps of one token: as wide as the stream, and as wide as heads and MLP."""
        q_dim, kv_dim = self._widths(convention)
        return 4 * self.hidden, 2 * q_dim + 2 * kv_dim + (2 + self.gated) * inner

    def boundary_bytes(self, num_tokens: N) -> N:
        """Bytes that pass from one stage to the next."""
        return BYTES_PER_VALUE * num_tokens * self.hidden

    # --- helpers ---------------------------------------------------------------------------------------------

    def _mean(self, of_kind: Callable[[bool], float]) -> float:
        """The mean over the layers of a quantity that depends on whether a layer has experts."""
        if len(self.kinds) == 1 and not self.num_prediction_layers:
            return of_kind(*self.kinds)
        return sum(part * of_kind(routed) for routed, part in self.kinds.items())

    def _parameters(self, layer: Layer) -> int:
        return self.dense_parameters(layer) + self.expert_parameters(layer)

    def _weights(self, maps: Iterator[Linear]) -> int:
        """Parameters of linear maps, each with its bias if there are any."""
        return sum(each.matrices * each.outputs * (each.inputs + self.biases) for each in maps)

    def _widths(self, convention: Convention) -> tuple[float, float]:
        if convention == "artifact":
            return self.hidden, self.hidden * self.key_value_heads / self.heads
        return self.q_dim, self.kv_dim

    def _widths_inside(self, routed: bool) -> list[tuple[int, int, int]]:
        """(inner width, how many of them a token visits, how many there are) of a layer's MLP or experts."""
        if not (routed and self.experts):
            return [(self.inner, 1, 1)]
        shared = [(self.experts.shared_inner, 1, 1)] if self.experts.shared_inner else []
        return [*shared, (self.experts.inner, self.experts.active, self.experts.total)]

    def _attention_widths(self) -> list[tuple[str, int, int]]:
        """(name, inputs, outputs) of attention's linear maps, none of them fused."""
        if self.latent is not None:
            queries_by = ("q_a_proj", "q_b_proj") if self.latent.query_rank else ("q_proj",)
            names = (*queries_by, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
            return [(name, each[0], each[1]) for name, each in zip(names, self.attention_maps(), strict=True)]
        h, queries, keys = self.hidden, self.heads * self.head_dim, self.key_value_heads * self.head_dim
        found = [("q_proj", h, queries), ("k_proj", h, keys), ("v_proj", h, keys), ("o_proj", queries, h)]
        return [*found, ("gate", h, self.attention_gate)] if self.attention_gate else found

    @property
    def _end_vectors(self) -> int:
        return self.hidden if self.end_vectors is None else self.end_vectors
