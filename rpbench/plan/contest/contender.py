"""Contender: a schedule that takes part, on time or with updates one step late."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rpbench import registry
from rpbench.registry import Entry


@dataclass(frozen=True)
class Contender:
    """A schedule and the options that say which method it is.

    Args:
        fixed: options that a search leaves alone, such as those of a late update.
    """

    entry: Entry = field(hash=False)
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The schedule's name, with what is fixed: `roundpipe(asynchronous=True)`."""
        inside = ", ".join(f"{key}={value}" for key, value in self.fixed)
        return f"{self.entry.name}({inside})" if inside else self.entry.name


def contender(name: str, *, late: bool = False) -> Contender:
    """The schedule of that name.

    Raises:
        ValueError: for an unknown name, or a late update of a method that has none.
    """
    found = registry.entry(name)
    if late and found.late is None:
        raise ValueError(f"schedule {name} has no late update to choose; leave late out")
    return Contender(found, tuple((found.late or {}).items()) if late else ())


def contenders(names: Iterable[str] | None = None) -> list[Contender]:
    """Every schedule, and those with a late update once more; of some names only.

    Raises:
        ValueError: for an unknown name.
    """
    chosen = list(registry.entries()) if names is None else list(names)
    found = [contender(name) for name in chosen]
    return found + [contender(name, late=True) for name in chosen if registry.entry(name).late]


def why_not_charged(found: Contender) -> str:
    """Why what a schedule moves cannot be charged; empty where it can."""
    if found.entry.shards_head:
        return f"the sums of {found.entry.name} over shares of the head have no bytes yet"
    return ""
