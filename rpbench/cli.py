"""The command line and its verbs; those of higher layers are registered by them (`register`).

stdout is data, one JSON object per finished run; everything for people goes to stderr.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rpbench.places import CONF, FLAG, with_dirs
from rpbench.untrusted import plain

if TYPE_CHECKING:
    from rpbench.config.request import Request

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
BROKEN_PIPE = 141  # after SIGPIPE, likewise
# New objects after which circles of garbage are looked for; Python's 700 take a tenth of a short command's time.
COLLECT_AFTER = 50_000


@dataclass(frozen=True)
class Verb:
    """A subcommand.

    Args:
        call: takes the words behind the verb, returns the exit status.
        says: what it does, one line.
        takes: its words, for its help.
    """

    call: Callable[[Sequence[str]], int]
    says: str
    takes: str = "key=value ..."


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in our words, with our exit status."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def dispatch(arguments: Sequence[str]) -> int:
    """Run the verb that the arguments ask for and return the exit status."""
    try:
        with with_dirs(arguments) as rest:
            return _dispatch(rest)
    except ValueError as error:
        _tell(plain(str(error)))
        return 2
    except BrokenPipeError:  # the reader of stdout has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        where = plain(str(error.filename or ""))
        _tell(f"{error.strerror or error}: {where}; what had ended before is kept")
        return 2
    except KeyboardInterrupt:
        verb = next((item for item in arguments if item in all_verbs()), "run")
        _tell(f"interrupted; {_KEPT.get(verb, 'nothing was written')}")
        return INTERRUPTED


def _tell(words: str) -> None:
    """Say why a command ended; where nobody can hear it, as on a full disk, its exit status says it alone."""
    try:
        print(f"rpbench: {words}", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


# What an interruption leaves, of verbs that write on their way; others write at their end, if at all.
_KEPT = {
    "run": "finished runs are kept",
    "import": "records that were written before are kept",
    "compact": "records are as they were",
}


def _dispatch(arguments: list[str]) -> int:
    verbs = all_verbs()
    first = arguments[0] if arguments else "help"
    if first in ("-h", "--help", "help"):
        print(_main_parser(verbs).format_help(), end="")
        return 0
    if first == "--version":
        print(f"rpbench {_version()}")
        return 0
    if first not in verbs:
        _refuse_unknown_verb(arguments, list(verbs))
        first, arguments = "run", ["run", *arguments]
    rest = arguments[1:]
    if {"-h", "--help"} & set(rest):
        print(_verb_parser(first, verbs[first]).format_help() + _keys_of(first), end="")
        return 0
    if "--version" in rest:
        print(f"rpbench {_version()}")
        return 0
    return verbs[first].call(rest)


def _main_parser(verbs: dict[str, Verb]) -> argparse.ArgumentParser:
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
    for name, verb in verbs.items():
        found.add_parser(name, help=verb.says)
    return parser


def _verb_parser(name: str, verb: Verb) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"rpbench {name}", usage=f"rpbench {name} {verb.takes}", description=verb.says)
    parser.add_argument("--version", action="version", version=_version())
    return parser


def _keys_of(verb: str) -> str:
    """The keys of a verb with their defaults, for its help."""
    from rpbench.commands.usages import KEYS, OF_A_RUN, WIDEST

    lines = ["\nwords of its own; what stands behind = is the default, or what a key takes:"] if verb in KEYS else []
    for key, says in KEYS.get(verb, {}).items():
        lines += [f"  {key:<{WIDEST}}  {says}"] if len(key) <= WIDEST else [f"  {key}", f"  {'':<{WIDEST}}  {says}"]
    if verb in OF_A_RUN:
        text = (CONF / "config.yaml").read_text(encoding="utf-8").partition("defaults:\n")[2].partition("\nhydra:")[0]
        hidden = ("  - rpbench_schema", "  - _self_", "  - override")
        lines.append("\nkeys of a run, with their defaults; `rpbench list` names the options of a group:")
        lines += [line for line in text.splitlines() if not line.startswith(hidden)]
    return "".join(f"{line}\n" for line in lines)


def _version() -> str:
    try:
        return version("rpbench")
    except PackageNotFoundError:
        return "0 (not installed)"


_registered: dict[str, Verb] = {}


def register(verbs: Mapping[str, Verb]) -> None:
    """Add verbs of a layer above, which this one does not know."""
    _registered.update(verbs)


def all_verbs() -> dict[str, Verb]:
    """Every verb by its name, in the order of the help."""
    from rpbench.commands.usages import ADVISE, LISTS, NEW

    return {
        "run": Verb(run, "run one configuration; with -m every combination of key=a,b", "[-m] [--json] key=value ..."),
        "advise": Verb(advise, "which schedule trains a model fastest on a machine, and why", ADVISE[7:]),
        "show": Verb(
            show,
            "print, draw or export a schedule, checked; check=communication: whether its messages pass each other",
            "key=value ... [format=FORM] [draw=FILE.svg] [check=communication]",
        ),
        "plan": Verb(plan, "search a partition; mesh=search a mesh; plan=pipedream stages of a profile"),
        "profile": Verb(profile, "measure a model's layers", "key=value ... [out=PREFIX] [num_runs=N]"),
        "calibrate": Verb(
            calibrate,
            "measure this machine, for cluster=NAME",
            "[name=NAME] [device=cpu|accelerator] [ranks=N] [dry=N]",
        ),
        "check-order": Verb(
            check_order,
            "may a wait be missing on an accelerator? on CPU tensors",
            "key=value ... [accelerators=N] [mutants=yes]",
        ),
        "compare": Verb(compare, "two or more runs side by side", "RUN RUN ... [results_dir=DIR]"),
        "export": Verb(export, "records as one table", "[--format csv|jsonl|latex|parquet] [columns=A,B] [out=FILE]"),
        "query": Verb(
            query, "rows that an SQL query finds in the table `runs`", '"select ..." [seconds=60] [results_dir=DIR]'
        ),
        "pivot": Verb(
            pivot,
            "one value by two keys, against a baseline where asked",
            "--rows KEY --columns KEY --value METRIC [--baseline NAME] [--format csv|latex|html] [out=FILE] "
            "[results_dir=DIR]",
        ),
        "compact": Verb(compact, "records packed into Parquet, which query and pivot read fast", "[results_dir=DIR]"),
        "list": Verb(list_options, "what can be chosen, a line each", "|".join(LISTS) + " [--json]"),
        "new": Verb(new, "a model, cluster or schedule of your own: a commented file that runs", NEW[4:]),
        "import": Verb(
            import_, "what was measured elsewhere, as records", "kineto|wandb|csv FILE [results_dir=DIR] [out=FILE]"
        ),
        "completion": Verb(completion, "a script that completes rpbench in a shell", "bash|zsh|fish"),
        **_registered,
    }


def _refuse_unknown_verb(arguments: Sequence[str], verbs: list[str]) -> None:
    from rpbench.registry import unknown_name

    if arguments and not arguments[0].startswith("-") and "=" not in arguments[0] and "~" not in arguments[0]:
        raise ValueError(unknown_name("verb", arguments[0], verbs) + "; or write key=value")


def advise(arguments: Sequence[str]) -> int:
    """The ranking as JSON on stdout (on a terminal only with --json) and as a table on stderr."""
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
    """The choices: a table on a terminal, JSON lines in a pipe or with --json."""
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


def new(arguments: Sequence[str]) -> int:
    """Write a file of the user's own; print its path and the command that runs it, as JSON."""
    from rpbench.commands.new import new as write

    print(json.dumps(write(arguments)))
    return 0


