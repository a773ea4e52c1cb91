"""Verbs of the command line that read tables and pages: explain, report, dashboard.

Each imports what it needs when it is called, so that other verbs do not wait for it.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rpbench.cli import Verb
from rpbench.records.manifest import manifest_names, no_sweep_in

if TYPE_CHECKING:
    from rpbench.explain.side import Number, Side


def explain(arguments: Sequence[str]) -> int:
    """The difference of two numbers by causes: one JSON object on stdout, its table on stderr."""
    from rpbench.commands.recorded.explain import explain_numbers

    print(json.dumps(explain_numbers(arguments, sys.stderr, _side_of_row, _side_of_number), allow_nan=False))
    return 0


def _side_of_row(name: str) -> "Side":
    from analysis.explained.rows import side_of  # the tables take seconds, and two runs need none

    return side_of(name)


def _side_of_number(name: str, number: "Number", settings: Mapping[str, str]) -> "Side":
    from analysis.explained.rows import side_of_number

    return side_of_number(name, number, settings)


def report(arguments: Sequence[str]) -> int:
    options = dict(item.partition("=")[::2] for item in arguments)
    unknown = set(options) - {"results_dir", "out"}
    if unknown:
        raise ValueError(f"report takes results_dir=DIR and out=FILE, not {sorted(unknown)[0]!r}")
    results = Path(options.get("results_dir", "results"))
    if not manifest_names(results):  # said before what draws is imported, which takes seconds
        raise ValueError(no_sweep_in(results))
    os.environ.setdefault("MPLBACKEND", "Agg")
    from analysis.report import build

    path = build(results, Path(options.get("out", "report.html")))
    print(json.dumps({"report": str(path)}))
    return 0


def dashboard(arguments: Sequence[str]) -> int:
    from analysis.dashboard.server import dashboard as show_dashboard

    return show_dashboard(arguments)


VERBS: Mapping[str, Verb] = {"explain": explain, "report": report, "dashboard": dashboard}
