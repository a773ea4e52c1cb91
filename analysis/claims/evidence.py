"""The runs that claims stand on, named by experiment and by what their cell of its sweep sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Need:
    """One run of an experiment of `conf/experiment/`, by the choices its sweep makes.

    Args:
        contender: of a duel, whose cell leaves a record for each.
    """

    experiment: str
    choices: Mapping[str, str] = field(default_factory=dict, hash=False)
    contender: str | None = None

    @property
    def command(self) -> str:
        """The command that makes the run, and the rest of its experiment."""
        return f"python -m rpbench -m experiment={self.experiment}"

    def __str__(self) -> str:
        chosen = " ".join(filter(None, (*self.choices.values(), self.contender)))
        return f"experiment={self.experiment} ({chosen})"


def figure17(schedule: str, model: str) -> Need:
    """A cell of figure 17: published timings and partition, one call of 16 microbatches on 8 devices."""
    return Need("figure17", {"schedule": schedule, "model": model})


def causal(model: str) -> Need:
    """RoundPipe's cell with a fused stage that waits for its input."""
    return Need("causal", {"model": model})


def steady_state(model: str, num_microbatches: int) -> Need:
    """RoundPipe, 60 calls of this many microbatches back to back."""
    return Need("steady_state", {"model": model, "num_microbatches": str(num_microbatches)})


def steady_causal(model: str, num_microbatches: int) -> Need:
    """As `steady_state`, with a fused stage that waits for its input."""
    return Need("steady_causal", {"model": model, "num_microbatches": str(num_microbatches)})


def partitions(partition: str, schedule: str, model: str) -> Need:
    """A cell of figure 17 with a partition that is `even`, `greedy` or `search`."""
    return Need("partitions", {"partition": partition, "schedule": schedule, "model": model})


def recompute_ahead(schedule: str, model: str) -> Need:
    """A baseline on its searched partition that recomputes before the gradient arrives."""
    return Need("recompute_ahead", {"schedule": schedule, "model": model})


def hand_cuts() -> Need:
    """1F1B on Llama-3.1-8B with one layer less beside the head."""
    return Need("hand_cuts")


def roofline(convention: str, cluster: str, model: str) -> Need:
    """Closed forms of a model on a cluster, FLOPs counted as `artifact` or `corrected`."""
    return Need("roofline", {"mode.convention": convention, "cluster": cluster, "model": model})
