"""Bending: how a sound document becomes one that is not, or only nearly is."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

import yaml

CANARY = "canary-8d1f"  # the value of the environment's RPBENCH_CANARY; in no output
BAIT = "outside"  # a folder beside the document's, which no reader has a reason to look into

WORDS = (
    "", " ", "0", "-1", "null", "~", "true", "1e309", "-0.0", "NaN", "9" * 400, "1_000", "0x10", "٣", "²", "1.5",
    "../../outside/secret.json", "../outside", "/dev/zero", "/etc/passwd", "a/b", ".", "..", "~", "C:\\con", "a" * 5000,
    "${oc.env:RPBENCH_CANARY}", "${model}", "${", "$(id)", "{{7*7}}", "%s%n", "<script>alert(1)</script>", "'\"`", "\\",
    "\x1b[31mred\x1b[0m", "\u202egpj", "\ud7ff", "\x00", "\ufeff", "a\nb", "a,b", "a=b", "[1,2]", "{a: 1}", "é" * 50,
    "!!python/object/apply:os.system ['true']", "&a [*a]", "2024-01-01", "1:30", "=cmd()", "0F0", "999999F0",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e308, 1.5)
ODD = (float("nan"), float("inf"), float("-inf"), None, True, False, [], {}, [[]], {"": {}}, [None], [1, "a", None])

MOST_HOLDERS = 2000

Bend = Callable[[bytes, Random, bytes], bytes]


def bent(document: bytes, form: str, chance: Random, other: bytes) -> bytes:
    """The document after one to four changes that suit its form; `other` is one of the same kind."""
    bends = (*BENDS.get(form, ()), bend_text, bend_bytes)
    weights = [6] * (len(bends) - 2) + [3, 1]
    for _ in range(chance.choice((1, 1, 1, 2, 2, 4))):
        document = chance.choices(bends, weights)[0](document, chance, other)
    return document


def bend_bytes(document: bytes, chance: Random, other: bytes) -> bytes:
    """Flip, cut, insert, double: what disks and hands do."""
    at, end = sorted(chance.randrange(len(document) + 1) for _ in range(2))
    end = min(end, at + chance.choice((1, 4, 100, 10**6)))
    piece = bytes(chance.randrange(256) for _ in range(chance.choice((1, 1, 4, 40))))
    middle = chance.choice(
        (b"", piece, document[at:end] * 2, other[at:end], b"\x00", b"\xff\xfe", b"\r\n", b"\xef\xbb\xbf")
    )
    return document[:at] + middle + document[end:] if chance.random() < 0.9 else document[:at]


def bend_text(document: bytes, chance: Random, other: bytes) -> bytes:
    """Put a word in the place of another, or lines in another order."""
    text = document.decode("utf-8", "surrogateescape")
    lines = text.split("\n")
    if chance.random() < 0.3 and len(lines) > 1:
        a, b = chance.randrange(len(lines)), chance.randrange(len(lines))
        lines[a : a + 1] = chance.choice(([lines[b]], [], [lines[a], lines[b]], [lines[a]] * 50, [" " + lines[a]]))
        return "\n".join(lines).encode("utf-8", "surrogateescape")
    places = [i for i, c in enumerate(text) if c.isalnum() and (i == 0 or not text[i - 1].isalnum())]
    if not places:
        return chance.choice(WORDS).encode("utf-8", "replace")
    begin = end = chance.choice(places)
    while end < len(text) and (text[end].isalnum() or text[end] in "._-"):
        end += 1
    words = (chance.choice(WORDS), str(chance.choice(NUMBERS)), text[begin:end] * 2)
    return (text[:begin] + chance.choice(words) + text[end:]).encode("utf-8", "surrogateescape")


def bend_tree(document: bytes, chance: Random, other: bytes) -> bytes:
    """JSON with a value of another type, a key gone, renamed, doubled, or much nesting."""
    try:
        tree = json.loads(document)
    except (ValueError, RecursionError):
        return bend_text(document, chance, other)
    if chance.random() < 0.1:
        return _with_doubled_key(json.dumps(tree), chance)
    if chance.random() < 0.05:
        return _nested(json.dumps(tree), chance)
    try:
        return json.dumps(_changed(tree, chance), ensure_ascii=chance.random() < 0.5).encode("utf-8", "replace")
    except RecursionError:
        return _nested("0", chance)


def bend_lines(document: bytes, chance: Random, other: bytes) -> bytes:
    """JSON lines, one of them bent."""
    lines = document.splitlines() or [b""]
    at = chance.randrange(len(lines))
    lines[at] = bend_tree(lines[at], chance, other)
    return b"\n".join(lines) + b"\n"


def bend_yaml(document: bytes, chance: Random, other: bytes) -> bytes:
    """YAML with its tree bent like JSON's; comments go."""
    try:
        tree = _changed(yaml.safe_load(document), chance)
        return yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "replace")
    except (yaml.YAMLError, RecursionError, ValueError, TypeError):
        return bend_text(document, chance, other)


