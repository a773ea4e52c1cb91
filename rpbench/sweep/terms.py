"""Flags of a sweep, between its overrides: --only STATES, --retry STATES, --fail-fast, --dry-run."""

from collections.abc import Sequence

from rpbench.config.choices import ConfigError
from rpbench.records.manifest import STATES
from rpbench.sweep.worker import Terms


def split_terms(arguments: Sequence[str]) -> tuple[list[str], Terms, bool]:
    """Overrides, the terms of the sweep, and whether it is only to be looked at.

    Raises:
        ConfigError: for a state that no cell can be in.
    """
    rest: list[str] = []
    states: dict[str, frozenset[str]] = {"--only": frozenset(), "--retry": frozenset()}
    waiting = list(arguments)
    while waiting:
        item = waiting.pop(0)
        flag, equals, value = item.partition("=")
        if flag not in states:
            rest.append(item)
            continue
        states[flag] |= _states(flag, value if equals else (waiting.pop(0) if waiting else ""))
    terms = Terms(states["--only"], states["--retry"], "--fail-fast" in rest)
    return [item for item in rest if item not in ("--fail-fast", "--dry-run")], terms, "--dry-run" in rest


def _states(flag: str, text: str) -> frozenset[str]:
    found = frozenset(word.strip().replace("_", " ") for word in text.split(","))
    for word in found - set(STATES):
        raise ConfigError(f"{flag} {word or '...'}: states of cells are {', '.join(STATES)}")
    return found
