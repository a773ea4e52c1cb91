"""Parts of a transformer: experts, latent attention, kinds of layers, linear maps."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Experts:
    """Experts of a layer.

    Args:
        total, active: experts a layer has, and those a token visits.
        inner: inner width of one expert.
        shared_inner: inner widths of all shared experts together; 0 for none.
        node_limit: nodes that the experts of one token may stand on, by routing; 0 for any number.

    Raises:
        ValueError: for a size below 1, or more active experts than there are.
    """

    total: int
    active: int
    inner: int
    shared_inner: int = 0
    node_limit: int = 0

    def __post_init__(self) -> None:
        check_sizes("experts", self, optional=("shared_inner", "node_limit"))
        if self.active > self.total:
            raise ValueError(
                f"model.experts.active={self.active}: a token cannot visit more experts than "
                f"model.experts.total={self.total}; lower the first or raise the second"
            )


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Args:
        query_rank, key_value_rank: widths that queries, and keys with values, are squeezed to; query_rank 0: not.
        plain_dim, rotary_dim: widths of a query's part without and with rotary positions.
        value_dim: width of a head's value.

    Raises:
        ValueError: for a size below 1.
    """

    query_rank: int
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        check_sizes("latent", self, optional=("query_rank",))


class Layer(NamedTuple):
    """A kind of layer: with experts or not, and the keys a query sees (None: all before it)."""

    routed: bool
    window: int | None


class Linear(NamedTuple):
    """Equal linear maps of one layer.

    Args:
        part: what they belong to.
        matrices: how many there are of this shape.
        visits: those of them that a token meets.
        name: as adapters are told where to stand (PEFT's `target_modules`).
    """

    part: Literal["attention", "mlp", "experts", "router"]
    inputs: int
    outputs: int
    matrices: int = 1
    visits: int = 1
    name: str = ""


def mean_keys(seq_len: int, window: int | None) -> float:
    """Keys a query sees under a causal mask, as a mean over a sequence: of min(position, window), counted from 1."""
    window = seq_len if window is None else min(window, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def check_sizes(what: str, sizes: object, optional: tuple[str, ...]) -> None:
    """Refuse sizes that are no whole numbers of at least 1; those in `optional` may be 0."""
    for name, value in vars(sizes).items():
        if type(value) is not int or value < (name not in optional):
            raise ValueError(f"model.{what}.{name}={value!r:.60}: a size is a whole number of at least 1")
