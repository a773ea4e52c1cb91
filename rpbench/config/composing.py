"""Composer: the same configurations as Hydra's, from parts that are composed once.

The value of a key of `RunConfig` depends only on the option of the group of that name, on the primary file and the
experiment, and on the overrides that begin with the key. So a sweep over 20 schedules and 25 sizes composes 45 parts
and not 500 configurations. Where that does not hold - an option with a defaults list of its own, an interpolation, an
override that adds or deletes a group - Hydra composes the cell.
"""

import os
import re
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import fields, make_dataclass
from functools import lru_cache
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rpbench.config.configuration import (
    BROKEN_FILES,
    CONF,
    GROUPS,
    Composed,
    RunConfig,
    asked_for,
    composed,
    is_of_hydra,
    quoted,
    refuse_old_spellings,
    schedule_node,
    with_orders,
)
from rpbench.cost.hardware.machine import devices_named
from rpbench.places import file_of, own_yaml
from rpbench.registry import offered

_KEYS = {f.name: make_dataclass("Key", [(f.name, f.type, copy(f))]) for f in fields(RunConfig)}  # a schema for each
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


MOST_COMPOSERS = 4  # composers in memory, one a state of the files


class Separate(Exception):
    """Parts of a configuration depend on each other: Hydra has to compose the whole."""


class Base:
    """Schema, primary file and experiment, which are merged over the options of groups.

    Raises Separate if a part differs from what Hydra composed: then it depends on something else as well.
    """

    def __init__(self, found: Composed) -> None:
        experiment = found.choices["experiment"]
        self.choices = found.choices
        files = [CONF / "config.yaml", *([file_of("experiment", experiment)] if experiment else [])]
        self._files = [_loaded(path.read_text(encoding="utf-8")) for path in files if path is not None]
        whole: DictConfig = OmegaConf.structured(RunConfig)
        whole.merge_with({key: _option(key, option) for key, option in self.choices.items() if option and key in whole})
        for node in self._files:
            whole.merge_with(OmegaConf.masked_copy(node, [key for key in _KEYS if key in node]))
        ours, theirs = _plain(whole), _plain(cast(DictConfig, found.node))
        for key in _KEYS:
            if ours[key] != theirs[key] and key != "results_dir":  # a sweep sets it for its workers
                raise Separate(key)

    def part(self, key: str, option: str | None, values: Sequence[Override]) -> Any:
        """The value of a key, as in `typed(RunConfig, ...)`, from its group's option and its overrides."""
        root: DictConfig = OmegaConf.structured(_KEYS[key])
        if option is not None:
            root.merge_with({key: _option(key, option)})
        for node in self._files:
            if key in node:
                root.merge_with(OmegaConf.masked_copy(node, [key]))
        OmegaConf.set_struct(root, True)
        for override in values:
            _set(root, override)
        plain = _plain(root)[key]
        if "${" in repr(plain) or plain == "???":
            raise Separate(key)
        value = root[key]
        return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def _plain(node: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(node))


@lru_cache(maxsize=256)
def _loaded(text: str) -> DictConfig:
    """A file's node; callers must not change it."""
    node = OmegaConf.create(text)
    if not isinstance(node, DictConfig):
        raise Separate(text[:80])
    return node


def _option(group: str, option: str) -> DictConfig | dict[str, Any]:
    """The keys of an option of a group."""
    path = file_of(group, option)
    if path is None and group == "schedule" and option in offered():
        return schedule_node(offered()[option])
    if path is None:
        keys = devices_named(option) if group == "cluster" else None
        if keys is None:
            raise Separate(f"{group}/{option}")
        return keys
    text = path.read_text(encoding="utf-8")
    package, node = _PACKAGE.search(text), _loaded(text)
    if package is not None and package[1] not in (group, "_group_"):
        raise Separate(f"{group}/{option}")
    if "defaults" not in node:
        return node
    node = deepcopy(node)
    before = node.pop("defaults")
    if not OmegaConf.is_list(before) or len(before) != 2 or before[1] != "_self_" or not isinstance(before[0], str):
        raise Separate(f"{group}/{option}")
    return cast(DictConfig, OmegaConf.merge(_option(group, before[0]), node))  # another option with changes