def completion(arguments: Sequence[str]) -> int:
    """The completion of a shell, on stdout."""
    from rpbench.commands.completion import completion as script

    print(script(arguments, list(all_verbs())), end="")
    return 0


def run(arguments: Sequence[str]) -> int:
    """One run, or with -m a sweep; `--json` prints records on a terminal too."""
    if "-m" in arguments or "--multirun" in arguments:
        print("rpbench: planning a sweep", file=sys.stderr, flush=True)  # before imports, which take a second
    from rpbench.run.recording import json_if
    from rpbench.sweep.multirun import sweep

    if set(arguments) & {"--cfg", "-c"}:
        return _print_configuration(arguments)
    with json_if("--json" in arguments):
        return sweep([item for item in arguments if item != "--json"])


def _print_configuration(arguments: Sequence[str]) -> int:
    """What the words compose, as YAML; Hydra's own `--cfg`."""
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


def _loaded(arguments: Sequence[str]) -> "Request":
    """The request of a command line; its notes go to stderr."""
    from rpbench.config.request import load

    found = load(arguments)
    for note in found.notes:
        print(f"rpbench: {note}", file=sys.stderr)
    return found


def show(arguments: Sequence[str]) -> int:
    """Print a schedule, checked, in its text form or `format=`, which `export=` is another word for.

    `draw=FILE` (svg, pdf, png) draws its timeline; `check=communication` prints whether its messages pass each other,
    and exits with 1 where they do not.
    """
    if any(item.startswith("check=") for item in arguments):
        from rpbench.commands.show_communication import check_communication

        return check_communication(arguments, sys.stdout, sys.stderr)
    from rpbench.commands.show import draw_schedule, drawing_path, show_schedule

    drawing = [drawing_path(item.removeprefix("draw=")) for item in arguments if item.startswith("draw=")]
    forms = [item.partition("=")[2] for item in arguments if item.startswith(("format=", "export="))]
    words = [item for item in arguments if not item.startswith(("draw=", "format=", "export="))]
    is_open = not any(item.startswith(("charge=", "offload=")) for item in words)
    config = _loaded([*words, "charge=hops"] if is_open else words)  # without transfers, unless asked for
    assembled = show_schedule(config, sys.stdout, forms[-1] if forms else "text")
    if drawing:
        draw_schedule(assembled, drawing[-1], "slots" if config.cost.name == "unit" else "s")
    return 0


