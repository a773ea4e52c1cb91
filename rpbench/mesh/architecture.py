"""Architecture: a decoder-only transformer, layer by layer, as parallel training needs to see it.

Beside what `rpbench.cost.model.Model` knows: latent attention, any pattern of sliding windows, shared experts, first
layers without experts, layers that predict further tokens, learned positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from rpbench.cost.device import CONF, names, read
from rpbench.cost.model import Model
from rpbench.registry import unknown_name


@dataclass(frozen=True)
class Experts:
    """Experts of a layer.

    Args:
        total, active: experts a layer has, and those a token visits.
        inner: inner width of one expert.
        shared_inner: inner widths of all shared experts together; 0 for none.
        node_limit: nodes that the experts of one token may stand on, by routing; 0 for any number.
    """

    total: int
    active: int
    inner: int
    shared_inner: int = 0
    node_limit: int = 0

    def __post_init__(self) -> None:
        _check_sizes("experts", self, optional=("shared_inner", "node_limit"))
        if self.active > self.total:
            raise ValueError(f"experts.active={self.active}: a token cannot visit more than all {self.total} experts")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Args:
        query_rank, key_value_rank: widths that queries, and keys with values, are squeezed to; query_rank 0: not.
        plain_dim, rotary_dim: widths of a query's part without and with rotary positions.
        value_dim: width of a head's value.
    """

    query_rank: int
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _check_sizes("latent", self, optional=("query_rank",))


