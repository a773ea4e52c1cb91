"""What differs between runs: names, choices, options as they are typed, the code, the versions and the machine."""

from collections.abc import Mapping, Sequence
from typing import Any

from rpbench.records.record import COUNTS, NAMES, Record

NAMED = (*NAMES, *COUNTS, "experiment", "contender", "evidence", "code_version")


def differing(rows: Sequence[Record]) -> dict[str, list[Any]]:
    """The value of each run, by name, for everything in which the runs were asked or made differently."""
    config: list[dict[str, Any]] = [row.get("config") or {} for row in rows]
    choices: list[dict[str, Any]] = [row.get("choices") or {} for row in rows]
    around: list[dict[str, Any]] = [row.get("surroundings") or {} for row in rows]
    named = [{key: row.get(key) for key in NAMED} for row in rows]
    others = [{key: each[key] for key in each if key not in row} for each, row in zip(choices, config, strict=True)]
    machine = [{"name": "hardware" in each, **each, "versions": None} for each in around]  # of runs that depend on it
    versions = [{"versions": each.get("versions")} for each in around]
    found: dict[str, list[Any]] = {}
    for part in (named, others, config, versions, machine):
        found |= {name: values for name, values in unlike(part).items() if name not in found}
    found.pop("", None)
    return found


def unlike(values: Sequence[Any], name: str = "") -> dict[str, list[Any]]:
    """The leaves of nested values that differ, by their dotted names; None where one has none.

    Groups of different names differ in their name, and those of one name in their options. What is `declared` is the
    source of a number, and no number.
    """
    if all(value == values[0] for value in values):
        return {}
    groups = {place: value for place, value in enumerate(values) if isinstance(value, Mapping)}
    whole = {} if len(groups) == len(values) else groups
    kinds = [groups[at].get("name", whole.get(at)) if at in groups else value for at, value in enumerate(values)]
    found = {name: kinds} if len(set(map(str, kinds))) > 1 else {}
    for kind in dict.fromkeys(str(kinds[at]) for at in groups):
        alike = [place for place in groups if str(kinds[place]) == kind]
        for key in dict.fromkeys(key for place in alike for key in groups[place] if key != "declared"):
            inner = unlike([groups[place].get(key) for place in alike], f"{name}.{key}" if name else key)
            for leaf, each in inner.items():
                line = found.setdefault(leaf, [None] * len(values))
                for place, value in zip(alike, each, strict=True):
                    line[place] = value
    return found
