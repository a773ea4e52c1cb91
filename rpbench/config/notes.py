"""Notes of a request: choices without effect in its mode, unit costs that nobody chose, old names, and a shipped model
that was given other sizes.

A shipped model with other sizes is another model: it gets a name that says so, and has no published timings.
"""

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

from rpbench.config.charging import CONSTANTS
from rpbench.config.choices import CostConfig, Mode, Predict, Roofline, Simulate
from rpbench.config.keys import LONGEST_NAME
from rpbench.places import file_of
from rpbench.workload.architecture import model_keys

OF_TENSORS = ("dtype", "optimizer")
# What the published runs of mode=predict have of their own.
OF_SCRIPTS = frozenset(
    [
        "num_microbatches",
        "num_steps",
        "chunks_per_device",
        "partition",
        "recompute",
        "prefetch",
        "dispatch",
        "offload",
        "workload",
        "seed",
    ]
)


def notes_of(
    mode: Mode, cost: CostConfig, overrides: Sequence[str], choices: Mapping[str, str | None], *, eager: bool
) -> tuple[str, ...]:
    """The notes of a request but those of its model; `eager` as of `without_effect`."""
    return (
        *said_twice(overrides),
        *renamed(choices),
        *frozen(cost),
        *without_effect(mode, overrides, eager=eager),
        *counted_in_slots(mode, cost.name, overrides, choices),
    )


def said_twice(overrides: Sequence[str]) -> tuple[str, ...]:
    """Notes on keys that were given several values, as by a script with words of its own before those of its user."""
    given: dict[str, list[str]] = {}
    for item in overrides:
        given.setdefault(item.lstrip("+").partition("=")[0], []).append(item)
    return tuple(f"{' '.join(items)}: the last one counts" for items in given.values() if len(set(items)) > 1)


def without_effect(mode: Mode, overrides: Sequence[str], *, eager: bool) -> tuple[str, ...]:
    """Notes on choices that change nothing in a mode.

    Args:
        eager: whether constants of counted kernels are read: those of `software=roundpipe` or of a calibrated machine.
    """
    if not isinstance(mode, Simulate | Predict | Roofline):
        return ()
    found = []
    if words := _of_groups(overrides, OF_TENSORS):
        found.append(
            f"{words} without effect: mode={mode.name} has no tensors; it counts 16-bit weights, Adam's states"
        )
    if isinstance(mode, Simulate) and not eager and (words := _constants(overrides)):
        found.append(
            f"{words} without effect: these constants are of kernels that are counted operator by operator, as in "
            "software=roundpipe"
        )
    if isinstance(mode, Predict) and (words := _of_groups(overrides, OF_SCRIPTS)):
        found.append(
            f"{words} without effect: mode=predict takes a system's published run; mode.sequences=N with "
            "mode.microbatches=N are another, and mode=simulate takes all of them"
        )
    return tuple(found)


def counted_in_slots(
    mode: Mode, cost: str, overrides: Sequence[str], choices: Mapping[str, str | None]
) -> tuple[str, ...]:
    """What a model's name does not change: unit costs, where nobody chose them."""
    keys = {item.lstrip("+").partition("=")[0] for item in overrides}
    if (
        not isinstance(mode, Simulate)
        or cost != "unit"
        or choices.get("experiment")
        or "cost" in keys
        or "model" not in keys
    ):
        return ()
    return (
        f"cost=unit, the default: every layer of {choices.get('model')} takes one slot, forward, and two, backward, on "
        "any device; cost=analytic cluster=NAME counts seconds",
    )


def _constants(overrides: Sequence[str]) -> str:
    """The words that set constants of kernels, not of what `charge=bytes` moves."""
    keys = {item: item.lstrip("+").partition("=")[0] for item in overrides}
    moved = {f"cost.constants.{name}" for name in CONSTANTS}
    return " ".join(item for item, key in keys.items() if key.startswith("cost.constants.") and key not in moved)


def _of_groups(overrides: Sequence[str], groups: Collection[str]) -> str:
    """The words of a command line that set a key of some groups."""
    keys = [item.lstrip("+").partition("=")[0].partition(".")[0] for item in overrides]
    return " ".join(item for item, key in zip(overrides, keys, strict=True) if key in groups)


def frozen(cost: CostConfig) -> tuple[str, ...]:
    """A note on weight gradients that are not computed."""
    if not cost.max_freeze_ratio:
        return ()
    return (
        f"cost.max_freeze_ratio={cost.max_freeze_ratio}: parts of the weight gradients are not made, so that this is "
        "other training than without; only its times are simulated",
    )


def renamed(choices: Mapping[str, str | None]) -> tuple[str, ...]:
    """A note on an old name."""
    is_old = choices.get("backend") == "cuda"
    return ("backend=cuda is now called backend=device, and serves every accelerator of torch",) if is_old else ()


NAMES = ("name", "published_name")
# Timings of a model's layers are carried to sequences of other lengths as they are to other machines.
LENGTHS = ("seq_len", "context")


def told_apart(
    values: Mapping[str, Any], option: str | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A model's keys under a name unique to its shape, and notes about it.

    What the command line says of `model.name` and `model.published_name` stays.

    Args:
        values: the keys as composed.
        option: what was chosen by `model=`.
        overrides: as typed, `key=value`.

    Returns:
        The keys, without `published_name` where the timings are of another shape; and sentences for people.
    """
    file = None if option is None else file_of("model", option)
    given = {item.lstrip("+~").partition("=")[0] for item in overrides}
    if file is None or not any(key.startswith("model.") for key in given):
        return dict(values), ()
    here, as_shipped = _leaves(values), _leaves(model_keys(file))
    touched = [key for key in here if _is_given(key, given) and key not in NAMES]
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
    """Keys with those inside of them, as in experts.total."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        parts = value if isinstance(value, Mapping) else None
        found |= {key: value} if parts is None else {f"{key}.{inner}": each for inner, each in parts.items()}
    return found


def _is_given(key: str, given: set[str]) -> bool:
    return not given.isdisjoint({f"model.{key}", f"model.{key.partition('.')[0]}"})


def _word(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "_".join(_word("all" if each is None else each) for each in value)
    return str(value).lower().replace(" ", "")