class Layer(NamedTuple):
    """A kind of layer: with experts or not, and the keys a query sees (None: all before it)."""

    routed: bool
    window: int | None


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer.

    Args:
        key_value_heads, head_dim, inner: as in `rpbench.cost.model.Model`; None: heads, hidden / heads, 4 hidden.
        gated: three matrices in an MLP instead of two.
        tied: embedding and output matrix are one.
        num_dense_layers: first layers without experts.
        windows: keys a query sees, in turn over the layers; empty or None for all.
        learned_positions: rows of a table of positions; 0 for rotary or none.
        num_prediction_layers: layers that predict further tokens, each with a pass through the head.
        dropout: whether masks are kept.
        biases: whether linear maps have one.

    Raises:
        ValueError: for a size below 1 or sizes that contradict each other.
    """

    name: str
    num_layers: int
    hidden: int
    heads: int
    vocab: int
    key_value_heads: int = 0
    head_dim: int = 0
    inner: int = 0
    gated: bool = True
    tied: bool = False
    experts: Experts | None = None
    num_dense_layers: int = 0
    latent: Latent | None = None
    windows: tuple[int | None, ...] = ()
    learned_positions: int = 0
    num_prediction_layers: int = 0
    dropout: bool = False
    biases: bool = False

    def __post_init__(self) -> None:
        names = ("num_layers", "hidden", "heads", "vocab")
        for name in (*names, "key_value_heads", "head_dim", "inner", "num_dense_layers"):
            value = getattr(self, name)
            if type(value) is not int or value < (name in names):
                raise ValueError(f"architecture.{name}={value!r}: a size is a whole number of at least 1")
        if not self.head_dim and self.latent is None and self.hidden % self.heads:
            raise ValueError(
                f"architecture.heads={self.heads} does not divide hidden={self.hidden}; give head_dim as well"
            )
        derived = {
            "key_value_heads": self.key_value_heads or self.heads,
            "head_dim": self.head_dim or self.hidden // self.heads,
            "inner": self.inner or 4 * self.hidden,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if self.heads % self.key_value_heads:
            raise ValueError(f"key_value_heads={self.key_value_heads} does not divide heads={self.heads}")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(f"num_dense_layers={self.num_dense_layers} of num_layers={self.num_layers}")

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, in order; prediction layers come last."""
        windows = self.windows or (None,)
        kinds = [
            Layer(self.experts is not None and number >= self.num_dense_layers, windows[number % len(windows)])
            for number in range(self.num_layers)
        ]
        return (*kinds, *(kinds[-1],) * self.num_prediction_layers)

    @property
    def score_dim(self) -> int:
        """Width of a head's query in the product with the keys."""
        return self.head_dim if self.latent is None else self.latent.plain_dim + self.latent.rotary_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    def attention_maps(self) -> tuple[tuple[int, int, bool, bool], ...]:
        """(inputs, outputs, inputs are cut, outputs are cut) of attention's linear maps, for tensor parallelism."""
        h, a = self.hidden, self.heads
        out = (a * self.value_dim, h, True, False)
        if self.latent is None:
            return (h, (a + 2 * self.key_value_heads) * self.head_dim, False, True), out
        own = self.latent
        squeezed = (
            [(h, own.query_rank, False, False), (own.query_rank, a * self.score_dim, False, True)]
            if own.query_rank
            else [(h, a * self.score_dim, False, True)]
        )
        keys = (
            (h, own.key_value_rank + own.rotary_dim, False, False),
            (own.key_value_rank, a * (own.plain_dim + own.value_dim), False, True),
        )
        return (*squeezed, *keys, out)

    def mlp_maps(self, inner: int) -> tuple[tuple[int, int, bool, bool], ...]:
        """The linear maps of an MLP of that inner width; gate and up are one product."""
        return (self.hidden, (1 + self.gated) * inner, False, True), (inner, self.hidden, True, False)

    def dense_parameters(self, layer: Layer) -> int:
        """Parameters of a layer apart from its routed experts."""
        maps = list(self.attention_maps())
        if not layer.routed:
            maps += self.mlp_maps(self.inner)
        elif self.experts and self.experts.shared_inner:
            maps += self.mlp_maps(self.experts.shared_inner)
        router = self.hidden * self.experts.total if layer.routed and self.experts else 0
        biases = sum(outputs for _, outputs, _, _ in maps) if self.biases else 0
        return sum(inputs * outputs for inputs, outputs, _, _ in maps) + router + biases + 2 * self.hidden

    def expert_parameters(self, layer: Layer) -> int:
        """Parameters of all routed experts of a layer."""
        if not (layer.routed and self.experts):
            return 0
        return self.experts.total * sum(i * o for i, o, _, _ in self.mlp_maps(self.experts.inner))

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, positions included."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the output matrix, tied or not."""
        return self.vocab * self.hidden

    @property
    def total_parameters(self) -> int:
        """Parameters of the model; a tied matrix counts once."""
        layers = sum(self.dense_parameters(each) + self.expert_parameters(each) for each in self.layers)
        return layers + self.embedding_parameters + (0 if self.tied else self.head_parameters) + self.hidden

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward of one token: products and causal attention, no recomputation."""
        found = 0.0
        for layer in self.layers:
            maps = [i * o for i, o, _, _ in self.attention_maps()]
            widths = [self.inner] if not layer.routed or self.experts is None else [self.experts.shared_inner]
            if layer.routed and self.experts is not None:
                widths += [self.experts.inner] * self.experts.active
                maps.append(self.hidden * self.experts.total)
            maps += [i * o for inner in widths for i, o, _, _ in self.mlp_maps(inner)]
            keys = mean_keys(seq_len, layer.window)
            found += 6 * sum(maps) + 6 * self.heads * (self.score_dim + self.value_dim) * keys
        return found + 6 * self.head_parameters * (1 + self.num_prediction_layers)


def mean_keys(seq_len: int, window: int | None) -> float:
    """Keys a query sees under a causal mask, as a mean over a sequence."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def from_model(model: Model) -> Architecture:
    """The architecture of a model of `conf/model/`.

    Raises:
        ValueError: for LoRA, whose step this package does not time.
    """
    if model.lora_rank is not None:
        raise ValueError(f"model {model.name}: lora under a mesh is not modelled; take training_mode=full")
    experts = (
        Experts(model.experts_total, model.experts_active, model.intermediate) if model.experts_total > 1 else None
    )
    return Architecture(
        model.name,
        model.num_layers,
        model.hidden,
        model.heads,
        model.vocab,
        model.kv_heads,
        model.head_dim,
        model.intermediate,
        model.gated_mlp,
        model.tied_embedding,
        experts,
        windows=() if model.sliding_window is None else (model.sliding_window, None),
        dropout=model.dropout > 0,
        biases=model.biases,
    )


def from_mapping(values: Mapping[str, Any]) -> Architecture:
    """The architecture of a YAML file with the fields of `Architecture`.

    Raises:
        ValueError: naming a field that is not known.
    """
    unknown = set(values) - set(Architecture.__dataclass_fields__)
    if unknown:
        raise ValueError(
            f"architecture has no field {sorted(unknown)[0]!r}; known: {', '.join(Architecture.__dataclass_fields__)}"
        )
    given = dict(values)
    if given.get("experts"):
        given["experts"] = Experts(**given["experts"])
    if given.get("latent"):
        given["latent"] = Latent(**given["latent"])
    given["windows"] = tuple(given.get("windows") or ())
    return Architecture(**given)


@cache
def architecture(name: str) -> Architecture:
    """The architecture of `conf/architecture/<name>.yaml`.

    Raises:
        ValueError: for an unknown name, with the nearest.
    """
    known = names("architecture")
    if name not in known:
        raise ValueError(unknown_name("architecture", name, known))
    return from_mapping(read(CONF / "architecture" / f"{name}.yaml"))


def _check_sizes(what: str, sizes: object, optional: tuple[str, ...]) -> None:
    for name, value in vars(sizes).items():
        if type(value) is not int or value < (name not in optional):
            raise ValueError(f"{what}.{name}={value!r}: a size is a whole number of at least 1")
