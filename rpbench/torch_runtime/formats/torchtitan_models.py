"""torchtitan's models: which of them a plan is for, by the parts of a layer and the sizes.

A module (`--module qwen3`) has the parts: norms of queries and keys are Qwen3's, Llama 3's has none. A flavour has the
sizes, and a function in `config_registry.py` (`--config qwen3_1_7b`) starts one; where there is none it has to be
written first.

Source: torchtitan 0.3.0, `models/llama3` and `models/qwen3` (`__init__.py`, `config_registry.py`), and
`models/common/decoder.py`, which refuses a tied head under a pipeline.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rpbench.workload.architecture import Architecture


class Flavor(NamedTuple):
    """Sizes that torchtitan has; `config` is the function that starts them, empty where there is none."""

    name: str
    num_layers: int
    hidden: int
    heads: int
    key_value_heads: int
    vocab: int
    config: str = ""

    def has_sizes_of(self, model: Architecture) -> bool:
        """Whether these are a model's."""
        given = (model.num_layers, model.hidden, model.heads, model.key_value_heads, model.vocab)
        return given == self[1:6]


FLAVORS = {
    "llama3": (
        Flavor("1B", 16, 2048, 32, 8, 128_256),
        Flavor("3B", 28, 3072, 24, 8, 128_256),
        Flavor("8B", 32, 4096, 32, 8, 128_256, "llama3_8b"),
        Flavor("70B", 80, 8192, 64, 8, 128_256, "llama3_70b"),
        Flavor("405B", 126, 16_384, 128, 8, 128_256, "llama3_405b"),
    ),
    "qwen3": (
        Flavor("0.6B", 28, 1024, 16, 8, 151_936, "qwen3_0_6b"),
        Flavor("1.7B", 28, 2048, 16, 8, 151_936, "qwen3_1_7b"),
        Flavor("4B", 36, 2560, 32, 8, 151_936),
        Flavor("8B", 36, 4096, 32, 8, 151_936),
        Flavor("14B", 40, 5120, 40, 8, 151_936, "qwen3_14b"),
        Flavor("32B", 64, 5120, 64, 8, 151_936, "qwen3_32b"),
        Flavor("30B-A3B", 48, 2048, 32, 4, 151_936, "qwen3_30b_a3b"),
        Flavor("235B-A22B", 94, 4096, 64, 4, 151_936),
    ),
}


def module_of(model: Architecture) -> str | None:
    """The module that has a model's parts; None where neither of the two has."""
    others = (model.latent, model.windows, model.learned_positions, model.biases, model.attention_sinks)
    if not model.gated or model.attention_gate or any(others):
        return None
    if model.qk_norm:
        return "qwen3"
    return None if model.experts else "llama3"


def model_notes(model: Architecture, *, pipeline: bool) -> Iterator[str]:
    """How torchtitan is told a model, and what it refuses of it."""
    module = module_of(model)
    if module is None:
        yield f"model: llama3 and qwen3 of torchtitan 0.3 lack parts of {model.name}: take a module that has them"
    else:
        norms = "with norms of queries and keys (qk_norm)" if model.qk_norm else "without norms of queries and keys"
        found = next((each for each in FLAVORS[module] if each.has_sizes_of(model)), None)
        yield f"model: --module {module}{f' --config {found.config}' if found and found.config else ''}, {norms}"
        if found is None or not found.config:
            has = f"the flavour {found.name}" if found else f"{model.num_layers} layers of {model.hidden}"
            yield f"torchtitan 0.3 starts no such {module}: add a function for {has} to its config_registry.py"
    if model.tied and pipeline:
        yield "torchtitan refuses a head tied to the embedding under a pipeline: set enable_weight_tying=False"
