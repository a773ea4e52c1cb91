"""Mutations of schedule texts: any token, row or header field changed by chance, of every registered schedule."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from nearby import nearby

from rpbench.ir.action import Kind
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import LANES, Schedule, ScheduleError, Shape, Weights, to_text
from rpbench.passes.boundary_lanes import send_over_links
from rpbench.passes.lower import add_steps, lower_communication, split_backward
from rpbench.passes.offload import offload, shard, stream
from rpbench.registry import entries

_TOKEN = re.compile(r"([0-9]+)([A-Z_]+?)(?::([A-Z]))?([0-9]+)?(\.[0-9]+)?(@[0-9]+)?(>\w+)?")
_OTHER_LANE = {"compute": "host", "h2d": "d2h", "d2h": "h2d", "net": "compute", "host": "compute"}


# --- what is mutated ---------------------------------------------------------------------------------------------


def plain(name: str, steps: int) -> Schedule:
    """The order of a registered schedule with its partition, of a few ranks, stages and microbatches."""
    entry = entries()[name]
    if entry.separate_cuts:
        cut = Partition((2, 1), (1, 2, 1), fused=True)
        shape = Shape(2, 2, 3, 3, steps, fused=True)
    else:
        ranks = 3 if entry.chunks == 1 or not entry.looped else 2
        ranks, chunks, microbatches = nearby(name, ranks, 2, 2 if entry.looped else 3)
        cut = symmetric(split_evenly(ranks * chunks, ranks * chunks))
        window, _ = entry.steps(microbatches * entry.rounds, steps)
        shape = Shape(ranks, ranks * chunks, window, num_steps=steps)
        if entry.steps_each_microbatch:
            shape = replace(shape, num_microbatches=1, num_steps=microbatches * steps)
    return entry.build(shape).with_partition(cut)


FORMS: dict[str, Callable[[Schedule], Schedule]] = {
    "plain": lambda order: order,
    "steps": add_steps,
    "host": partial(add_steps, lane="host"),
    "sent": lambda order: lower_communication(add_steps(order)),
    "net": lambda order: lower_communication(add_steps(order), "net"),
    "links": lambda order: send_over_links(add_steps(order), direct=False),
    "split": lambda order: add_steps(split_backward(order)),
    "streamed": lambda order: add_steps(replace(order, weights=Weights.STREAMED)),
    "weights": lambda order: stream(add_steps(order, lane="host"), activations=False),
    "all": lambda order: stream(add_steps(order, lane="host")),
    "offload": lambda order: offload(add_steps(order, lane="host")),
    "shard": lambda order: shard(add_steps(order)),
}


@cache
def bases() -> dict[str, str]:
    """Name and form -> text of every form that a registered schedule takes."""
    found = {}
    for name, entry in entries().items():
        for form, lower in FORMS.items():
            try:
                found[f"{name} {form}"] = to_text(lower(plain(name, 2)))
            except ScheduleError:
                continue
        if entry.lower is not None:
            found[f"{name} lowered"] = to_text(entry.lower(plain(name, 2), prefetch=1, **entry.options))
    return found


# --- a text in pieces --------------------------------------------------------------------------------------------


@dataclass
class Text:
    """Header fields and rows of tokens, to be changed in place."""

    header: dict[str, str]
    rows: list[tuple[str, list[str]]]

    @classmethod
    def of(cls, text: str) -> "Text":
        _, header, *rows = text.splitlines()
        pairs = (pair.partition("=")[::2] for pair in header.removeprefix("# ").split())
        heads = (row.partition(":") for row in rows)
        return cls(dict(pairs), [(head, tokens.split()) for head, _, tokens in heads])

    def __str__(self) -> str:
        header = " ".join(f"{key}={value}" for key, value in self.header.items())
        rows = [" ".join([f"{head}:", *tokens]) for head, tokens in self.rows]
        return "\n".join(["# rpbench-schedule 1", f"# {header}", *rows]) + "\n"

    def places(self) -> list[tuple[int, int]]:
        """Row and place of every token."""
        return [(row, place) for row, (_, tokens) in enumerate(self.rows) for place in range(len(tokens))]


def mutated(text: str, rng: random.Random) -> str:
    """The text with one to three changes."""
    found = Text.of(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not found.places():
            break
        rng.choice(_CHANGES)(found, rng)
    return str(found)


def _any(text: Text, rng: random.Random) -> tuple[list[str], int]:
    row, place = rng.choice(text.places())
    return text.rows[row][1], place


# --- changes of order --------------------------------------------------------------------------------------------


def _swap_near(text: Text, rng: random.Random) -> None:
    tokens, place = _any(text, rng)
    other = min(len(tokens) - 1, place + rng.choice((1, 1, 2, 3)))
    tokens[place], tokens[other] = tokens[other], tokens[place]


def _swap_far(text: Text, rng: random.Random) -> None:
    (tokens, place), (others, other) = _any(text, rng), _any(text, rng)
    tokens[place], others[other] = others[other], tokens[place]


def _move_near(text: Text, rng: random.Random) -> None:
    tokens, place = _any(text, rng)
    moved = tokens.pop(place)
    tokens.insert(max(0, place + rng.randint(-4, 4)), moved)


def _move_far(text: Text, rng: random.Random) -> None:
    tokens, place = _any(text, rng)
    moved = tokens.pop(place)
    _, others = rng.choice(text.rows)
    others.insert(rng.randint(0, len(others)), moved)


def _drop(text: Text, rng: random.Random) -> None:
    tokens, place = _any(text, rng)
    del tokens[place]


def _repeat(text: Text, rng: random.Random) -> None:
    tokens, place = _any(text, rng)
    _, others = rng.choice(text.rows)
    others.insert(rng.randint(0, len(others)), tokens[place])


def _overlap(text: Text, rng: random.Random) -> None:
    tokens, place = _any(text, rng)
    stop = place + rng.choice((2, 2, 2, 3))
    together = [part for token in tokens[place:stop] for part in _parts(token)]
    if rng.random() < 0.3:
        rng.shuffle(together)
    tokens[place:stop] = [f"({';'.join(together)})OVERLAP"]


def _part(text: Text, rng: random.Random) -> None:
    """Let what an OVERLAP holds stand one after the other."""
    held = [(tokens, place) for _, tokens in text.rows for place, token in enumerate(tokens) if token[0] == "("]
    if held:
        tokens, place = rng.choice(held)
        tokens[place : place + 1] = _parts(tokens[place])


def _parts(token: str) -> list[str]:
    return token[1 : -len(")OVERLAP")].split(";") if token.endswith(")OVERLAP") else [token]


def _to_lane(text: Text, rng: random.Random) -> None:
    """Move a token to another lane of its device, which may be a new one."""
    row, place = rng.choice(text.places())
    head, tokens = text.rows[row]
    device, _, _ = head.partition("/")
    other = f"{device}/{rng.choice(LANES)}"
    found = next((tokens for head, tokens in text.rows if head == other), None)
    if found is None:
        found = []
        text.rows.append((other, found))
    moved = tokens.pop(place)
    found.insert(rng.randint(0, len(found)), moved)


def _rename_lane(text: Text, rng: random.Random) -> None:
    row = rng.randrange(len(text.rows))
    head, tokens = text.rows[row]
    device, _, lane = head.partition("/")
    text.rows[row] = f"{device}/{rng.choice([*LANES, _OTHER_LANE.get(lane, 'net')])}", tokens


def _reorder_rows(text: Text, rng: random.Random) -> None:
    rng.shuffle(text.rows)


# --- changes of a token ------------------------------------------------------------------------------------------


def _in_token(text: Text, rng: random.Random) -> None:
    """Change one field of a token, or of one that an OVERLAP holds."""
    tokens, place = _any(text, rng)
    parts = _parts(tokens[place])
    number = rng.randrange(len(parts))
    parts[number] = _changed(parts[number], rng)
    tokens[place] = f"({';'.join(parts)})OVERLAP" if len(parts) > 1 else parts[0]


def _changed(token: str, rng: random.Random) -> str:
    match = _TOKEN.fullmatch(token)
    if match is None:
        return token
    stage, kind, what, microbatch, part, version, peer = match.groups()
    field = rng.choice(("stage", "kind", "what", "microbatch", "part", "version", "version", "version", "peer", "peer"))
    if field == "stage":
        stage = _number(stage, rng)
    elif field == "kind":
        kind = rng.choice([other.name for other in Kind])
    elif field == "what":
        what = rng.choice([None, *"PGOA"])
    elif field == "microbatch":
        microbatch = rng.choice([None, _number(microbatch or "0", rng), _number(microbatch or "0", rng)])
    elif field == "part":
        part = rng.choice([None, ".1", ".2"])
    elif field == "version":
        version = rng.choice([None, "@0", "@1", "@2", "@3", "@99"])
    else:
        peer = rng.choice([None, ">0", ">1", ">2", ">103", ">host"])
    found = f"{stage}{kind}" + (f":{what}" if what else "") + (microbatch or "")
    return found + (part or "") + (version or "") + (peer or "")


def _number(digits: str, rng: random.Random) -> str:
    return str(max(0, int(digits) + rng.choice((-2, -1, 1, 2, 100))))


# --- changes of the header ---------------------------------------------------------------------------------------


def _policy(text: Text, rng: random.Random) -> None:
    text.header["policy"] = rng.choice([policy.value for policy in Policy])


def _weights(text: Text, rng: random.Random) -> None:
    text.header["weights"] = "streamed" if text.header["weights"] == "bound" else "bound"


def _placement(text: Text, rng: random.Random) -> None:
    ranks, stages = int(text.header["ranks"]), int(text.header["stages"])
    everywhere = "+".join(map(str, range(ranks)))
    holders = text.header["placement"].split(",") if text.header["placement"] != "-" else [everywhere] * stages
    holders[rng.randrange(len(holders))] = rng.choice([str(rng.randrange(ranks + 1)), everywhere, everywhere])
    text.header["placement"] = rng.choice(["-", ",".join(holders), ",".join([everywhere] * stages)])


def _partition(text: Text, rng: random.Random) -> None:
    cuts = re.split(r"(\D+)", text.header["partition"])
    numbers = [place for place, found in enumerate(cuts) if found.isdigit()]
    if numbers:
        give, take = rng.choice(numbers), rng.choice(numbers)
        if int(cuts[give]):
            cuts[give], cuts[take] = str(int(cuts[give]) - 1), str(int(cuts[take]) + (give != take))
    text.header["partition"] = rng.choice(["".join(cuts), "".join(cuts), "-"])


def _size(text: Text, rng: random.Random) -> None:
    name = rng.choice(("ranks", "stages", "backward_stages", "microbatches", "steps", "parts", "fused"))
    text.header[name] = _number(text.header[name], rng)


def _regroup(text: Text, rng: random.Random) -> None:
    """The same microbatches in other steps."""
    text.header["microbatches"], text.header["steps"] = text.header["steps"], text.header["microbatches"]


def _flag(text: Text, rng: random.Random) -> None:
    name = rng.choice(("head_shards", "tensor_parallel"))
    if name in text.header:
        del text.header[name]
        return
    value = text.header["ranks"] if name == "head_shards" else "1"
    fields = list(text.header.items())
    place = 8 + ("head_shards" in text.header)
    text.header = dict([*fields[:place], (name, value), *fields[place:]])


_CHANGES: tuple[Callable[[Text, random.Random], None], ...] = (
    *(_swap_near,) * 5,
    *(_move_near,) * 5,
    *(_in_token,) * 6,
    *(_overlap,) * 5,
    _swap_far, _move_far, _drop, _repeat, _part, _to_lane, _to_lane, _rename_lane, _reorder_rows,
    _policy, _policy, _policy, _weights, _weights, _placement, _partition, _size, _regroup, _flag,
)  # fmt: skip


def mutants(seed: int, number: int) -> Iterator[tuple[str, str]]:
    """Some mutated texts of every base in turn, each with what it was."""
    rng = random.Random(seed)
    names = sorted(bases())
    rng.shuffle(names)
    for place in range(number):
        name = names[place % len(names)]
        text = mutated(bases()[name], rng)
        while text == bases()[name]:  # as where two equal tokens changed places
            text = mutated(bases()[name], rng)
        yield name, text
