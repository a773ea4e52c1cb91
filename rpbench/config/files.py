"""Files of a request: its sources, read once and identified by their bytes, and checks of the user's YAML.

The user's YAML is data. Under Hydra's own keys it could run code: Hydra builds what `_target_` names, logging what `()`
names, and launchers take commands. So a file of models, machines or experiments may only say what is swept; on the
command line a launcher is chosen by its name. A resolver, such as `${oc.env:HOME}`, would put the environment into
records; `${key}` alone is data.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.places import CONF, file_of, own_yaml, places
from rpbench.whole_file import read_bytes, text_of
from rpbench.yaml_file import read_keys

MOST_BYTES = 2**28


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the request was made."""

    path: Path
    content: bytes
    sha256: str

    @property
    def text(self) -> str:
        """Its content as text; ValueError if it is not UTF-8."""
        return text_of(self.content)


def source_of(path: Path, content: bytes) -> SourceFile:
    return SourceFile(path, content, hashlib.sha256(content).hexdigest())


def read_source(key: str, name: str | None, *, within: str = "", most: int = MOST_BYTES) -> SourceFile | None:
    """The file that a key names, or the file `within` the folder that it names; None where it names none.

    Raises ConfigError if the file cannot be read, or has more than `most` bytes.
    """
    if name is None:
        return None
    path = Path(name, within)
    try:
        return source_of(path, read_bytes(path, most))
    except ValueError as error:
        raise ConfigError(f"{key}={name}: {error}") from None
    except OSError as error:
        if within and isinstance(error, NotADirectoryError):
            raise ConfigError(f"{key}={name}: it is no folder; name one that {within} lies in") from None
        missing = f"there is no such {'checkpoint' if within else 'file'}"
        reason = missing if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(f"{key}={name}: cannot be read ({reason}); name a file that is there") from None


_RESOLVER = re.compile(r"\$\{.*:", re.DOTALL)
_EXAMPLE = "hydra: {sweeper: {params: {schedule: 'gpipe,1f1b'}}}"


def check_own_files(groups: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse a chosen file that is not a mapping, before Hydra reads it."""
    for item in overrides:
        group, equals, names = item.lstrip("+").partition("=")
        for name in names.split(",") if equals and group in groups else ():
            path = file_of(group, name.strip())
            if path is not None and CONF not in path.parents:
                read_keys(path)


def refuse_targets(overrides: Sequence[str]) -> None:
    """Refuse a command line with a `_target_` that Hydra would build."""
    for item in overrides:
        if "_target_" in item and item.lstrip("+~").startswith("hydra"):
            raise ConfigError(
                f"{item[:120]}: what Hydra runs is chosen by its name, as in hydra/launcher=joblib; leave _target_ out"
            )


def refuse_what_runs() -> None:
    """Refuse folders with a file that tells Hydra more than what is swept, or calls a resolver."""
    for path in own_yaml():
        try:
            content = read_bytes(path)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; move it out of the folder") from None
        if not any(mark in content for mark in (b"hydra", b"${", b"\\")):  # quoted text may contain escapes
            continue
        try:
            found = read_keys(path)
        except ValueError:
            found = {}  # composing it fails as well
        for text in _resolving(found):
            raise ConfigError(
                f"{path}: {text!r:.80} asks for what is outside the file; write the value, or the name of another key, "
                "as in ${hidden}; what is read from the environment is for the command line"
            )
        for said in _said_to_hydra(path, content, found):
            raise ConfigError(
                f"{path}: {said}: a file says what is swept and nothing else to Hydra, as in {_EXAMPLE}; what runs "
                "code, starts workers or sets the environment is for the command line"
            )


def _resolving(found: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a file that call a resolver."""
    waiting: list[Any] = [found]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, str) and _RESOLVER.search(each):
            yield each


def _said_to_hydra(path: Path, content: bytes, found: Mapping[str, Any]) -> Iterator[str]:
    """Instructions to Hydra in a file that are forbidden there."""
    if any(part == "hydra" for place in places() if place in path.parents for part in path.relative_to(place).parts):
        yield "a file of hydra's own groups"
    for line in content.decode("utf-8", "replace").splitlines():
        if line.startswith("#") and "@package" in line and "hydra" in line:
            yield line[:80]
    for key in _keys(found):
        if key.startswith("hydra") and not f"{key}.".startswith("hydra.sweeper.params."):
            yield key
    defaults = found.get("defaults")
    for item in defaults if isinstance(defaults, list) else [defaults]:
        if "hydra" in str(item).replace("override /hydra/launcher", ""):
            yield f"defaults: {item!s:.80}"


def _keys(tree: Mapping[str, Any]) -> Iterator[str]:
    """The top keys; those under `hydra` and `hydra.sweeper` one level deeper, with their paths."""
    for key, value in tree.items():
        if key != "hydra" or not isinstance(value, Mapping):
            yield str(key)
            continue
        for name, inner in value.items():
            if name == "sweeper" and isinstance(inner, Mapping):
                yield from (f"hydra.sweeper.{each}" for each in inner)
            else:
                yield f"hydra.{name}"
