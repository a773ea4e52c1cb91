"""Schedules to be mutated: any registered one, of any small shape, with its options, in any form that passes make."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from cases import cut
from nearby import nearby

from rpbench.ir.action import Action, Kind
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights, to_text
from rpbench.passes.boundary_lanes import send_over_links
from rpbench.passes.lower import add_steps, lower_communication, split_backward
from rpbench.passes.offload import offload, shard, stream
from rpbench.passes.recomputation import checkpoint
from rpbench.registry import Entry, entries
from rpbench.torch_runtime.formats.tables import to_csv

Options = dict[str, Any]

PERS = ("visit", "step", None)
# Options of generators that are not searched, and values worth a look.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "topk": (0.0, 0.1, 0.5, 1.0),
    "update_interval": (1, 2, 3),
    "select_interval": (0, 2, 3),
    "num_warmup_steps": (0, 1, 2),
    "backward_slots": (1, 2),
    "base": ("1f1b", "gpipe", "chimera"),
    "checkpoint_interval": (1, 2, 3),
    "delayed": (0.5,),
    "group_size": (1, 2, 3),
    "in_flight": (1, 2, 3),
    "least_gap": (1, 2),
    "num_segments": (1, 2, 3),
    "preposed": (1, 2),
    "replicas": ([1, 2], [2, 1], [2], [1, 1, 2]),
    "stagger": (1, 3),
}


def plain(name: str, rng: random.Random) -> tuple[Schedule, Options]:
    """The order of a registered schedule with its partition, of a few ranks, stages and microbatches; its options."""
    entry, steps, layers = entries()[name], rng.choice((1, 2, 2, 3)), rng.randint(1, 5)
    if entry.separate_cuts:
        forward, backward, top = rng.randint(1, 3), rng.randint(1, 4), rng.randint(0, layers)
        top = layers if backward == 1 else top
        below = cut(layers - top, backward - 1, rng) if backward > 1 else ()
        layers_of = Partition(cut(layers - top, forward, rng), (*below, top), fused=True)
        shape = Shape(rng.randint(1, 4), forward, rng.randint(1, 5), backward, steps, fused=True)
    else:
        most = 4 if entry.chunks == 1 or not entry.looped else 3
        ranks, chunks, microbatches = _near(
            name, rng.randint(1, most), rng.randint(1, 2), rng.randint(1, 4 if entry.looped else 6)
        )
        layers_of = symmetric(cut(layers, ranks * chunks, rng))
        window, _ = entry.steps(microbatches * entry.rounds, steps)
        shape = Shape(ranks, ranks * chunks, window, num_steps=steps)
        if entry.steps_each_microbatch:
            shape = replace(shape, num_microbatches=1, num_steps=microbatches * steps)
    options = _options(entry, shape, rng)
    return entry.build(shape, **options).with_partition(layers_of), options


@cache
def _near(name: str, ranks: int, chunks: int, microbatches: int) -> tuple[int, int, int]:
    """A shape that a schedule takes, the nearest above; or else its usual one."""
    try:
        return nearby(name, ranks, chunks, microbatches)
    except ValueError:
        return nearby(name, 2, 2, 2)


def _options(entry: Entry, shape: Shape, rng: random.Random) -> Options:
    """Options, some with another value than the default; none that the shape does not take."""
    found = entry.options
    for option, default in entry.options.items():
        values = OPTIONS.get(option, (not default,) if isinstance(default, bool) else ())
        if option in entry.searched and not values:
            values = entry.values(option, shape.num_ranks, shape.num_microbatches)
        if values and rng.random() < 0.4:
            tried = found | {option: rng.choice(values)}
            try:
                entry.build(shape, **tried)
            except ValueError:
                continue
            found = tried
    return found


def _streamed(order: Schedule, rng: random.Random) -> Schedule:
    order = replace(order, weights=rng.choice((order.weights, Weights.STREAMED)))
    activations, spill = rng.choice(((False, False), (True, False), (True, True)))
    return stream(add_steps(order, lane="host"), prefetch=rng.randint(0, 2), activations=activations, spill=spill)


def _offloaded(order: Schedule, rng: random.Random) -> Schedule:
    gradients, parameters, stepped = rng.choice(PERS[:2]), rng.choice(PERS), add_steps(order, lane="host")
    return offload(stepped, gradients=gradients, parameters=parameters, prefetch=rng.randint(0, 2))


def _sharded(order: Schedule, rng: random.Random) -> Schedule:
    return shard(order, parameters=rng.choice(PERS), gradients=rng.choice(PERS), prefetch=rng.randint(0, 2))


FORMS: dict[str, Callable[[Schedule, random.Random], Schedule]] = {
    "plain": lambda order, rng: order,
    "steps": lambda order, rng: add_steps(order),
    "host": lambda order, rng: add_steps(order, lane="host"),
    "sent": lambda order, rng: lower_communication(add_steps(order)),
    "net": lambda order, rng: lower_communication(add_steps(order), "net"),
    "links": lambda order, rng: send_over_links(add_steps(order), direct=rng.random() < 0.5),
    "split": lambda order, rng: add_steps(split_backward(order)),
    "streamed": lambda order, rng: add_steps(replace(order, weights=Weights.STREAMED)),
    "moved": _streamed,
    "offload": _offloaded,
    "shard": lambda order, rng: _sharded(add_steps(order), rng),
    "offloaded shards": lambda order, rng: _offloaded(_sharded(order, rng), rng),
    "checkpoints": lambda order, rng: add_steps(_checkpointed(order)),
    "every other input": lambda order, rng: every_other_input(add_steps(order), rng.randint(2, 3)),
}
LOWERED = "lowered"  # as the method itself moves its weights, gradients and activations
TORCH = "torch"  # torch's tables


def _checkpointed(order: Schedule) -> Schedule:
    return replace(order, rows=tuple(checkpoint(order.compute(device)) for device in range(order.shape.num_ranks)))


def every_other_input(order: Schedule, every: int) -> Schedule:
    """Forwards that keep the input of one stage in some; R makes the others before their first backward."""

    def remade(action: Action) -> Iterator[Action]:
        last = (action.stage + 1) % every == 0 or action.stage == order.shape.num_stages - 1
        first = action.stage // every * every
        if action.kind is Kind.B and last:
            yield from (action._replace(kind=Kind.R, stage=stage) for stage in range(first, action.stage))
        yield action

    rows = [
        {lane: tuple(made for action in row for made in remade(action)) for lane, row in lanes.items()}
        for lanes in order.lanes
    ]
    return replace(order, shape=replace(order.shape, keeps_every=every), rows=tuple(rows))


def text_of(name: str, form: str, rng: random.Random) -> str:
    """A schedule of a form as text.

    Raises:
        ValueError: if it has no such form.
    """
    order, options = plain(name, rng)
    if form == TORCH:
        return to_csv(order)
    if form != LOWERED:
        return to_text(FORMS[form](order, rng))
    lower = entries()[name].lower
    if lower is None:
        raise ScheduleError("nothing belongs to the method but its order")
    return to_text(lower(order, prefetch=rng.randint(0, 2), **options))


def drawn(rng: random.Random) -> tuple[str, str]:
    """Any schedule that there is: what it is, and its text."""
    while True:
        name, form = rng.choice(sorted(entries())), rng.choice([*FORMS, *[LOWERED] * 3, TORCH])
        try:
            return f"{name} {form}", text_of(name, form, rng)
        except ValueError:
            continue
