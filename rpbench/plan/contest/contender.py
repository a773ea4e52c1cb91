"""Contenders, on time or with updates one step late, and the space of their choices, one dimension at a time.

    microbatch_sequences   size of a microbatch, at the same tokens a step
    chunks_per_device      stages on a device, where the schedule takes several and both directions are cut alike
    recompute              all | except_last | none | fitting: the layers recomputed (`rpbench.plan.contest.frame`)
    prefetch               visits whose weights are loaded ahead, if weights are loaded for every visit
    schedule.NAME          the schedule's own options, as it declares them (`registry.Entry.searched`)

The cut into stages is searched for each point of the space.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rpbench import registry
from rpbench.passes.recomputation import RECOMPUTES, Recompute
from rpbench.plan.contest.terms import Terms, few_microbatches
from rpbench.registry import Entry

PREFETCHES = (1, 2)
MOST_CHUNKS = 4  # from here on, each number of stages on a device is half as large again
OPTION = "schedule."


@dataclass(frozen=True)
class Contender:
    """A schedule with the options that define the method."""

    entry: Entry = field(hash=False)
    fixed: tuple[tuple[str, Any], ...] = ()  # options that a search does not change, such as those of a late update
    # option -> the only values to try, where what is to run the plan has no others
    within: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The schedule's name with its fixed options: `roundpipe(asynchronous=True)`."""
        inside = ", ".join(f"{key}={value}" for key, value in self.fixed)
        return f"{self.entry.name}({inside})" if inside else self.entry.name


def contender(name: str, *, late: bool = False) -> Contender:
    """The contender of a schedule's name; ValueError for an unknown name, or a late update of a method without one."""
    found = registry.entry(name)
    if late and found.late is None:
        raise ValueError(f"schedule {name} has no late update to choose; leave late out")
    return Contender(found, tuple((found.late or {}).items()) if late else ())


def contenders(names: Iterable[str] | None = None) -> list[Contender]:
    """The named schedules (None: all), then those with a late update once more; ValueError for an unknown name."""
    chosen = list(registry.entries()) if names is None else list(names)
    found = [contender(name) for name in chosen]
    return found + [contender(name, late=True) for name in chosen if registry.entry(name).late]


@dataclass(frozen=True)
class Setting:
    """One value for every dimension of a space."""

    microbatch_sequences: float
    chunks_per_device: int | None  # None if the numbers of stages are found with the cut
    recompute: Recompute
    prefetch: int
    options: tuple[tuple[str, Any], ...] = ()  # the schedule's options, fixed ones included

    def value(self, dimension: str) -> Any:
        name = dimension.removeprefix(OPTION)
        return dict(self.options)[name] if dimension.startswith(OPTION) else getattr(self, name)

    def changed(self, dimension: str, value: Any) -> "Setting":
        name = dimension.removeprefix(OPTION)
        if dimension.startswith(OPTION):
            return replace(self, options=tuple((dict(self.options) | {name: value}).items()))
        return replace(self, **{name: value})

    def option_beside(self, other: "Setting") -> str:
        """The first option whose value differs from that of another setting; empty if there is none."""
        there = dict(other.options)
        return next((name for name, value in self.options if there.get(name) != value), "")

    def overrides(self) -> list[str]:
        """The setting as command-line overrides."""
        found = [f"{OPTION}{name}={'null' if value is None else value}" for name, value in self.options]
        found += [f"recompute={self.recompute}", f"prefetch={self.prefetch}"]
        if self.chunks_per_device is not None:
            found.append(f"chunks_per_device={self.chunks_per_device}")
        return [*found, f"workload.microbatch_sequences={self.microbatch_sequences}"]


