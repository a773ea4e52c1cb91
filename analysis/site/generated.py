"""Generated parts of pages: verbs, settings, modules, and each method's drawing and facts from the registry."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from importlib.util import find_spec
from inspect import getmodule
from io import StringIO
from pathlib import Path

from analysis.exhibits.figures.files import in_the_dark
from analysis.predictions.tables import markdown
from analysis.site.fences import DECLARED
from analysis.site.schedule_answer import as_typed
from rpbench.commands.show import draw_schedule
from rpbench.commands.usages import usages
from rpbench.config.configuration import CONF, options_of
from rpbench.config.loading import load
from rpbench.drawing.timeline_figure import FONT_PT
from rpbench.registry import Entry, entry, offered
from rpbench.run.assemble import assemble

ROOT = Path(__file__).parents[2]
_SIZES = ("num_devices=4", "num_microbatches=8")
_MODULES = {"exact": "ortools"}  # extra -> the module that its schedules need
# Words on bars, which are outlines of this size, stay black on a dark page: bars keep their colours.
_WORDS_ON_BARS = f'g[transform*="scale({FONT_PT / 100:g} "]{{fill:#000000}}'
_PLACE = "<!-- facts of the registry -->"


def words_of(name: str) -> tuple[str, ...]:
    """The overrides for drawing a schedule."""
    return (f"schedule={name}", *DECLARED["sizes"].get(name, _SIZES))


def draw(name: str, path: Path) -> None:
    """Draw a schedule in slots, as `python -m rpbench show ... draw=` does, with dark colours for dark pages."""
    with redirect_stderr(StringIO()):  # it prints where it drew to
        request = load(list(words_of(name)))
        draw_schedule(request, assemble(request), path)
    drawing = in_the_dark(path.read_text(encoding="utf-8"))
    path.write_text(drawing.replace("</style>", f"{_WORDS_ON_BARS}</style>", 1), encoding="utf-8")


def can_draw(name: str) -> bool:
    """True if the packages that a schedule needs are installed."""
    extra = entry(name).extra
    return extra is None or find_spec(_MODULES[extra]) is not None


def with_facts(text: str, name: str) -> str:
    """A method's page with its drawing and facts; ValueError if the page has no place for them."""
    if _PLACE not in text:
        raise ValueError(f"docs/methods/{name}.md has no line {_PLACE!r}; the drawing goes there")
    found = entry(name)
    module = getmodule(found.generate)
    assert module is not None  # a generator is a function of a file
    rows = [
        ("name", f"`schedule={found.name}`"),
        ("source", found.source),
        ("file", f"`{module.__name__.replace('.', '/')}.py`"),
        ("options", ", ".join(f"`schedule.{key}={as_typed(value)}`" for key, value in found.options.items()) or "none"),
        ("updates", _updates(found)),
        *([("needs", f"the extra `{found.extra}`")] if found.extra else []),
        ("stages a device", "one" if not found.looped else str(found.chunks or "several, `chunks_per_device=`")),
        ("order", "depends on the stages' times" if found.needs_costs else "depends on sizes alone"),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    drawing = f"![The order of {name}, a row a device]({name}.svg)\n\n" if can_draw(name) else ""
    mark = "" if found.extra is None else " no-run: needs a package that is not installed by default"
    facts = (
        f"{drawing}```bash{mark}\npython -m rpbench show {' '.join(words_of(name))} draw={name}.svg\n```\n\n"
        f"| | |\n| --- | --- |\n{table}\n"
    )
    return text.replace(_PLACE, facts)


def _updates(found: Entry) -> str:
    if found.steps_each_microbatch:
        return "after every microbatch"
    if found.rounds > 1:
        return f"after all microbatches of an update, in {found.rounds} rounds"
    if found.late:
        return "after all microbatches; one step late with " + ", ".join(
            f"`schedule.{key}={as_typed(value)}`" for key, value in found.late.items()
        )
    return "after all microbatches of a step"


def pages() -> dict[str, str]:
    return {name: f"methods/{name}.md" for name in offered()}


PACKAGES = tuple(DECLARED["packages"])


def filled(text: str) -> str:
    """A page with its generated tables."""
    for place, make in _PLACES.items():
        if place in text:
            text = text.replace(place, make())
    return text


def _verbs_table() -> str:
    rows = [(f"`{name}`", verb["says"], f"`{verb['takes']}`") for name, verb in usages().items()]
    return markdown("verb | what it does | its words", rows).rstrip()


def _settings() -> str:
    config = (CONF / "config.yaml").read_text(encoding="utf-8")
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "schedule")
    table = markdown("group | options", ((f"`{group}`", _options(group)) for group in (*groups, "schedule"))).rstrip()
    says = "`GROUP=OPTION` takes a file of `conf/`, `GROUP.KEY=` changes a key of it."
    return f"```yaml\n{config}```\n\n## Groups\n\n{says}\n\n{table}"


def _options(group: str) -> str:
    return ", ".join(f"`{name}`" for name in options_of(group))


def _in_a_cell(text: str) -> str:
    """The text with the marks that a table would take for its own escaped, outside of code."""
    return re.sub(r"(`[^`]*`)|[|\[\]<]", lambda found: found[1] or f"\\{found[0]}", text)


def _modules() -> str:
    parts = []
    for package in PACKAGES:
        rows = ((f"`{path.relative_to(ROOT)}`", _in_a_cell(says)) for path, says in _said(ROOT / package))
        parts.append(f"## {package}\n\n{markdown('file | what it holds', rows)}".rstrip())
    return "\n\n".join(parts)


def _said(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every module of a package and the first sentence of its docstring."""
    for path in sorted(folder.rglob("*.py")):
        if "notebooks" in path.relative_to(folder).parts:
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if text:
            yield path, " ".join(text.split("\n\n")[0].split())


def _further_methods() -> str:
    """Rows for the schedules that the page's table leaves out, with the first lines of their files."""
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
