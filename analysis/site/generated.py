"""What pages take from the program itself: verbs, settings and modules, in the place of a comment on the page."""

import ast
from collections.abc import Callable, Iterator, Mapping
from inspect import getmodule
from pathlib import Path

from analysis.verbs import VERBS
from rpbench.cli import all_verbs
from rpbench.config.configuration import CONF
from rpbench.registry import offered

ROOT = Path(__file__).parents[2]
# Packages in the order of imports, from the bottom.
PACKAGES = (
    "rpbench/ir",
    "rpbench/passes",
    "rpbench/ordering",
    "rpbench/schedules",
    "baselines",
    "rpbench/cost",
    "rpbench/sim",
    "rpbench/models",
    "rpbench/engine",
    "rpbench/torch_runtime",
    "rpbench/plan",
    "rpbench/failures",
    "rpbench/mesh",
    "rpbench/predict",
    "rpbench/advice",
    "rpbench/explain",
    "rpbench/config",
    "rpbench/drawing",
    "rpbench/records",
    "rpbench/tracking",
    "rpbench/run",
    "rpbench/sweep",
    "rpbench/commands",
    "analysis",
)


def filled(text: str) -> str:
    """A page with each of its places filled."""
    for place, make in _PLACES.items():
        if place in text:
            text = text.replace(place, make())
    return text


def _verbs_table() -> str:
    rows = []
    for name, verb in {**all_verbs(), **VERBS}.items():
        words = verb.takes.replace("|", "\\|")
        rows.append(f"| `{name}` | {verb.says} | `{words}` |")
    return "\n".join(["| verb | what it does | its words |", "| --- | --- | --- |", *rows])


def _settings() -> str:
    config = (CONF / "config.yaml").read_text(encoding="utf-8")
    groups = [f"| `{group}` | {_options(group)} |" for group in _groups()]
    table = "\n".join(["| group | options |", "| --- | --- |", *groups])
    says = "`GROUP=OPTION` takes a file of `conf/`, `GROUP.KEY=` changes a key of it."
    return f"```yaml\n{config}```\n\n## Groups\n\n{says}\n\n{table}"


def _groups() -> Iterator[str]:
    for folder in sorted(CONF.iterdir()):
        if folder.is_dir() and folder.name != "schedule":
            yield folder.name
    yield "schedule"


def _options(group: str) -> str:
    names = list(offered()) if group == "schedule" else sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return ", ".join(f"`{name}`" for name in names)


def _modules() -> str:
    parts = []
    for package in PACKAGES:
        rows = "\n".join(f"| `{path.relative_to(ROOT)}` | {_escaped(says)} |" for path, says in _said(ROOT / package))
        parts.append(f"## {package}\n\n| file | what it holds |\n| --- | --- |\n{rows}")
    return "\n\n".join(parts)


def _said(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every module of a package and the first sentence of its docstring."""
    for path in sorted(folder.rglob("*.py")):
        if "notebooks" in path.relative_to(folder).parts:
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if text:
            yield path, " ".join(text.split("\n\n")[0].split())


def _escaped(text: str) -> str:
    return "".join(f"\\{mark}" if mark in "|[]<" else mark for mark in text)


def _further_methods() -> str:
    """Rows of the schedules that the table above has no row for: the first line of their files."""
    told = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    return "\n".join(
        f"| [{name}](methods/{name}.md) | {(getmodule(each.generate).__doc__ or '').partition(chr(10))[0]} |"
        for name, each in offered().items()
        if f"(methods/{name}.md)" not in told
    )


_PLACES: Mapping[str, Callable[[], str]] = {
    "<!-- verbs of the command line -->": _verbs_table,
    "<!-- settings of a run -->": _settings,
    "<!-- modules -->": _modules,
    "<!-- further methods -->": _further_methods,
}
