"""Notes of a request: choices without effect, unit costs by default, old names, and models with changed sizes.

A shipped model with other sizes is another model: it gets a name that says so, and has no published timings.
"""

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

from rpbench.config.charging import CONSTANTS
from rpbench.config.choices import CostConfig, Duel, Failures, Mode, Predict, Roofline, Simulate, TorchDuel
from rpbench.config.keys import LONGEST_NAME
from rpbench.places import file_of
from rpbench.workload.architecture import model_keys

OF_TENSORS = ("dtype", "optimizer")
# Keys that the published runs of mode=predict set themselves.
OF_SCRIPTS = (
    *("num_microbatches", "num_steps", "chunks_per_device", "partition", "recompute"),
    *("prefetch", "dispatch", "offload", "charge", "workload", "seed"),
)
# Keys that closed forms have no place for.
OF_ORDERS = {"schedule", *OF_SCRIPTS} - {"num_microbatches", "workload"}
# Keys of mode=failures that one kind of run has.
OF_FAILURES = {
    "simulated": (
        *("mean_between_s", "horizon_s", "horizon_steps", "detect_s", "restart_s"),
        *("store_bytes_per_s", "net_bytes_per_s"),
    ),
    "processes": ("stall_s",),
}
OF_GEMINI = ("copies", "dies")


def notes_of(
    mode: Mode, cost: CostConfig, overrides: Sequence[str], choices: Mapping[str, str | None], *, eager: bool
) -> tuple[str, ...]:
    """The notes of a request, without those of its model.

    `eager`: whether constants of kernels count, as with `software=roundpipe` or on a calibrated machine.
    """
    given: dict[str, list[str]] = {}
    for item in overrides:
        given.setdefault(_key(item), []).append(item)
    found = [f"{' '.join(items)}: the last one counts" for items in given.values() if len(set(items)) > 1]
    if choices.get("backend") == "cuda":
        found.append("backend=cuda is now called backend=device, and serves every accelerator of torch")
    if cost.max_freeze_ratio:
        found.append(
            f"cost.max_freeze_ratio={cost.max_freeze_ratio}: parts of the weight gradients are not made, so that this "
            "is other training than without; only its times are simulated"
        )
    found += _without_effect(mode, overrides, eager=eager)
    is_own = isinstance(mode, Simulate) and not choices.get("experiment")
    if is_own and cost.name == "unit" and "model" in given and "cost" not in given:  # unit costs by default
        found.append(
            f"cost=unit, the default: every layer of {choices.get('model')} takes one slot, forward, and two, "
            "backward, on any device; cost=analytic cluster=NAME counts seconds"
        )
    return tuple(found)


def _key(item: str) -> str:
    return item.lstrip("+").partition("=")[0]


def _without_effect(mode: Mode, overrides: Sequence[str], *, eager: bool) -> list[str]:
    if isinstance(mode, Failures):
        return _without_effect_on(mode, overrides)
    if isinstance(mode, Duel | TorchDuel) and (words := _of_groups(overrides, ("schedule",))):
        key = "contenders" if isinstance(mode, Duel) else "schedules"
        return [f"{words} without effect: mode.{key}= says who takes part"]
    if not isinstance(mode, Simulate | Predict | Roofline):
        return []
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
    if isinstance(mode, Roofline) and (words := _of_groups(overrides, OF_ORDERS)):
        found.append(f"{words} without effect: mode=roofline has closed forms of a model and a machine, of no order")
    options = [item for item in overrides if _key(item).startswith("schedule.")]
    if isinstance(mode, Predict) and (words := " ".join(filter(None, (_of_groups(overrides, OF_SCRIPTS), *options)))):
        found.append(
            f"{words} without effect: mode=predict takes a system's published run; mode.sequences=N with "
            "mode.microbatches=N are another, and mode=simulate takes all of them"
        )
    return found


def _without_effect_on(mode: Failures, overrides: Sequence[str]) -> list[str]:
    idle = {f"mode.run={kind}": keys for kind, keys in OF_FAILURES.items() if kind != mode.run}
    if mode.policy != "gemini":
        idle["mode.policy=gemini"] = OF_GEMINI
    found = []
    for owner, keys in idle.items():
        if words := " ".join(item for item in overrides if _key(item) in {f"mode.{key}" for key in keys}):
            found.append(f"{words} without effect: of {owner} alone")
    return found


def _constants(overrides: Sequence[str]) -> str:
    """The overrides that set constants of kernels, not of the traffic of `charge=bytes`."""
    moved = {f"cost.constants.{name}" for name in CONSTANTS}
    keys = {item: _key(item) for item in overrides}
    return " ".join(item for item, key in keys.items() if key.startswith("cost.constants.") and key not in moved)


def _of_groups(overrides: Sequence[str], groups: Collection[str]) -> str:
    """The overrides that set a key of some groups."""
    return " ".join(item for item in overrides if _key(item).partition(".")[0] in groups)


NAMES = ("name", "published_name")
LENGTHS = ("seq_len", "context")  # published timings are also used for other lengths, as they are on other machines


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
