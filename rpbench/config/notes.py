"""Notes of a request: choices without effect, unit costs by default, old names, and models with changed sizes.

A shipped model with other sizes is another model: it gets a name that says so, and has no published timings.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from rpbench.config.choices import CostConfig, Mode, Simulate
from rpbench.config.keys import LONGEST_NAME
from rpbench.config.without_effect import key_of
from rpbench.places import file_of
from rpbench.workload.architecture import model_keys


def notes_of(
    mode: Mode, cost: CostConfig, overrides: Sequence[str], choices: Mapping[str, str | None]
) -> tuple[str, ...]:
    """The notes of a request, without those of its model and of keys without effect."""
    given: dict[str, list[str]] = {}
    for item in overrides:
        given.setdefault(key_of(item), []).append(item)
    found = [f"{' '.join(items)}: the last one counts" for items in given.values() if len(set(items)) > 1]
    if choices.get("backend") == "cuda":
        found.append("backend=cuda is now called backend=device, and serves every accelerator of torch")
    if cost.max_freeze_ratio:
        found.append(
            f"cost.max_freeze_ratio={cost.max_freeze_ratio}: parts of the weight gradients are not made, so that this "
            "is other training than without; only its times are simulated"
        )
    is_own = isinstance(mode, Simulate) and not choices.get("experiment")
    if is_own and cost.name == "unit" and "model" in given and "cost" not in given:  # unit costs by default
        found.append(
            f"cost=unit, the default: every layer of {choices.get('model')} takes one slot, forward, and two, "
            "backward, on any device; cost=analytic cluster=NAME counts seconds"
        )
    return tuple(found)


NAMES = ("name", "published_name")
LENGTHS = (
    "seq_len",
    "context",
    "batch_sequences",
)  # published timings are also used for other lengths, as they are on other machines


def told_apart(
    values: Mapping[str, Any], option: str | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A model's keys under a name unique to its shape, and notes about it.

    `option` is the value of `model=`. `published_name` is removed where the published timings are of another shape;
    what the command line says of `model.name` and `model.published_name` stays.
    """
    file = None if option is None else file_of("model", option)
    given = {item.lstrip("+~").partition("=")[0] for item in overrides}
    if file is None or not any(key.startswith("model.") for key in given):
        return dict(values), ()
    here, as_shipped = _leaves(values), _leaves(model_keys(file))
    touched = [key for key in here if given & {f"model.{key}", f"model.{key.partition('.')[0]}"} and key not in NAMES]
    changed = {key: here[key] for key in touched if here[key] != as_shipped.get(key)}
    if not changed or option == "abstract" or set(NAMES) <= {key.removeprefix("model.") for key in given}:
        return dict(values), ()
    found, what = dict(values), " ".join(f"{key}={value}" for key, value in changed.items())
    if "model.name" not in given:
        found["name"] = _named(str(option), changed)
    told = f"model={option} with {what} is another model and runs as {found['name']}"
    published = values.get("published_name")
    if published and "model.published_name" not in given and not set(changed) <= set(LENGTHS):
        found["published_name"] = None
        told += (
            f", without the corrections and published figures of {published}; model.published_name={published} keeps "
            "them, though they were not measured on it"
        )
    return found, (told,)


def _named(option: str, changed: Mapping[str, Any]) -> str:
    """The option's name with every change, or with a digest of the changes where that is too long."""
    words = "-".join(f"{key.replace('.', '_')}-{_word(value)}" for key, value in changed.items())
    if len(option) + 1 + len(words) <= LONGEST_NAME:
        return f"{option}-{words}"
    return f"{option}-{len(changed)}_changes-{sha256(words.encode()).hexdigest()[:8]}"


def _leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with nested ones flattened, as in experts.total."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_nested = isinstance(value, Mapping)
        found |= {f"{key}.{inner}": each for inner, each in value.items()} if is_nested else {key: value}
    return found


def _word(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "_".join(_word("all" if each is None else each) for each in value)
    return str(value).lower().replace(" ", "")
