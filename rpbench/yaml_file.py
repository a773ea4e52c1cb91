"""YAML files of users: keys and values, of limited size."""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rpbench.whole_file import read_text

MOST_BYTES = 2**16
MOST_NODES = 20_000  # with every alias in its place
DEEPEST = 40
EXAMPLE = "write key: value, one a line"


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of plain data that refuses repeated keys and more than `DEEPEST` levels."""

    _depth = -1  # of the parent of the root

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise RecursionError
        found: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return found

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            known.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_keys(path: Path) -> dict[str, Any]:
    """The keys and values of a file, none of an empty one.

    Raises ValueError, naming file and line, for what is no file, no YAML, no mapping, or too large.
    """
    try:
        return keys_of(read_text(path, MOST_BYTES))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def keys_of(text: str) -> dict[str, Any]:
    """The keys and values of a YAML text; ValueError as of `read_keys`, without the file's name."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} characters; at most {MOST_BYTES} are read")
    return deepcopy(_parsed(text))


@lru_cache(maxsize=256)
def _parsed(text: str) -> dict[str, Any]:
    """The same, shared by callers: files are read repeatedly, and parsing takes ten times as long as a copy."""
    try:
        found = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}it is no YAML ({error.problem}); {EXAMPLE}") from None
    except RecursionError:
        raise ValueError(f"it is nested too deeply; at most {DEEPEST} levels are read") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, LookupError) as error:
        raise ValueError(f"it is no YAML ({str(error).partition(chr(10))[0]}); {EXAMPLE}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"no keys, but one {type(found).__name__}; {EXAMPLE}")
    _check_size(found)
    return found


def _check_size(tree: Any) -> None:
    """Refuse a tree that is endless, deep or huge by its aliases."""
    waiting, num_nodes = [(tree, 0)], 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if num_nodes > MOST_NODES or depth > DEEPEST:
            raise ValueError(f"more than {MOST_NODES:,} values or {DEEPEST} levels, with every alias in its place")
        if isinstance(node, dict):
            if odd := [key for key in node if not isinstance(key, str | int)]:
                raise ValueError(f"key {odd[0]!r:.80}: keys are words; {EXAMPLE}")
            waiting += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            waiting += [(value, depth + 1) for value in node]
        elif not isinstance(node, str | int | float | None):
            raise ValueError(f"value {node!s:.80} is a {type(node).__name__}; put it in quotes to have a text")
