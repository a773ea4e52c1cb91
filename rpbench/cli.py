"""The verbs of the command line: run (Hydra), show, plan, profile, compare, report, export, query, pivot.

stdout is data, one JSON object per finished run; everything for people goes to stderr.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it

USAGE = """\
python -m rpbench [key=value ...]        run one configuration; the record goes to stdout
python -m rpbench -m key=a,b [...]       run every combination; what has a record already is not run again
python -m rpbench show [key=value ...]   print a schedule, checked; draw=FILE.svg draws it
python -m rpbench plan [key=value ...]   compare partitions (published, even, greedy, pipedream, search)
python -m rpbench plan plan=pipedream profile=NODES.csv edges=EDGES.csv num_machines=N bandwidth_bytes_per_s=B
                                         stages and replicas of a profiled model by PipeDream's partitioner
python -m rpbench profile [key=value ...] [out=PREFIX]   measure a model's layers; cost=NAME takes times from there
python -m rpbench calibrate [name=NAME] [device=cpu|cuda] [num_devices=N]
                                         measure this machine, for cluster=NAME cost=analytic
python -m rpbench compare RUN RUN [...]  two or more runs side by side
python -m rpbench export [--format csv|jsonl|latex|parquet] [results_dir=DIR] [out=FILE]   records as one table
python -m rpbench query "select ..." [results_dir=DIR]   ask the table `runs` (DuckDB)
python -m rpbench pivot --rows model --columns schedule --value tokens_per_s [--baseline 1f1b]
python -m rpbench report [results_dir=DIR] [out=FILE]   the report, from records
Choices: schedule, model, cluster, workload, cost, backend, tracker, experiment; see conf/config.yaml."""


def dispatch(arguments: Sequence[str]) -> int:
    """Run the verb that the arguments ask for and return the exit status."""
    verbs: dict[str, Callable[[Sequence[str]], int]] = {
        "show": show,
        "plan": plan,
        "calibrate": calibrate,
        "profile": profile,
        "compare": compare,
        "report": report,
        "export": export,
        "query": query,
        "pivot": pivot,
    }
    try:
        if arguments and arguments[0] in ("-h", "--help", "help"):
            print(USAGE)
            return 0
        if arguments and arguments[0] in verbs:
            return verbs[arguments[0]](arguments[1:])
        _refuse_unknown_verb(arguments, list(verbs))
        return run(arguments)
    except ValueError as error:
        print(f"rpbench: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"rpbench: {error.strerror or error}: {error.filename or ''}; nothing was run", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rpbench: interrupted; finished runs are kept", file=sys.stderr)
        return INTERRUPTED


def _refuse_unknown_verb(arguments: Sequence[str], verbs: list[str]) -> None:
    from rpbench.registry import unknown_name

    if arguments and not arguments[0].startswith("-") and "=" not in arguments[0] and "~" not in arguments[0]:
        raise ValueError(unknown_name("verb", arguments[0], verbs) + "; or write key=value")


def run(arguments: Sequence[str]) -> int:
    """One run, or with -m a sweep."""
    if "-m" in arguments or "--multirun" in arguments:
        print("rpbench: planning a sweep", file=sys.stderr, flush=True)  # before imports, which take a second
    from rpbench.harness.sweep import sweep

    return sweep(arguments)


def show(arguments: Sequence[str]) -> int:
    """Print a schedule in its text form, after checking it; `draw=FILE` (svg, pdf, png) draws its timeline."""
    from rpbench.commands.show import draw_schedule, drawing_path, show_schedule
    from rpbench.harness.request import load

    drawing = [drawing_path(item.removeprefix("draw=")) for item in arguments if item.startswith("draw=")]
    config = load([item for item in arguments if not item.startswith("draw=")])
    assembled = show_schedule(config, sys.stdout)
    if drawing:
        draw_schedule(assembled, drawing[-1])
    return 0


def plan(arguments: Sequence[str]) -> int:
    """Partitions side by side, or with `plan=pipedream` what that makes of a profile; one JSON object."""
    from rpbench.commands.plan import compare_plans
    from rpbench.commands.plan_pipedream import partition_profile
    from rpbench.harness.request import load

    of_profile = any(item.startswith("plan=") for item in arguments)
    print(json.dumps(partition_profile(arguments) if of_profile else compare_plans(load(arguments)), allow_nan=False))
    return 0


def profile(arguments: Sequence[str]) -> int:
    """The layers of a model as PipeDream's profile, two CSV files; where they are, as one JSON object."""
    from rpbench.commands.profile import write_profile

    print(json.dumps(write_profile(arguments)))
    return 0


def calibrate(arguments: Sequence[str]) -> int:
    """Measure this machine and write a cluster file; where it is, as one JSON object."""
    from rpbench.commands.calibrate import calibrate as measure

    print(json.dumps(measure(arguments)))
    return 0


def compare(arguments: Sequence[str]) -> int:
    """Two or more records side by side: a table to stderr, what differs as JSON to stdout."""
    from rpbench.commands.compare import compare_records

    folder = next(
        (item.removeprefix("results_dir=") for item in arguments if item.startswith("results_dir=")),
        "results",
    )
    names = [item for item in arguments if "=" not in item]
    print(json.dumps(compare_records(Path(folder), names, sys.stderr)))
    return 0


def export(arguments: Sequence[str]) -> int:
    """The canonical table of a folder of records, to stdout or a file."""
    from rpbench.commands.store import export as write

    write(arguments, sys.stdout)
    return 0


def query(arguments: Sequence[str]) -> int:
    """Rows that an SQL query finds, one JSON object a line."""
    from rpbench.commands.store import query as ask

    for row in ask(arguments):
        print(json.dumps(row, default=str))
    return 0


def pivot(arguments: Sequence[str]) -> int:
    """A metric by two choices: a table to stderr, its rows as JSON to stdout."""
    from rpbench.commands.store import pivot as turn

    for row in turn(arguments):
        print(json.dumps(row))
    return 0


def report(arguments: Sequence[str]) -> int:
    """The report as one HTML page; the analysis layer stands above this one and is loaded by name."""
    options = dict(item.partition("=")[::2] for item in arguments)
    unknown = set(options) - {"results_dir", "out"}
    if unknown:
        raise ValueError(f"report takes results_dir=DIR and out=FILE, not {sorted(unknown)[0]!r}")
    os.environ.setdefault("MPLBACKEND", "Agg")
    build = importlib.import_module("analysis.report").build
    path = build(Path(options.get("results_dir", "results")), Path(options.get("out", "report.html")))
    print(json.dumps({"report": str(path)}))
    return 0
