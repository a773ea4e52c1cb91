"""Verbs of the command line that use analysis: explain, report, dashboard.

Each imports what it needs when it is called, so that other verbs start fast.
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
    """Causes of the difference of two numbers: a JSON object on stdout, a table on stderr."""
    from rpbench.commands.recorded.explain import explain_numbers

    def of_row(name: str) -> "Side":
        from analysis.explained.rows import side_of  # importing it takes seconds, and two runs need no table

        return side_of(name)

    def of_number(name: str, number: "Number", settings: Mapping[str, str]) -> "Side":
        from analysis.explained.rows import side_of_number

        return side_of_number(name, number, settings)

    print(json.dumps(explain_numbers(arguments, sys.stderr, of_row, of_number), allow_nan=False))
    return 0


def report(arguments: Sequence[str]) -> int:
    options = dict(item.partition("=")[::2] for item in arguments)
    unknown = set(options) - {"results_dir", "out"}
    if unknown:
        raise ValueError(f"report takes results_dir=DIR and out=FILE, not {sorted(unknown)[0]!r}")
    results = Path(options.get("results_dir", "results"))
    if not manifest_names(results):  # checked before the slow imports
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
