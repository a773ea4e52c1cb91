"""Changed model: a model of the project's with other sizes is another one; it is named so, and nobody has timed it."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from rpbench.config.files.keys import LONGEST_NAME
from rpbench.places import file_of
from rpbench.workload.architecture import model_keys

NAMES = ("name", "published_name")
# Timings of a model's layers are carried to sequences of other lengths as they are to other machines.
LENGTHS = ("seq_len", "context")


def told_apart(
    values: Mapping[str, Any], option: str | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A model's keys under a name that no other shape has, and what there is to tell about it.

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
    """With every change in it; with a digest of them where that would be too long for a name."""
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
