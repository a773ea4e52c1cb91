"""Changed model: a model of the project's with other sizes is another one; it is named so, and nobody has timed it."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from rpbench.places import file_of

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
    as_shipped: Any = OmegaConf.to_container(OmegaConf.load(file))
    touched = [key for key in values if f"model.{key}" in given and key not in NAMES]
    changed = {key: values[key] for key in touched if values[key] != as_shipped.get(key)}
    if not changed or option == "abstract" or set(NAMES) <= {key.removeprefix("model.") for key in given}:
        return dict(values), ()
    found, what = dict(values), " ".join(f"{key}={value}" for key, value in changed.items())
    if "model.name" not in given:
        found["name"] = "-".join([str(option), *(f"{key}-{_word(value)}" for key, value in changed.items())])
    told = f"model={option} with {what} is another model and runs as {found['name']}"
    published = values.get("published_name")
    if published and "model.published_name" not in given and not set(changed) <= set(LENGTHS):
        found["published_name"] = None
        told += (
            f", without the corrections and published figures of {published}; model.published_name={published} keeps "
            "them, though they were not measured on it"
        )
    return found, (told,)


def _word(value: Any) -> str:
    return str(value).lower().replace(" ", "")
