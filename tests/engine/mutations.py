"""Mutations of schedule texts: any token, row or header field changed by chance."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from schedule_texts import TORCH, drawn

from rpbench.ir.action import Kind
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import LANES

_TOKEN = re.compile(r"([0-9]+)([A-Z_]+?)(?::([A-Z]))?([0-9]+)?(\.[0-9]+)?(@[0-9]+)?(>\w+)?")
_OTHER_LANE = {"compute": "host", "h2d": "d2h", "d2h": "h2d", "net": "compute", "host": "compute"}


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
    if rng.random() < 0.02:
        del found.header[rng.choice(list(found.header))]
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
    stop = place + rng.choice((2, 2, 2, 3, 5))
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
    known = ("ranks", "stages", "backward_stages", "microbatches", "steps", "parts", "fused", "keeps_every")
    name = rng.choice([name for name in known if name in text.header])
    text.header[name] = _number(text.header[name], rng)


def _field(text: Text, rng: random.Random) -> None:
    """A field of the header that this schedule has no need of."""
    extra = {
        "keeps_every": rng.choice("123"),
        "outer_replicas": rng.choice("123"),
        "sequence_parallel": "1",
        "late_rest": rng.choice(("0.1/2/0/1/0", "0.5/1/2/0/1", "1.0/1/0/1/1", "0.0/2/2/1/0")),
    }
    name = rng.choice(list(extra))
    if name in text.header and name == "sequence_parallel":
        del text.header[name]
    else:
        text.header[name] = extra[name]


def _drop_kind(text: Text, rng: random.Random) -> None:
    """All actions of a kind and object, as of a schedule that forgets to move something."""
    tokens, place = _any(text, rng)
    match = _TOKEN.fullmatch(tokens[place])
    if match is None:
        return
    for row, (head, own) in enumerate(text.rows):
        text.rows[row] = head, [token for token in own if not _is_like(token, match)]


def _is_like(token: str, other: re.Match[str]) -> bool:
    match = _TOKEN.fullmatch(token)
    return match is not None and match.group(2, 3) == other.group(2, 3)


def _swap_rows(text: Text, rng: random.Random) -> None:
    """What two rows hold, exchanged."""
    one, other = rng.randrange(len(text.rows)), rng.randrange(len(text.rows))
    (head, tokens), (second, others) = text.rows[one], text.rows[other]
    text.rows[one], text.rows[other] = (head, others), (second, tokens)


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
    _field, _drop_kind, _drop_kind, _swap_rows,
)  # fmt: skip


# --- tables of torch ---------------------------------------------------------------------------------------------

_TORCH_TOKENS = ("0SEND_F0", "1RECV_F0", "0UNSHARD", "0F", "F0", "", '"', '"0F0', "\r", "\x00", "0B0;0F0")
_ENDS = ("\n", "\r\n", "\r", "\n\n", ",\n")


def mutated_table(table: str, rng: random.Random) -> str:
    """A table of torch with one to three changes, of its tokens or of how the file is written."""
    found = Text({}, [("", row.split(",")) for row in table.split("\n")])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if found.places():
            rng.choice(_TABLE_CHANGES)(found, rng)
    rows = [",".join(tokens).replace("_F_B", "").replace(")OVERLAP", ")OVERLAP_F_B") for _, tokens in found.rows]
    return (rng.choice(_ENDS) if rng.random() < 0.2 else "\n").join(rows)


def _foreign(text: Text, rng: random.Random) -> None:
    """Something else for a token, or beside it."""
    tokens, place = _any(text, rng)
    tokens[place] = rng.choice((f"{{}}{tokens[place]}", f"{tokens[place]}{{}}", "{}")).format(rng.choice(_TORCH_TOKENS))


def _drop_row(text: Text, rng: random.Random) -> None:
    del text.rows[rng.randrange(len(text.rows))]


_TABLE_CHANGES: tuple[Callable[[Text, random.Random], None], ...] = (
    _swap_near, _swap_near, _move_near, _move_near, _in_token, _in_token, _overlap, _overlap, _swap_far, _move_far,
    _drop, _repeat, _reorder_rows, _foreign, _foreign, _drop_row,
)  # fmt: skip


def mutants(seed: int, number: int) -> Iterator[tuple[str, str]]:
    """Some mutated texts of schedules drawn by chance, each with what it was."""
    rng = random.Random(seed)
    for _ in range(number):
        name, base = drawn(rng)
        change = mutated_table if name.endswith(TORCH) else mutated
        text = change(base, rng)
        for _ in range(20):
            if text != base:  # as where two equal tokens changed places
                break
            text = change(base, rng)
        yield name, text
