"""The command line and its verbs; higher layers add theirs by `register`.

stdout is data, one JSON object per finished run; everything for people goes to stderr.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rpbench.places import CONF, FLAG, with_dirs
from rpbench.untrusted import plain

if TYPE_CHECKING:
    from rpbench.config.request import Request

INTERRUPTED = 130  # exit status after Ctrl-C, as in shells
BROKEN_PIPE = 141  # exit status after SIGPIPE, as in shells
# New objects between two garbage collections; with Python's 700 they take a tenth of a short command's time.
COLLECT_AFTER = 50_000
_WIDEST = 22  # letters of a key whose meaning is on the same line of the help
_OF_A_RUN = ("run", "show", "plan", "profile", "check-order")  # verbs that also take the keys of `conf/config.yaml`

Verb = Callable[[Sequence[str]], int]  # takes the words behind the verb, returns the exit status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def dispatch(arguments: Sequence[str]) -> int:
    """Run the verb of the arguments and return the exit status."""
    try:
        with with_dirs(arguments) as rest:
            return _dispatch(rest)
    except ValueError as error:
        _report(plain(str(error)))
        return 2
    except BrokenPipeError:  # the reader of stdout, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        where = f": {plain(str(error.filename))}" if error.filename else ""  # a full stdout has no name
        _report(f"{error.strerror or error}{where}; what had ended before is kept")
        return 2
    except KeyboardInterrupt:
        verb = next((item for item in arguments if item in _verbs), "run")
        _report(f"interrupted; {_KEPT.get(verb, 'nothing was written')}")
        return INTERRUPTED


def _report(words: str) -> None:
    """Print why a command ended; the exit status has to do where stderr cannot be written, as on a full disk."""
    try:
        print(f"rpbench: {words}", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


# What an interruption leaves of verbs that write before their end.
_KEPT = {
    "run": "finished runs are kept",
    "import": "records that were written before are kept",
    "compact": "records are as they were",
}


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "help"
    if first in ("-h", "--help", "help"):
        print(_main_help(), end="")
        return 0
    if first == "--version":
        print(f"rpbench {_version()}")
        return 0
    if first not in _verbs:
        if not first.startswith("-") and "=" not in first and "~" not in first:
            from rpbench.registry import unknown_name

            raise ValueError(unknown_name("verb", first, list(_verbs)) + "; or write key=value")
        first, arguments = "run", ["run", *arguments]
    rest = arguments[1:]
    if {"-h", "--help"} & set(rest):
        print(_help_of(first), end="")
        return 0
    if "--version" in rest:
        print(f"rpbench {_version()}")
        return 0
    return _verbs[first](rest)


def _main_help() -> str:
    from rpbench.commands.usages import usages

    parser = _Parser(
        prog="rpbench",
        description="Which schedule trains a model fastest on these devices, why, and how do we know?",
        epilog="Without a verb, key=value runs one configuration and -m a sweep. stdout is data, one JSON object a "
        "finished run (on a terminal a short table, and JSON with --json); what is for people goes to stderr. "
        f"{FLAG} DIR, beside any verb: a folder with models, clusters, schedules and experiments of your own.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=20),
    )
    parser.add_argument("--version", action="version", version=_version())
    found = parser.add_subparsers(metavar="VERB", title="verbs")
    for name, verb in usages().items():
        if name in _verbs:
            found.add_parser(name, help=verb["says"])
    return parser.format_help()


def _help_of(name: str) -> str:
    """The help of a verb, with its keys and their defaults."""
    from rpbench.commands.usages import usage, usages

    verb = usages()[name]
    parser = _Parser(prog=f"rpbench {name}", usage=f"rpbench {usage(name)}", description=verb["says"])
    parser.add_argument("--version", action="version", version=_version())
    lines = ["\nwords of its own; what stands behind = is the default, or what a key takes:"] if "keys" in verb else []
    for key, says in verb.get("keys", {}).items():
        lines += [f"  {key:<{_WIDEST}}  {says}"] if len(key) <= _WIDEST else [f"  {key}", f"{'':<{_WIDEST + 4}}{says}"]
    if name in _OF_A_RUN:
        text = (CONF / "config.yaml").read_text(encoding="utf-8").partition("defaults:\n")[2].partition("\nhydra:")[0]
        hidden = ("  - rpbench_schema", "  - _self_", "  - override")
        lines.append("\nkeys of a run, with their defaults; `rpbench list` names the options of a group:")
        lines += [line for line in text.splitlines() if not line.startswith(hidden)]
    return parser.format_help() + "".join(f"{line}\n" for line in lines)


def _version() -> str:
    try:
        return version("rpbench")
    except PackageNotFoundError:
        return "0 (not installed)"


def advise(arguments: Sequence[str]) -> int:
    """Print the ranking as JSON to stdout (on a terminal only with --json) and as a table to stderr."""
    from rpbench.commands.advising.advise import advise_on

    flags = {item for item in arguments if item in ("--json", "--open")}
    words = [item for item in arguments if item not in flags]
    answer = advise_on(words, sys.stderr, with_around="--open" in flags)
    moves = answer.pop("around", None)
    if "--json" in flags or not sys.stdout.isatty():
        print(json.dumps(answer, allow_nan=False), flush=True)
    if "--open" in flags:
        from rpbench.commands.advising.advise_page import show_page, write_page

        path = write_page(answer, moves)
        shown = "" if show_page(path) else "; there is no screen to open it on"
        print(f"rpbench: the page is {path}{shown}", file=sys.stderr)
    return 0


def list_options(arguments: Sequence[str]) -> int:
    """Print the choices: a table on a terminal, JSON lines in a pipe or with --json."""
    from rpbench.commands.completion import listed
    from rpbench.commands.usages import LISTS

    parser = _Parser(prog="rpbench list", add_help=False)
    parser.add_argument("what", choices=LISTS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(list(arguments))
    as_json = asked.json or not sys.stdout.isatty()
    width = shutil.get_terminal_size((120, 24)).columns
    for row in listed(asked.what):
        print(json.dumps(row) if as_json else f"{row['name']:<28} {row['says']}"[:width])
    return 0


def completion(arguments: Sequence[str]) -> int:
    """Print the completion script of a shell."""
    from rpbench.commands.completion import completion as script

    print(script(arguments, list(_verbs)), end="")
    return 0


def run(arguments: Sequence[str]) -> int:
    """One run, or with -m a sweep; `--json` prints records on a terminal too."""
    if "-m" in arguments or "--multirun" in arguments:
        print("rpbench: planning a sweep", file=sys.stderr, flush=True)  # the imports below take a second
    from rpbench.run.recording import json_if
    from rpbench.sweep.multirun import sweep

    if set(arguments) & {"--cfg", "-c"}:
        return _print_configuration(arguments)
    with json_if("--json" in arguments):
        return sweep([item for item in arguments if item != "--json"])


def _print_configuration(arguments: Sequence[str]) -> int:
    """Print the composed configuration as YAML, as Hydra's `--cfg`."""
    from omegaconf import OmegaConf

    from rpbench.config.configuration import composed

    words = list(arguments)
    place = min(words.index(flag) for flag in ("--cfg", "-c") if flag in words)
    if words[place + 1 : place + 2] != ["job"]:
        raise ValueError(
            f"{words[place]}: write {words[place]} job, which prints the configuration of the words beside it"
        )
    del words[place : place + 2]
    if flags := [item for item in words if item.startswith("-")]:
        raise ValueError(f"--cfg job and {flags[0]}: it prints one configuration, of key=value; leave {flags[0]} out")
    print(OmegaConf.to_yaml(composed(words).node), end="")
    return 0


