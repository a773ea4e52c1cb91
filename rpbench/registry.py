"""Registry: the name of every schedule and the function that builds it.

Modules of `rpbench.schedules`, of `baselines`, of users (schedule/NAME.py in `rpbench.places`) and of installed
packages with an entry point register their generators by a decorator. Nothing else has to know of them: the command
line, the property tests and the figures iterate over `entries()`.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import entry_points
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rpbench.ir.action import Action
from rpbench.ir.costs import StageCosts, unit_costs
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.places import places
from rpbench.untrusted import plain

PACKAGES = ("rpbench.schedules", "baselines")
_PROJECT = tuple(f"{package}." for package in PACKAGES)
_ADAPTERS = "baselines.systems."  # other people's engines: no schedules, and they need torch
# Former name of a schedule -> its name now, and why.
RENAMED = {"harp": ("adaptive_1f1b", "the rule is ours, and HARP's planner is no part of it")}
GROUP = "rpbench.schedules"  # entry points of installed packages: a module that registers schedules

Loaded = TypeVar("Loaded")
Values = Sequence[Any] | Callable[[int, int], Sequence[Any]]  # of an option that is searched


class GeneratorError(ValueError):
    """An error in a user's generator, and no shape or option that it refuses; names file and line."""


@dataclass(frozen=True)
class Entry:
    """A registered schedule."""

    name: str  # the paper's; the value of `schedule=`
    source: str  # paper and section
    generate: Callable[..., Schedule]  # shape -> schedule; keyword-only parameters are the schedule's options
    separate_cuts: bool = False  # whether forward and backward are cut apart, with a fused last stage
    looped: bool = False  # whether a device has several stages
    # the default number of stages per device; a schedule with one takes no other, unless `more_chunks` is set: then a
    # search tries others as well
    chunks: int | None = None
    more_chunks: bool = False
    needs_costs: bool = False  # whether its order depends on times: then `generate` takes `StageCosts` after the shape
    needs_transfers: bool = False  # whether it also depends on the times of activation transfers, if known
    chooses_placement: bool = False  # whether the devices of its stages depend on times too
    # the extra of this package that it needs, a solver: the schedule is available by its name only, `entries` leaves
    # it out, and no search tries it
    extra: str | None = None
    shards_head: bool = False  # whether every device runs a shard of the head
    recompute_ahead: bool = False  # whether recomputation is issued before the gradient arrives
    # the artifact's switch time is counted from the last forward before the first backward; otherwise from the (p -
    # rank)-th
    switch_after_last_forward: bool = False
    # whether weights change after every microbatch, or after as few as the option `replicas` allows:
    # `num_microbatches` then spans several updates
    steps_each_microbatch: bool = False
    rounds: int = 1  # steps of its shape in an update, each with an equal part of the update's microbatches
    # the engine's correction of late gradients, as settings of `rpbench.engine.state.updates.compensation` by name;
    # takes the schedule's options. None: no correction
    compensation: Callable[..., Mapping[str, Any]] | None = None
    tensor_parallel: bool = False  # whether every device has a shard of every matrix, and parts are such shards
    # adds optimizer steps and the method's transfers (`rpbench.passes.offload`) to an order with a partition; takes
    # the schedule's options and `prefetch`. None: the method is only an order
    lower: Callable[..., Schedule] | None = None
    # options that a search chooses, each with the values to try: a tuple, or a function of (devices, microbatches).
    # No option that changes the method or its staleness is among them
    searched: Mapping[str, Values] = field(default_factory=dict)
    late: Mapping[str, Any] | None = None  # the options under which an update comes one step late
    # the options under which the microbatches of its shape are halves of the requested ones; None for a method that
    # never halves them. See `rpbench.config.sizes`
    halved: Mapping[str, Any] | None = None
    # the option that says into how many segments every sequence is cut; None: it stays whole
    segments: str | None = None
    whole_microbatches: bool = False  # whether every device runs its microbatches through all layers, as replicas do
    # with `whole_microbatches`, the options under which weights come from other devices for every visit, during
    # another computation; None for a method whose weights never do
    gathers: Mapping[str, Any] | None = None
    broken: str = ""  # why the user's file cannot be imported: `entry` raises it, and `entries` leaves it out

    def __post_init__(self) -> None:
        for name in (*self.searched, *(self.late or ()), *(self.halved or ()), *(self.gathers or ())):
            if name not in self.options:
                raise ValueError(f"schedule {self.name} is searched over {name!r}, which is none of its options")

    def pieces(self, options: Mapping[str, Any]) -> int:
        """The number of microbatches of its shape in a requested one: 2 or 1."""
        wanted = self.halved or {}
        return 2 if wanted and all(options.get(name) == value for name, value in wanted.items()) else 1

    def num_segments(self, options: Mapping[str, Any]) -> int:
        """Segments of every sequence, which run like microbatches."""
        return int(options[self.segments]) if self.segments else 1

    def values(self, name: str, num_ranks: int, num_microbatches: int) -> tuple[Any, ...]:
        """The values of an option that a search tries for these sizes, the usual first; ValueError without any."""
        given = self.searched[name]
        values = given(num_ranks, num_microbatches) if callable(given) else given
        if not values:
            raise ValueError(f"schedule {self.name}: searched option {name} has no values; give at least 1")
        return tuple(values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name: an entry may hold functions that cannot be pickled."""
        return entry, (self.name,)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the generator with their defaults."""
        parameters = inspect.signature(self.generate).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def steps(self, num_microbatches: int, num_steps: int, replicas: Sequence[int] | None = None) -> tuple[int, int]:
        """Microbatches of an optimizer step and number of steps, for the requested ones.

        Raises ValueError if rounds, or replicated stages, cannot divide the microbatches evenly.
        """
        if num_microbatches % self.rounds:
            raise ValueError(
                f"num_microbatches={num_microbatches}: {self.name} takes those of an update in {self.rounds} rounds, "
                f"so that they must be a multiple of {self.rounds}; take num_microbatches="
                f"{num_microbatches + -num_microbatches % self.rounds}"
            )
        if not self.steps_each_microbatch:
            return num_microbatches // self.rounds, num_steps * self.rounds
        window, total = math.lcm(*map(int, replicas or (1,))), num_microbatches * num_steps
        if window and total % window:
            raise ValueError(
                f"num_microbatches={num_microbatches}, num_steps={num_steps}: {self.name} steps after every {window} "
                f"microbatches with replicas {list(replicas or ())}, which must divide their number, {total}; "
                f"take num_microbatches={max(1, round(num_microbatches / window)) * window}"
            )
        return (window, total // window) if window else (1, total)

    def build(self, shape: Shape, costs: StageCosts | None = None, /, **options: Any) -> Schedule:
        """The schedule for a shape, under this name; `costs` are for orders that depend on times, by default units.

        Raises ValueError, with the value, the rule and a way out, if the shape or an option does not fit.
        """
        unknown = set(options) - set(self.options)
        if unknown:
            known = ", ".join(self.options) or "none"
            raise ValueError(f"schedule {self.name} has no option {sorted(unknown)[0]!r}; its options: {known}")
        given = (shape, costs or unit_costs(shape)) if self.needs_costs else (shape,)
        is_ours = self.generate.__module__.startswith(_PROJECT)
        found = self.generate(*given, **options) if is_ours else self._of_others(*given, **options)
        return found if found.name == self.name else replace(found, name=self.name)

    def _of_others(self, *given: Any, **options: Any) -> Schedule:
        """The schedule of a user's generator; errors name its file."""
        file = inspect.getfile(self.generate)
        try:
            found = self.generate(*given, **options)
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1].line or ""
            if isinstance(error, ValueError) and not isinstance(error, ScheduleError) and "raise " in last:
                raise  # a shape that it refuses, not an error in it
            raise GeneratorError(_error_sentence(file, error)) from None
        _check_returned(f"{file}: {self.generate.__name__} of schedule {self.name}", found, given[0])
        return found


def _check_returned(who: str, found: Any, shape: Shape) -> None:
    """Refuse results that readers of schedules cannot take: a search reads many orders before it checks any."""
    from rpbench.ir.checks.check import checked_actions

    if not (isinstance(found, Schedule) and all(_is_action(each) for _, _, row in found.items() for each in row)):
        raise GeneratorError(
            f"{who} returned {found!r:.60}; a generator returns a Schedule of actions, as in return Schedule(shape, "
            "rows), and stages and microbatches are whole numbers"
        )
    sizes = [(each.num_stages, each.num_ranks) for each in (shape, found.shape)]
    if sizes[0] != sizes[1]:
        raise GeneratorError(
            f"{who} is asked for {sizes[0][0]} stages on {sizes[0][1]} ranks and returned {sizes[1][0]} on "
            f"{sizes[1][1]}; return Schedule(shape, rows)"
        )
    checked_actions(found)


def _is_action(each: Any) -> bool:
    if not isinstance(each, Action):
        return False
    stage: Any = each.stage
    microbatch: Any = each.microbatch
    return isinstance(stage, Integral) and isinstance(microbatch, Integral | None)


_entries: dict[str, Entry] = {}


def schedule(name: str, *, source: str, **traits: Any) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register the decorated generator under `name`; `traits` are fields of `Entry`."""

    def register(generate: Callable[..., Schedule]) -> Callable[..., Schedule]:
        if name in _entries and _entries[name].generate.__module__ != generate.__module__:
            raise ValueError(f"two schedules are named {name!r}; a name belongs to one file")
        _entries[name] = Entry(name, source, generate, **traits)
        return generate

    return register


def entries() -> Mapping[str, Entry]:
    """Every registered schedule by name, except those that need an extra.

    Raises ValueError for an installed package's module that cannot be imported; a user's broken file is left out, with
    a line on stderr.
    """
    return _usable_entries(_files())


def offered() -> Mapping[str, Entry]:
    """Every schedule that can be named, also one that needs an extra or is broken; ValueError as of `entries`."""
    return _entries_of(_files())


def _files() -> tuple[Path, ...]:
    return tuple(path for place in places() for path in sorted((place / "schedule").glob("*.py")))


@cache
def _usable_entries(files: tuple[Path, ...]) -> Mapping[str, Entry]:
    found = _entries_of(files).items()
    return MappingProxyType({name: each for name, each in found if each.extra is None and not each.broken})


@cache
def _entries_of(files: tuple[Path, ...]) -> Mapping[str, Entry]:
    """The project's schedules, and those of some files and of installed packages."""
    modules = set()
    for package_name in PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.walk_packages(package.__path__, f"{package_name}."):
            if not module.ispkg and not module.name.startswith(_ADAPTERS):
                modules.add(importlib.import_module(module.name).__name__)
    own = {_module_of(path) for path in files}
    for name, each in list(_entries.items()):  # drops those of folders that are no longer in use
        if each.generate.__module__.startswith(_OWN) and each.generate.__module__ not in own:
            del _entries[name]
    broken: dict[str, Entry] = {}
    for path in files:
        try:
            modules.add(_imported(path))
        except ValueError as error:
            print(f"rpbench: left out: {plain(str(error))}", file=sys.stderr)
            broken |= {name: Entry(name, str(path), Schedule, broken=str(error)) for name in _names_in(path)}
    for point in entry_points(group=GROUP):
        load = partial(importlib.import_module, point.value)
        modules.add(_checked(f"entry point {point.name} of {GROUP}", load).__name__)
    found = broken | {name: each for name, each in _entries.items() if each.generate.__module__ in modules}
    return MappingProxyType(dict(sorted(found.items())))


_OWN = "rpbench_own_"
FRAMES = 8  # calls that are shown of an error in a user's file


def _module_of(path: Path) -> str:
    return f"{_OWN}{hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]}_{path.stem}"


def _names_in(path: Path) -> set[str]:
    """The names under which a file that cannot be imported is asked for: its own, and those that it registers."""
    return {path.stem, *re.findall(r"""@schedule\(\s*["']([^"']+)""", path.read_text(errors="replace"))}


def _imported(path: Path) -> str:
    """Import a user's schedule file; the name of its module."""
    name = _module_of(path)

    def load() -> str:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            for each in [each for each, found in _entries.items() if found.generate.__module__ == name]:
                del _entries[each]
            raise
        return name

    return _checked(str(path), load)


def _checked(what: str, load: Callable[[], Loaded]) -> Loaded:
    """The result of `load`; ValueError with file and line for an error in the user's code."""
    try:
        return load()
    except (Exception, SystemExit) as error:  # a script may end the program when imported
        raise ValueError(_error_sentence(what, error)) from None


def _error_sentence(what: str, error: Exception | SystemExit) -> str:
    frames = list(traceback.extract_tb(error.__traceback__))
    numbers = [number for number, frame in enumerate(frames) if frame.filename == what]
    line = getattr(error, "lineno", None) or (frames[numbers[-1]].lineno if numbers else None)
    where = f"{what}, line {line}" if line else what
    from_there = frames[numbers[0] :][-FRAMES:] if numbers else []
    calls = [f"\n  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in from_there]
    return f"{where}: {type(error).__name__}: {error}; mend the file or move it away{''.join(calls)}"


def sources(found: Entry) -> list[Path]:
    """The files of a user's generator: its module, or all modules of its package; none for the project's own."""
    module = found.generate.__module__
    if module.startswith(_PROJECT):
        return []
    file = Path(inspect.getfile(found.generate))
    root = sys.modules[module.partition(".")[0]]
    folders = [Path(folder) for folder in getattr(root, "__path__", ())]
    return sorted(path for folder in folders for path in folder.rglob("*.py")) or [file]


def entry(name: str) -> Entry:
    """The schedule of that name; ValueError with the nearest known name, or the new name of a renamed schedule.

    Raises GeneratorError if its file cannot be imported.
    """
    known = offered()
    if name in known and (why := known[name].broken):
        raise GeneratorError(why)
    if name in known:
        return known[name]
    if name in RENAMED:
        raise ValueError(renamed(name))
    raise ValueError(unknown_name("schedule", name, known))


def renamed(name: str) -> str:
    """The message for a former name."""
    now, why = RENAMED[name]
    return f"schedule={name} is called schedule={now} now: {why}"


def check_known(what: str, name: object, known: Iterable[str]) -> None:
    """Raise ValueError for a name that is not among the known ones, with the nearest."""
    if name not in (names := list(known)):
        raise ValueError(unknown_name(what, str(name), names))


def unknown_name(what: str, name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The message for an unknown name: the value, the nearest name and all known ones."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"unknown {what} {name!r}{hint} Known: {', '.join(known) or 'none'}"