def bend_tokens(document: bytes, chance: Random, other: bytes) -> bytes:
    """A schedule or a table with cells exchanged, doubled, dropped or numbered otherwise."""
    mark = b"," if document.count(b",") > document.count(b" ") else b" "
    cells = document.split(mark)
    a, b = chance.randrange(len(cells)), chance.randrange(len(cells))
    match chance.randrange(5):
        case 0:
            cells[a], cells[b] = cells[b], cells[a]
        case 1:
            cells.insert(a, cells[b])
        case 2:
            del cells[a]
        case 3:
            cells[a] = cells[a] * 2
        case _:
            digits = [i for i, c in enumerate(cells[a]) if 48 <= c < 58]
            if digits:
                at = chance.choice(digits)
                new = str(chance.choice(NUMBERS)).encode()
                cells[a] = cells[a][:at] + new + cells[a][at + 1 :]
    return mark.join(cells)


def bend_words(document: bytes, chance: Random, other: bytes) -> bytes:
    """A command line with a word gone, doubled, from another, or with another value."""
    words = document.decode("utf-8", "replace").split("\n")
    at = chance.randrange(len(words))
    key, equals, _ = words[at].partition("=")
    strange = chance.choice(other.decode("utf-8", "replace").split("\n"))
    new = chance.choice(([], [words[at]] * 2, [strange], [key + equals + chance.choice(WORDS)], ["+" + words[at]]))
    words[at : at + 1] = [word.replace("\n", " ") for word in new]
    return "\n".join(words).encode("utf-8", "replace")


def _changed(tree: Any, chance: Random) -> Any:
    """The tree with one of its places changed."""
    places = list(_places(tree))
    if not places or chance.random() < 0.03:
        return _leaf(chance)
    holder, key = chance.choice(places)
    match chance.randrange(7):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(chance.choice(WORDS))] = holder.pop(key)
        case 2:
            other, place = chance.choice(places)
            holder[key] = deepcopy(other[place])
        case 3 if isinstance(holder, list):
            holder.extend([holder[key]] * chance.choice((1, 2, 300)))
        case 4:
            holder[key] = chance.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
        case _:
            holder[key] = _leaf(chance)
    return tree


def _leaf(chance: Random) -> Any:
    return chance.choice((chance.choice(WORDS), chance.choice(NUMBERS), chance.choice(ODD)))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) of a tree; of what YAML's aliases make of it, each holder once."""
    waiting, seen = [tree], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or len(seen) > MOST_HOLDERS:
            continue
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        if isinstance(node, dict | list):
            seen.add(id(node))
        for key, value in items:
            yield node, key
            waiting.append(value)


def _with_doubled_key(text: str, chance: Random) -> bytes:
    if not text.startswith("{") or text == "{}":
        return text.encode()
    key = chance.choice(list(json.loads(text)))
    return (text[:-1] + f", {json.dumps(key)}: {json.dumps(_leaf(chance))}}}").encode()


def _nested(text: str, chance: Random) -> bytes:
    depth = chance.choice((50, 900, 5000, 100_000))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}")))
    return (opening * depth + text + closing * depth * chance.choice((0, 1))).encode()


BENDS: dict[str, tuple[Bend, ...]] = {
    "json": (bend_tree,),
    "lines": (bend_lines,),
    "yaml": (bend_yaml,),
    "tokens": (bend_tokens,),
    "bytes": (bend_bytes,),
    "lines of words": (bend_words,),
    "text": (),
}