def _loaded(arguments: Sequence[str], reads: str | None = None) -> "Request":
    """The request of a command line; prints its notes to stderr, without those of a key that the verb `reads`."""
    from rpbench.config.loading import load

    found = load(arguments)
    for note in found.notes:
        if reads is None or reads not in note.partition(" without effect")[0]:
            print(f"rpbench: {note}", file=sys.stderr)
    return found


def show(arguments: Sequence[str]) -> int:
    """Print a schedule, checked, in its text form or as `format=` (or `export=`) says; or a record by its run_id.

    `draw=FILE` (svg, pdf, png) draws its timeline; `check=communication` prints whether its messages deadlock, with
    exit status 1 if they do.
    """
    if runs := [item for item in arguments if "=" not in item and not item.startswith(("-", "~"))]:
        return _show_record(runs, [item for item in arguments if item not in runs])
    if any(item.startswith("check=") for item in arguments):
        from rpbench.commands.show_communication import check_communication

        return check_communication(arguments, sys.stdout, sys.stderr)
    from rpbench.commands.show import draw_schedule, drawing_path, show_schedule

    drawing = [drawing_path(item.removeprefix("draw=")) for item in arguments if item.startswith("draw=")]
    forms = [item.partition("=")[2] for item in arguments if item.startswith(("format=", "export="))]
    words = [item for item in arguments if not item.startswith(("draw=", "format=", "export="))]
    is_order = not drawing and "chrome_trace" not in forms[-1:]  # a timeline is that of the run
    is_open = is_order and not any(item.startswith(("charge=", "offload=")) for item in words)
    reads = "optimizer" if forms[-1:] == ["roundpipe"] else None  # its script makes one
    config = _loaded([*words, "charge=hops"] if is_open else words, reads)  # without transfers, unless requested
    assembled = show_schedule(config, sys.stdout, forms[-1] if forms else "text")
    if drawing:
        draw_schedule(config, assembled, drawing[-1])
    return 0