def plan(arguments: Sequence[str]) -> int:
    """Partitions side by side, or with `plan=pipedream` what that makes of a profile; one JSON object."""
    from rpbench.commands.plan import compare_plans, partition_profile

    if "mesh=search" in arguments:
        from rpbench.commands.advising.advise import plan_meshes

        print(json.dumps(plan_meshes([item for item in arguments if item != "mesh=search"]), allow_nan=False))
        return 0
    of_profile = any(item.startswith("plan=") for item in arguments)
    print(
        json.dumps(partition_profile(arguments) if of_profile else compare_plans(_loaded(arguments)), allow_nan=False)
    )
    return 0


def profile(arguments: Sequence[str]) -> int:
    """The layers of a model as PipeDream's profile, two CSV files; where they are, as one JSON object."""
    from rpbench.commands.profile import write_profile

    print(json.dumps(write_profile(arguments)))
    return 0


def calibrate(arguments: Sequence[str]) -> int:
    """Measure this machine and write a cluster file; where it is, as one JSON object. Exit status 1 if ranks failed, or
    a wait is missing in a dry run."""
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
    """Faults that the order of a schedule's streams allows, as one JSON object; exit status 1 if there are any."""
    from rpbench.commands.check_order import check_order as check

    found, is_clean = check(arguments)
    print(json.dumps(found))
    return 0 if is_clean else 1


def compare(arguments: Sequence[str]) -> int:
    """Two or more records side by side: a table to stderr, what differs as JSON to stdout."""
    from rpbench.commands.recorded.compare import compare_records

    options = dict(item.partition("=")[::2] for item in arguments if "=" in item)
    folder, names = options.pop("results_dir", "results"), [item for item in arguments if "=" not in item]
    if options:
        raise ValueError(f"compare takes results_dir=DIR, not {sorted(options)[0]!r}")
    print(json.dumps(compare_records(Path(folder), names, sys.stderr)))
    return 0


def export(arguments: Sequence[str]) -> int:
    """The canonical table of a folder of records, to stdout or a file."""
    from rpbench.commands.recorded.store import export as write

    write(arguments, sys.stdout)
    return 0


def query(arguments: Sequence[str]) -> int:
    """Rows that an SQL query finds, one JSON object a line."""
    from rpbench.commands.recorded.store import query as ask

    for row in ask(arguments):
        print(json.dumps(row, default=str))
    return 0


def pivot(arguments: Sequence[str]) -> int:
    """A metric by two choices: a table to stderr and its rows as JSON to stdout, or CSV, LaTeX or HTML."""
    from rpbench.commands.recorded.pivot import pivot as turn

    turn(arguments, sys.stdout, sys.stderr)
    return 0


def compact(arguments: Sequence[str]) -> int:
    """The records of a folder in one file, so that queries of thousands take no time."""
    from rpbench.commands.recorded.store import compact as gather

    print(json.dumps(gather(arguments)))
    return 0


def import_(arguments: Sequence[str]) -> int:
    """Measurements from elsewhere, as records or a timeline; one JSON object for each."""
    from rpbench.records.imports import import_file

    for row in import_file(arguments):
        print(json.dumps(row, allow_nan=False))
    return 0