def _set(root: DictConfig, override: Override) -> None:
    """Apply an override, with Hydra's rules for present and absent keys."""
    key, value = override.key_or_group, override.value()
    if override.package is not None or override.is_delete():
        raise Separate(override.input_line)
    if override.is_add() and not isinstance(value, dict | list) and OmegaConf.select(root, key) is not None:
        raise Separate(override.input_line)
    OmegaConf.update(root, key, value, merge=True, force_add=override.is_add() or override.is_force_add())


class Composer:
    """Composes cells, and shared parts once; `known` was composed by Hydra, with an experiment or none and no more."""

    def __init__(self, known: Composed | None = None) -> None:
        self._known = known
        self._bases: dict[str | None, Base | None] = {}
        self._parts: dict[tuple[Any, ...], Any] = {}
        self._parsed: dict[str, Override] = {}

    def compose(self, overrides: Sequence[str]) -> Composed:
        """The configuration of one cell; ConfigError as of `composed`."""
        overrides = quoted(overrides)
        try:
            return self._assembled(overrides)
        except (Separate, HydraException, OmegaConfBaseException, *BROKEN_FILES):
            return composed(overrides)  # which also words the error

    def _assembled(self, overrides: Sequence[str]) -> Composed:
        groups, values = self._sorted(with_orders(overrides))
        base = self._base_of(groups.pop("experiment", None))
        choices = {**base.choices, **groups}
        parts = {key: self._part(base, key, choices.get(key), tuple(values.pop(key, ()))) for key in _KEYS}
        if values:
            raise Separate(next(iter(values)))
        chosen = {group: choices.get(group) for group in GROUPS}
        return Composed(RunConfig(**parts), chosen, asked_for(overrides))

    def _sorted(self, overrides: Sequence[str]) -> tuple[dict[str, str | None], dict[str, list[str]]]:
        """Options of groups, and the other overrides by their first key."""
        groups: dict[str, str | None] = {}
        values: dict[str, list[str]] = {}
        for text in overrides:
            override = self._override(text)
            if override.is_hydra_override():
                continue
            key = override.key_or_group
            if key not in GROUPS:
                values.setdefault(key.partition(".")[0], []).append(text)
                continue
            option = override.value()
            special = (override.is_add(), override.is_force_add(), override.is_delete(), override.is_sweep_override())
            is_plain = not any(special) and override.package is None  # group=option
            if not is_plain or not isinstance(option, str | None) or key in values:
                raise Separate(text)
            groups[key] = None if option == "null" else option
        return groups, values

    def _override(self, text: str) -> Override:
        if text not in self._parsed:
            (self._parsed[text],) = OverridesParser.create().parse_overrides([text])
        return self._parsed[text]

    def _base_of(self, experiment: str | None) -> Base:
        if experiment not in self._bases:
            try:
                known = self._known
                if known is None or known.choices["experiment"] != experiment:
                    known = composed([f"experiment={experiment}"] if experiment else [])
                self._bases[experiment] = Base(known)
            except Separate:
                self._bases[experiment] = None
        found = self._bases[experiment]
        if found is None:
            raise Separate(str(experiment))
        return found

    def _part(self, base: Base, key: str, option: str | None, values: tuple[str, ...]) -> Any:
        name = (id(base), key, option, values)
        if name not in self._parts:
            self._parts[name] = base.part(key, option, [self._override(text) for text in values])
        return self._parts[name]


class Recalling:
    """Composes single configurations: the first by Hydra, because most processes need one, the others from parts.

    A changed file, place or schedule starts a new composer; composers of recent states remain.
    """

    def __init__(self) -> None:
        self._known: list[tuple[tuple[object, ...], Composer]] = []  # state of the files, its composer

    def compose(self, overrides: Sequence[str]) -> Composed:
        """The configuration of a single run; ConfigError as of `composed`."""
        if any(map(is_of_hydra, overrides)):  # a composer ignores them
            return composed(overrides)
        state = _state_of_files()
        composer = next((each for known, each in self._known if known == state), None)
        if composer is None:
            self._known = [*self._known[1 - MOST_COMPOSERS :], (state, Composer())]
            return composed(overrides)
        refuse_old_spellings(overrides)
        return composer.compose(overrides)


recalling = Recalling()


def _state_of_files() -> tuple[object, ...]:
    """State of all sources of a configuration: schedules, and the time of change and size of files."""
    shipped = (os.path.join(folder, name) for folder, _, names in os.walk(CONF) for name in names)
    files = sorted([*(path for path in shipped if path.endswith(".yaml")), *map(str, own_yaml())])
    stats = ((path, os.stat(path)) for path in files)
    return (tuple(offered().items()), *((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))
