"""The command line that makes a record again, worked out from its resolved config."""

import re
import shlex
from collections.abc import Iterable
from functools import cache
from itertools import zip_longest
from typing import Any

from rpbench.harness.config import as_plain, load, resolved

Config = dict[str, Any]

GROUPS = ("schedule", "model", "cluster", "workload", "cost", "backend")

# Choices that are written out even where they are the default, because they say what a run is about.
_ALWAYS = ("schedule", "model", "cost")

# What the override grammar reads as itself, and not as a number, a truth value or nothing.
_BARE = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_][\w./:-]*|\d+(?:-\d+)+", re.IGNORECASE)


def commands(configs: Iterable[Config]) -> list[str]:
    """The command line of each config; empty where a file it was composed from is gone."""
    given = list(configs)
    known = _Defaults(given)
    return [known.command(config) for config in given]


def override(key: str, value: Any) -> str:
    """One override as the command line takes it, before the shell's quotes."""
    return f"{key}={_written(value)}"


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_written(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_written(item)}' for key, item in value.items())}}}"
    text = str(value)
    if _BARE.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


class _Defaults:
    """What each choice of a group stands for, read from the configuration files once."""

    def __init__(self, configs: list[Config]) -> None:
        self._plain = _composed(())
        names = {group: sorted({_name(config, group) for config in configs}) for group in GROUPS}
        self._groups: dict[tuple[str, str], Config] = {}
        for row in zip_longest(*names.values()):
            self._read({group: name for group, name in zip(GROUPS, row, strict=True) if name})

    def _read(self, choices: dict[str, str]) -> None:
        """Several groups at a time, for composing is slow; one by one if that fails."""
        try:
            composed = _composed(tuple(choices.items()))
        except ValueError:
            for group, name in choices.items() if len(choices) > 1 else ():
                self._read({group: name})
            return
        for group, name in choices.items():
            self._groups[group, name] = composed[group]

    def command(self, config: Config) -> str:
        """The overrides that lead from the defaults to a config."""
        overrides: list[str] = []
        for group in GROUPS:
            name = _name(config, group)
            if (group, name) not in self._groups:
                return ""
            if group in _ALWAYS or name != self._plain[group]["name"]:
                overrides.append(override(group, name))
            overrides += _differing(config[group], self._groups[group, name], f"{group}.")
        plain = {key: value for key, value in self._plain.items() if key not in GROUPS}
        own = {key: value for key, value in config.items() if key not in GROUPS}
        overrides += _differing(own, plain, "")
        return shlex.join(["python", "-m", "rpbench", *overrides])


@cache
def _composed(choices: tuple[tuple[str, str], ...]) -> Config:
    """What the configuration files make of some choices; composing takes a tenth of a second."""
    return dict(as_plain(resolved(load([f"{group}={name}" for group, name in choices]))))


def _name(config: Config, group: str) -> str:
    return str(config.get(group, {}).get("name", ""))


def _differing(own: Config, default: Config, prefix: str) -> list[str]:
    changed = [key for key, value in own.items() if key in default and default[key] != value]
    added = [key for key in own if key not in default]
    return [override(f"{prefix}{key}", own[key]) for key in changed] + [
        override(f"+{prefix}{key}", own[key]) for key in added
    ]