@dataclass(frozen=True)
class Space:
    """The dimensions of a contender with the values to try, the usual one first; ValueError if one has no values."""

    dimensions: Mapping[str, tuple[Any, ...]]
    fixed: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name, values in self.dimensions.items():
            if not values:
                raise ValueError(f"{name}: no values to search over; give at least 1")

    def setting(self, values: Mapping[str, Any]) -> Setting:
        """The setting with these values, one for every dimension."""
        options = tuple((name.removeprefix(OPTION), values[name]) for name, _ in self._options())
        plain = {name: value for name, value in values.items() if not name.startswith(OPTION)}
        return Setting(**plain, options=options + self.fixed)

    @property
    def first(self) -> Setting:
        """The setting with the usual value of every dimension."""
        return self.setting({name: values[0] for name, values in self.dimensions.items()})

    def changes(self, setting: Setting) -> Iterator[tuple[str, Setting]]:
        """Every setting that differs in one dimension, with the dimension's name."""
        for name, values in self.dimensions.items():
            for value in values:
                if value != setting.value(name):
                    yield name, setting.changed(name, value)

    def other_options(self, setting: Setting) -> list[Setting]:
        """The setting with one option changed, the last value of each first, since it may switch a method off."""
        values = [(name, value) for name, tried in self._options() for value in reversed(tried)]
        return [setting.changed(name, value) for name, value in values if value != setting.value(name)]

    def smaller(self, setting: Setting) -> list[Setting]:
        """The setting with each smaller microbatch, the largest first."""
        sizes = sorted(self.dimensions["microbatch_sequences"], reverse=True)
        below = (size for size in sizes if size < setting.microbatch_sequences)
        return [setting.changed("microbatch_sequences", size) for size in below]

    def lighter(self, setting: Setting, *, smaller: bool, options: bool) -> list[Setting]:
        """Single changes that may take less memory, the likeliest first: `options` if they choose what leaves a device.

        Smaller microbatches are among them if `smaller`.
        """
        below = self.smaller(setting) if smaller else []
        apart = ("microbatch_sequences", "prefetch")
        changes = sorted(self.changes(setting), key=lambda change: change[0] == "recompute")  # `fitting` takes least
        others = [changed for dimension, changed in changes if dimension not in apart]
        first = [each for each in others if each.options != setting.options] if options else []
        return list(dict.fromkeys([*first, *below, *others]))

    def beginning_at(self, setting: Setting) -> "Space":
        """The space with the setting's values first."""
        first = {name: (setting.value(name), *values) for name, values in self.dimensions.items()}
        return replace(self, dimensions={name: tuple(dict.fromkeys(values)) for name, values in first.items()})

    def restricted(self, **values: Sequence[Any]) -> "Space":
        """The space with these values for some dimensions; ValueError for an unknown one, or without values."""
        for name in values:
            if name not in self.dimensions:
                raise ValueError(f"{name} is no dimension of this space: {', '.join(self.dimensions)}")
        return Space({**self.dimensions, **{name: tuple(each) for name, each in values.items()}}, self.fixed)

    def _options(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        return ((name, values) for name, values in self.dimensions.items() if name.startswith(OPTION))


def terms_for(contender: Contender, terms: Terms) -> Terms:
    """The terms with sizes of few microbatches too, if the contender fills no pipeline in every step."""
    if not terms.may_be_few or not (contender.entry.steps_each_microbatch or contender.entry.tensor_parallel):
        return terms
    few = few_microbatches(terms.sequences_per_step, terms.num_devices)
    return replace(terms, microbatches=(*terms.microbatches, *few), may_be_few=False)


def space_of(contender: Contender, terms: Terms) -> Space:
    """The full space of a contender; settings that its order does not allow are refused when tried."""
    entry, terms = contender.entry, terms_for(contender, terms)
    sizes = sorted(terms.microbatches, key=lambda size: abs(terms.num_microbatches(size) - 2 * terms.num_devices))
    most = terms.num_microbatches(min(sizes))
    fixed = dict(contender.fixed)
    streams = entry.separate_cuts or entry.lower is not None
    searched = {name: entry.values(name, terms.num_devices, most) for name in entry.searched if name not in fixed}
    if terms.cluster.ssd is None:
        searched.pop("ssd", None)  # the machine has none
    others = {name: value for name, value in entry.options.items() if name not in searched and name not in fixed}
    found = Space(
        {
            "microbatch_sequences": tuple(sizes),
            "chunks_per_device": _chunks(contender, terms),
            "recompute": ("all",) if entry.separate_cuts else RECOMPUTES,
            "prefetch": PREFETCHES if streams else (1,),
            **{OPTION + name: values for name, values in searched.items()},
        },
        tuple({**others, **fixed}.items()),
    )
    return found.restricted(**{OPTION + name: values for name, values in contender.within.items()})


def _chunks(contender: Contender, terms: Terms) -> tuple[int | None, ...]:
    """Numbers of stages on a device to try, up to one layer a stage with the head in a stage of its own."""
    entry = contender.entry
    if entry.separate_cuts:
        return (None,)
    if entry.chunks is not None and not entry.more_chunks:
        return (entry.chunks,)
    if not entry.looped:
        return (1,)
    most = -(-(terms.model.num_layers + 1) // terms.num_devices)
    step = entry.chunks or 1
    found, number = list[int](), step
    while number <= most or not found:
        found.append(number)
        number += step if number < MOST_CHUNKS else -(-number // 2)
    return tuple(sorted(found, key=lambda chunks: abs(chunks - 2)))
