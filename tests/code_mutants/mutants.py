"""Semantic mutants of the code, drawn on the syntax tree: one fault each, in what the code computes.

Text of messages, docstrings, annotations, decorators, assertions and what is raised or logged stay as they are.
"""

import ast
import copy
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .reach import PACKAGES, ROOT, sources

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "all": "any", "any": "all"}
_SILENT = ("logging", "logger", "log", "warnings", "print")
_KEPT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.MatchValue)


@dataclass(frozen=True)
class Fault:
    """One fault. `place` counts the equal ones of a function, so that a mutant is found again when lines move."""

    file: str
    function: str  # the outermost function, with its class; empty in what a module does when imported
    kind: str
    old: str
    new: str
    place: int
    line: int

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.old, self.new, self.place

    @property
    def package(self) -> str:
        return self.file.split("/")[1]


@dataclass(frozen=True)
class Mutant(Fault):
    """A fault, where it goes in the source."""

    block: int  # the line where its block of statements begins; 0 in what a module does when imported
    span: tuple[int, int]  # in bytes

    def applied(self, source: bytes) -> bytes:
        begin, end = self.span
        return source[:begin] + self.new.encode() + source[end:]


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Every mutant of a file, in its order."""
    return list(_Walk(path, root).found())


def drawn(seed: int, each: int, root: Path = ROOT) -> list[Mutant]:
    """The same number from each package: first a kind, then one of that kind; no two on one line."""
    chosen: list[Mutant] = []
    for package in PACKAGES:
        chance = random.Random(f"{seed} {package}")
        kinds: dict[str, list[Mutant]] = defaultdict(list)
        for path in sources(root):
            if path.is_relative_to(root / "rpbench" / package):
                for mutant in mutants_of(path, root):
                    kinds[mutant.kind].append(mutant)
        lines: set[tuple[str, int]] = set()
        while len(lines) < each:
            of_kind = kinds[chance.choice(sorted(kinds))]
            mutant = of_kind.pop(chance.randrange(len(of_kind)))
            kinds = {kind: left for kind, left in kinds.items() if left}
            if (mutant.file, mutant.line) not in lines:
                lines.add((mutant.file, mutant.line))
                chosen.append(mutant)
    return chosen


class _Walk:
    """Goes through a file and finds what can be changed."""

    def __init__(self, path: Path, root: Path) -> None:
        self._file = str(path.relative_to(root))
        self._source = path.read_bytes()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._seen: dict[tuple[str, str, str], int] = defaultdict(int)

    def found(self) -> Iterator[Mutant]:
        yield from self._inside(ast.parse(self._source), (), "", 0, [])

    def _inside(
        self, node: ast.AST, classes: tuple[str, ...], function: str, block: int, returns: list[ast.expr]
    ) -> Iterator[Mutant]:
        if isinstance(node, _KEPT) or _is_silent(node):
            return
        if isinstance(node, ast.ClassDef) and not function:
            classes = (*classes, node.name)
        if isinstance(node, ast.FunctionDef):
            function = function or ".".join((*classes, node.name))
            returns = _returns(node)
        for target, kind, new in _changes(node, returns):
            yield self._mutant(target, kind, new, function, block)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            statements = bool(children) and isinstance(children[0], ast.stmt)
            own = children[0].lineno if statements and function and not isinstance(node, ast.ClassDef) else block
            for child in children:
                if isinstance(child, ast.AST):
                    yield from self._inside(child, classes, function, own, returns)

    def _mutant(self, node: ast.AST, kind: str, new: str, function: str, block: int) -> Mutant:
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        old = self._source[begin:end].decode()
        place = self._seen[function, old, new]
        self._seen[function, old, new] += 1
        return Mutant(self._file, function, kind, old, new, place, node.lineno, block, (begin, end))


def _is_silent(node: ast.AST) -> bool:
    """What says something, and computes nothing; what only types see."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return ast.unparse(node.value.func).split(".")[0] in _SILENT


def _returns(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function returns, without the functions inside it."""
    found, waiting = [], list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Return) and node.value is not None:
            found.append(node.value)
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            waiting += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)
            ]
    return found


def _changes(node: ast.AST, returns: list[ast.expr]) -> Iterator[tuple[ast.AST, str, str]]:
    """What is replaced, the kind of the change and the new text, for every change of one node."""
    match node:
        case ast.Compare(ops=[operator]):
            yield node, "comparison flipped", _with(node, ops=[_COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC and not _is_text(node):
            kind = "+ and -" if isinstance(operator, ast.Add | ast.Sub) else "* and /"
            yield node, kind, _with(node, op=_ARITHMETIC[type(operator)]())
        case ast.BoolOp(op=operator):
            yield node, "and and or", _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield node, "min and max", _with(node, func=ast.Name(_CALLS[name]))
        case ast.Call(args=[first, second, *rest]) if _swaps(node):
            yield node, "arguments swapped", _with(node, args=[second, first, *rest])
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if isinstance(value, int):
                yield node, "off by one", repr(value + 1)
            if value not in (0, 1):
                yield node, "constant doubled", repr(2 * value)
        case ast.Return(value=ast.expr() as value):
            other = next((each for each in returns if ast.dump(each) != ast.dump(value)), None)
            if other is not None:
                yield node, "sibling returned", f"return {ast.unparse(other)}"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "statement dropped", "pass"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Constant):
            yield test, "condition negated", f"(not ({ast.unparse(test)}))"
        case ast.comprehension(ifs=[test, *_]):
            yield test, "condition negated", f"(not ({ast.unparse(test)}))"


def _with(node: ast.AST, **fields: object) -> str:
    changed = copy.deepcopy(node)
    for field, value in fields.items():
        setattr(changed, field, value)
    return f"({ast.unparse(ast.fix_missing_locations(changed))})"


def _is_text(node: ast.BinOp) -> bool:
    """Texts and lists are joined with +, and have no other arithmetic."""
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _swaps(node: ast.Call) -> bool:
    first, second = node.args[:2]
    starred = any(isinstance(each, ast.Starred) for each in (first, second))
    known = ast.unparse(node.func) in ("isinstance", "getattr", "hasattr", "setattr", "issubclass", "cast")
    return not starred and not known and ast.dump(first) != ast.dump(second)
