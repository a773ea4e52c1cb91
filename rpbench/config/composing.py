"""Composer: configurations as Hydra would compose them, from parts that are composed once.

A configuration is a value for each key of `RunConfig`. It depends on the option of the group of that name, on the
primary file and the experiment, and on the overrides that begin with the key: on no other override. So a sweep over 20
schedules and 25 sizes has 45 parts to compose and not 500 configurations. Where that does not hold - an option with a
defaults list of its own, an interpolation, an override that adds or deletes a group - Hydra composes the cell.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
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
    refuse_old_spellings,
    register,
)
from rpbench.places import own_yaml
from rpbench.registry import offered

_KEYS = tuple(f.name for f in fields(RunConfig))
_OVERLAYS = ("rpbench_schema", "config")  # what may set keys beside groups and the experiment


class Separate(Exception):
    """Parts of a configuration depend on each other; Hydra has to compose it whole."""


class Overlays:
    """What is laid over the options of groups: schema, primary file and experiment."""

    def __init__(self, loader: ConfigLoaderImpl, experiment: str | None) -> None:
        self._loader, self._repository = loader, CachingConfigRepository(loader.repository)
        asked = [f"experiment={experiment}"] if experiment else []
        found = loader.compute_defaults_list("config", asked, RunMode.MULTIRUN)
        self.choices = {key: None if value == "null" else value for key, value in found.overrides.known_choices.items()}
        mine = [item for item in found.defaults if not str(item.config_path).startswith("hydra/")]
        self._nodes = [self._node(item) for item in mine if self._is_overlay(item, experiment)]

    def _is_overlay(self, item: ResultDefault, experiment: str | None) -> bool:
        path = str(item.config_path)
        if path in (*_OVERLAYS, f"experiment/{experiment}"):
            return True
        group, _, option = path.partition("/")
        if group not in GROUPS or option != self.choices.get(group):
            raise Separate(path)
        return False

    def _node(self, item: ResultDefault) -> DictConfig:
        return cast(DictConfig, self._loader._load_single_config(item, self._repository).config)

    def part(self, key: str, option: str | None, values: Sequence[Override]) -> Any:
        """The value of a key, as `typed(RunConfig, ...)` would give it, from its group's option and its overrides."""
        schema, *others = self._nodes
        first = [] if option is None else [self._option(key, option)]
        root = OmegaConf.create()
        root[key] = schema._get_node(key)  # which gives the types
        for node in (*first, *others):
            root.merge_with(_slice(node, key))
        OmegaConf.set_struct(root, True)
        ConfigLoaderImpl._apply_overrides_to_config(list(values), root)
        plain = OmegaConf.to_container(root, resolve=False)
        if "${" in repr(plain[key]) or plain[key] == "???":  # type: ignore[index, call-overload]
            raise Separate(key)
        value = root[key]
        return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value

    def _option(self, group: str, option: str) -> DictConfig:
        found = self._repository.load_config(f"{group}/{option}")
        package = None if found is None else found.header.get("package")
        if found is None or found.defaults_list or package not in (None, group, "_group_"):
            raise Separate(f"{group}/{option}")
        return self._node(ResultDefault(config_path=f"{group}/{option}", package=group, parent="config"))


def _slice(node: DictConfig, key: str) -> DictConfig:
    return OmegaConf.masked_copy(node, [key]) if key in node else OmegaConf.create()


class Composer:
    """Composes cells; parts that cells share are made once."""

    def __init__(self) -> None:
        self._overlays: dict[str | None, Overlays | None] = {}
        self._parts: dict[tuple[Any, ...], Any] = {}
        self._parsed: dict[str, Override] = {}
        self._loader: ConfigLoaderImpl | None = None

    def compose(self, overrides: Sequence[str]) -> Composed:
        """The configuration of one cell.

        Raises:
            ConfigError: for an unknown name, key or value, as of `composed`.
        """
        try:
            return self._assembled(overrides)
        except (Separate, HydraException, OmegaConfBaseException, *BROKEN_FILES):
            return composed(overrides)  # which also finds the words for what is wrong

    def _assembled(self, overrides: Sequence[str]) -> Composed:
        groups, values = self._sorted(overrides)
        overlays = self._overlays_of(groups.pop("experiment", None))
        choices = {**overlays.choices, **groups}
        parts = {key: self._part(overlays, key, choices.get(key), tuple(values.pop(key, ()))) for key in _KEYS}
        if values:
            raise Separate(next(iter(values)))
        chosen = {group: choices.get(group) for group in GROUPS}
        return Composed(RunConfig(**parts), chosen, asked_for(overrides))

    def _sorted(self, overrides: Sequence[str]) -> tuple[dict[str, str | None], dict[str, list[str]]]:
        """Options of groups, and the other overrides by the key they begin with."""
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
            if not _is_plain(override) or not isinstance(option, str | None) or key in values:
                raise Separate(text)
            groups[key] = None if option == "null" else option
        return groups, values

    def _override(self, text: str) -> Override:
        if text not in self._parsed:
            (self._parsed[text],) = OverridesParser.create().parse_overrides([text])
        return self._parsed[text]

    def _overlays_of(self, experiment: str | None) -> Overlays:
        if experiment not in self._overlays:
            try:
                self._overlays[experiment] = Overlays(self._hydra(), experiment)
            except Separate:
                self._overlays[experiment] = None
        found = self._overlays[experiment]
        if found is None:
            raise Separate(str(experiment))
        return found

    def _part(self, overlays: Overlays, key: str, option: str | None, values: tuple[str, ...]) -> Any:
        name = (id(overlays), key, option, values)
        if name not in self._parts:
            self._parts[name] = overlays.part(key, option, [self._override(text) for text in values])
        return self._parts[name]

    def _hydra(self) -> ConfigLoaderImpl:
        if self._loader is None:
            register()
            GlobalHydra.instance().clear()
            with initialize_config_dir(str(CONF), version_base="1.3"):
                hydra = GlobalHydra.instance().hydra
                assert hydra is not None
                self._loader = cast(ConfigLoaderImpl, hydra.config_loader)
        return self._loader


class Recalling:
    """Composes single configurations, one after another: after the first, from parts that are kept.

    The first is Hydra's, because most processes need one. A file, a place or a schedule that has changed begins anew.
    """

    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()
        self._composer: Composer | None = None

    def compose(self, overrides: Sequence[str]) -> Composed:
        """The configuration of a single run.

        Raises:
            ConfigError: as of `composed`.
        """
        if any(map(is_of_hydra, overrides)):  # a composer leaves them to whoever sweeps
            return composed(overrides)
        state = _state_of_files()
        if state != self._state:
            self._state, self._composer = state, None
            return composed(overrides)
        refuse_old_spellings(overrides)
        self._composer = self._composer or Composer()
        return self._composer.compose(overrides)


recalling = Recalling()


def _state_of_files() -> tuple[object, ...]:
    """What a configuration is composed of, by name and time of change."""
    files = sorted([*CONF.rglob("*.yaml"), *own_yaml()])
    stats = ((path, path.stat()) for path in files)
    return (tuple(offered().items()), *((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))


def _is_plain(override: Override) -> bool:
    """`group=option`, and nothing added, deleted or put elsewhere."""
    special = (override.is_add(), override.is_force_add(), override.is_delete(), override.is_sweep_override())
    return not any(special) and override.package is None
