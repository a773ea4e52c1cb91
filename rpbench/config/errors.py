"""Errors of a request: ConfigError, and messages of Hydra and omegaconf reworded."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class ConfigError(ValueError):
    """A request that cannot be understood: unknown names, misspelt keys, values of the wrong type."""


@contextmanager
def config_errors(prefix: str, *others: type[ValueError]) -> Iterator[None]:
    """Inside, a ValueError becomes a ConfigError that begins with a prefix, unless it is one already or of `others`."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, (ConfigError, *others)):
            raise
        raise ConfigError(f"{prefix}{error}") from None


_KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
# Pattern of a message -> our words; {0}, {1} are the groups of the pattern.
_REWORDINGS: tuple[tuple[str, str], ...] = (
    (r"Ambiguous value for argument '([^']*)'", "{0}: several values are a sweep; put -m before the overrides"),
    (
        r"(?:^|: )([\w/@:]+) appears more than once in the final defaults list",
        "{0} is chosen already: write {0}=OPTION, without +",
    ),
    (r"force-add of config groups is not supported: '\+\+([^=']+)=?([^']*)'", "write {0}={1}, without ++"),
    (r"Config group override must be a string or a list", "a group takes the name of one of its options"),
    (r"Could not override ''", "a key is missing before =: write key=value"),
    (r"Could not delete from config\. '([^']*)' does not exist", "~{0}: there is no such key to take out"),
    (r"Could not delete\. No match for '([^']*)'", "~{0}: there is no such choice to take out"),
    (r"Interpolation key '([^']*)' not found", "${{{0}}} names no key"),
    (r"while resolving interpolation: Error resolving key '([^']*)'", "${{{0}}} names no key"),
    (r"Unsupported interpolation type ([\w.]+)", "${{{0}:...}}: there is no such function"),
)


def reworded(message: str, overrides: Sequence[str] = ()) -> str:
    """The first line of a message of Hydra, reworded where we know it, with the override that it is about as typed."""
    for pattern, meaning in _REWORDINGS:
        if found := re.search(pattern, message):
            return _with_override(meaning.format(*found.groups()), overrides)
    return _about_value(message, overrides) or message


def _about_value(message: str, overrides: Sequence[str]) -> str | None:
    """The words for a value of the wrong kind; None for another message."""
    about = next((item for item in overrides if message.startswith(f"Error merging override {item}: ")), None)
    text = message.removeprefix(f"Error merging override {about}: ")
    key, _, rest = text.partition(": ")
    rule = _rule(rest)
    if rule is None:
        return None
    if about is not None and about.lstrip("+").startswith(f"{key}."):
        return f"{about}: {key} is {rule}, with no keys beneath it"
    typed = [item.lstrip("+") for item in overrides if item.lstrip("+").partition("=")[0].endswith(key)]
    value = re.search(r"[Vv]alue:? '?([^' ]*)", rest)
    given = "null" if value is None or value[1] == "None" else value[1]
    return f"{typed[-1] if typed else f'{key}={given}'}: {rule}"


def _rule(text: str) -> str | None:
    if found := re.search(r"could not be converted to (\w+)|not a valid (\w+)", text):
        kind = found[1] or found[2]
        return _KINDS.get(kind, f"a {kind.lower()}")
    if "is not a ListConfig" in text:
        return "a list, in brackets, as in [a,b]"
    if "Cannot convert" in text and "to string" in text:
        return "one word or one text, no list and no keys"
    if "is not Optional" in text or "Incompatible value 'None'" in text:
        return "it needs a value; null is none"
    if "Invalid type assigned" in text or "is not a subclass of" in text or "incompatible type" in text:
        return "it has keys of its own, as in checkpoint.save_to=FOLDER"
    return None


def _with_override(meaning: str, overrides: Sequence[str]) -> str:
    """The meaning, behind the override that it is about if the message names none."""
    if not meaning.startswith(("a group", "${")):
        return meaning
    mark = "null" if meaning.startswith("a group") else meaning.partition(" ")[0]
    about = [item for item in overrides if mark in item or item.endswith("=")]
    return f"{about[0]}: {meaning}" if about else meaning
