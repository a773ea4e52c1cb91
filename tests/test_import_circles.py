"""No module imports, however indirectly, one that imports it: not within a function, nor for a type."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("rpbench", "baselines", "analysis")
# To go: what a run assembles asks a run for its profile.
ALLOWED = [{"rpbench.run.assemble", "rpbench.run.layer_times", "rpbench.run.modes.train"}]


def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package by that of its folder."""
    files = (file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): ROOT / file for file in files}


@cache
def imports(source: str) -> list[tuple[str, str]]:
    """The (module, name) pairs that a source imports, wherever in it; no name where the module itself is."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [(text.value.rstrip("."), "") for text in ast.walk(node) if isinstance(text, ast.Constant)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "imports are absolute here"
            found += [(node.module, alias.name) for alias in node.names]
    return found


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules it imports: `from package import name` means the module of that name, if there is one."""
    graph = {}
    for module, source in sources.items():
        pairs = ((f"{other}.{name}", other) for other, name in imports(source))
        graph[module] = {full if full in sources else other for full, other in pairs} & sources.keys() - {module}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of modules that all import each other: each reaches, and is reached by, every other."""
    reached = {module: _reached(graph, module) for module in graph}
    groups = {frozenset(other for other in found if module in reached[other]) for module, found in reached.items()}
    return [set(group) for group in groups if group]


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += graph[module]
    return found


def test_no_module_imports_itself_by_a_detour():
    found = circles(import_graph({name: file.read_text(encoding="utf-8") for name, file in modules().items()}))
    assert [sorted(group) for group in found if not any(group <= allowed for allowed in ALLOWED)] == []


def test_nothing_reaches_analysis_from_below():
    """Not by a name in a string either, which import-linter does not see."""
    below = {name: file for name, file in modules().items() if name.startswith(("rpbench", "baselines"))}
    climbs = {
        name
        for name, file in below.items()
        for module, _ in imports(file.read_text(encoding="utf-8"))
        if module.partition(".")[0] == "analysis"
    }
    assert climbs == {"rpbench.__main__"}, "the one place that puts the layers together"
    assert imports("importlib.import_module('analysis.report').build") == [("analysis.report", "")]


def test_a_circle_is_found_wherever_it_hides():
    sources = {
        "a": "from a.one import x",
        "a.one": "def f():\n    from a import two",
        "a.two": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.three",
        "a.three": "from a.one import y",
        "a.four": "from a import three",
    }
    assert circles(import_graph(sources)) == [{"a.one", "a.two", "a.three"}]
    assert circles(import_graph(sources | {"a.three": "from a import x"})) == [{"a", "a.one", "a.two", "a.three"}]