def _show_record(runs: Sequence[str], others: Sequence[str]) -> int:
    """Print the record of a run as the run did."""
    from rpbench.records.record import find
    from rpbench.run.recording import emit, json_if

    words = [item for item in others if item != "--json"]
    if len(runs) > 1 or any(not item.startswith("results_dir=") for item in words):
        raise ValueError(f"show {' '.join([*runs, *words])}: write show RUN [results_dir=DIR], or show key=value ...")
    folder = words[-1].partition("=")[2] if words else "results"
    try:
        found = find(Path(folder), runs[0])
    except ValueError as error:
        raise ValueError(f"{error}; a schedule is written schedule={runs[0]}") from None
    with json_if("--json" in others):
        emit(found, alone=True)
    return 0


def plan(arguments: Sequence[str]) -> int:
    """Print partitions side by side, or that of a profile by `plan=pipedream`, as one JSON object."""
    from rpbench.commands.plan import compare_plans, partition_profile

    found: object
    if "mesh=search" in arguments:
        from rpbench.commands.advising.advise import plan_meshes

        found = plan_meshes([item for item in arguments if item != "mesh=search"])
    elif any(item.startswith("plan=") for item in arguments):
        found = partition_profile(arguments)
    else:
        found = compare_plans(_loaded(arguments))
    print(json.dumps(found, allow_nan=False))
    return 0


def calibrate(arguments: Sequence[str]) -> int:
    """Measure this machine and write a cluster file; print its path as one JSON object.

    Exit status 1 if ranks failed, or a wait is missing in a dry run.
    """
    from rpbench.commands.calibrate import RanksFailed
    from rpbench.commands.calibrate import calibrate as measure

    try:
        found = measure(arguments)
    except RanksFailed as error:
        print(f"rpbench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 1 if found.get("order_findings") else 0


def check_order(arguments: Sequence[str]) -> int:
    """Print faults in the order of a schedule's streams as one JSON object; exit status 1 if there are any."""
    from rpbench.commands.check_order import check_order as check

    found, is_clean = check(arguments)
    print(json.dumps(found))
    return 0 if is_clean else 1


def compare(arguments: Sequence[str]) -> int:
    """Print two or more records side by side: a table to stderr, the differences as JSON to stdout."""
    from rpbench.commands.recorded.compare import compare_records

    options = dict(item.partition("=")[::2] for item in arguments if "=" in item)
    folder, names = options.pop("results_dir", "results"), [item for item in arguments if "=" not in item]
    if options:
        raise ValueError(f"compare takes results_dir=DIR, not {sorted(options)[0]!r}")
    print(json.dumps(compare_records(Path(folder), names, sys.stderr)))
    return 0


def export(arguments: Sequence[str]) -> int:
    """Write the canonical table of a folder of records to stdout or a file."""
    from rpbench.commands.recorded.store import export as write

    write(arguments, sys.stdout)
    return 0


def pivot(arguments: Sequence[str]) -> int:
    """Print a metric by two choices: a table to stderr and its rows as JSON to stdout, or CSV, LaTeX or HTML."""
    from rpbench.commands.recorded.pivot import pivot as turn

    turn(arguments, sys.stdout, sys.stderr)
    return 0


def _printing(place: str, *, allow_nan: bool = True) -> Verb:
    """A verb that prints, as JSON lines, what a function returns; its module is imported when the verb is called."""

    def verb(arguments: Sequence[str]) -> int:
        module, _, name = f"rpbench.{place}".rpartition(".")
        found = getattr(import_module(module), name)(arguments)
        for row in found if isinstance(found, list) else [found]:
            print(json.dumps(row, default=str, allow_nan=allow_nan))
        return 0

    return verb


_verbs: dict[str, Verb] = {
    **{each.__name__: each for each in (run, advise, show, plan)},
    "profile": _printing("commands.profile.write_profile"),
    "calibrate": calibrate,
    "check-order": check_order,
    "compare": compare,
    "export": export,
    "query": _printing("commands.recorded.store.query"),
    "pivot": pivot,
    "compact": _printing("commands.recorded.store.compact"),
    "list": list_options,
    "new": _printing("commands.new.new"),
    "import": _printing("records.imports.import_file", allow_nan=False),
    "completion": completion,
}


def register(verbs: Mapping[str, Verb]) -> None:
    """Add verbs of a layer above."""
    _verbs.update(verbs)


def all_verbs() -> list[str]:
    return list(_verbs)
