"""Schedule options: whether typed values have the types of the generator's signature."""

import inspect
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rpbench.config.errors import ConfigError
from rpbench.registry import Entry

_LARGEST = 10**6  # whole numbers of an option count steps, stages or slots of a table
_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    NoneType: "null",
}


def check_options(entry: Entry, given: Mapping[str, Any]) -> None:
    """Refuse an option's value of another type than its generator takes, and whole numbers beyond any table."""
    kinds = get_type_hints(inspect.unwrap(entry.generate)) if given else {}
    for name, value in given.items():
        if name in kinds and not _is_of_kind(value, kinds[name]):
            shown = str(value).replace(" ", "") if isinstance(value, list) else value
            raise ConfigError(f"schedule.{name}={shown}: {entry.name} takes {_kind_in_words(kinds[name])}")
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, int) and abs(number) > _LARGEST for number in numbers):
            raise ConfigError(f"schedule.{name}={value!s:.40}: whole numbers are {_LARGEST:,} at most")


def _is_of_kind(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of_kind(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(_is_of_kind(each, inner[0]) for each in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind not in _WORDS or isinstance(value, kind)


def _kind_in_words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_kind_in_words(each) for each in inner)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return f"a list, each {_kind_in_words(inner[0])}, as in [2,1,1]"
    return _WORDS.get(kind, str(kind))
