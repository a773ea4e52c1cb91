"""Every torch that tables run on: environments made and removed, all flushed schedules on 2 and 4 ranks in each.

    python -m tests.torch_versions                     the table of docs/torch_runtime.md, some minutes a version
    python -m tests.torch_versions --versions 2.15.0 --schedules 1f1b,zb_v
    python -m tests.torch_versions --facts             the newest wheel's Python files against the table of facts

An environment takes some gigabytes while it is used: a wheel for CUDA runs on CPUs as well, and brings its libraries.
Everything but torch is taken from the environment that this runs in.
"""

import argparse
import ast
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpbench.torch_runtime.versions import HAS_WAITS, METHODS, NEEDED, NEWEST, has_waits, number_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "torch_runtime.md"
BEGIN, END = "<!-- torch versions -->", "<!-- end of torch versions -->"
VERSIONS = ("2.13.0", "2.14.1", "2.15.0")
RANKS = (2, 4)
MICROBATCHES = 8
PIPELINING = "torch/distributed/pipelining/"
PIP_DOWNLOAD = (
    *(sys.executable, "-m", "pip", "download", "--quiet"),
    *("--no-deps", "--no-cache-dir", "--only-binary=:all:"),
)
DOWNLOAD_S = 600
# Keywords of the runtime beside those of all its schedules, from each minor version on.
SETTINGS = {
    (2, 11): (),
    (2, 13): ("defer_pp_recv",),
    (2, 15): (
        *("defer_pp_recv", "max_active_stages", "unshard_lookahead"),
        *("defer_reduce_grad_wait", "max_outstanding_sends"),
    ),
}


# --- facts ----------------------------------------------------------------------------------------------------


def differences(version: str, schedules: str, stage: str) -> list[str]:
    """What `schedules.py` and `stage.py` of a torch's pipelining have otherwise than the facts of a version say."""
    trees = [ast.parse(schedules), ast.parse(stage)]
    names = {name for tree in trees for name in _names(tree)}
    runtime = next(node for node in ast.walk(trees[0]) if _is_class(node, "_PipelineScheduleRuntime"))
    of_kinds = next(node for node in ast.walk(trees[0]) if _is_class(node, "_ComputationType"))
    waits = {"WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"} <= set(_names(of_kinds))
    settings = SETTINGS[max(since for since in SETTINGS if since <= number_of(version))]
    wrong = [
        f"{name} is {value}, the facts have {expected}"
        for name, value, expected in (
            ("has_waits", waits, has_waits(version)),
            ("settings", tuple(_popped(runtime)), settings),
        )
        if value != expected
    ]
    return wrong + [f"{name} is gone" for name in (*NEEDED, *METHODS) if name not in names]


def _is_class(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == name


def _names(tree: ast.AST) -> Iterator[str]:
    """Everything that is defined, imported or assigned by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _popped(runtime: ast.AST) -> Iterator[str]:
    """The keywords that a class takes out of those of its base."""
    for node in ast.walk(runtime):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "pop"
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "kwargs"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def check_newest() -> int:
    """Compare the newest wheel that pip finds with the facts; 1 if they differ, 0 also where no index is reachable."""
    with tempfile.TemporaryDirectory(prefix="rpbench-wheel-") as folder:
        fetched = subprocess.run(
            [*PIP_DOWNLOAD, "--dest", folder, f"torch>={_text(NEWEST)}"],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
            check=False,
        )
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            print(f"torch's newest wheel was not fetched, nothing compared: {fetched.stderr.strip()[-300:]}")
            return 0
        version = wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as files:
            sources = [files.read(f"{PIPELINING}{name}.py").decode() for name in ("schedules", "stage")]
    wrong = differences(version, *sources)
    known = "" if number_of(version) in HAS_WAITS else f"; it is newer than {_text(NEWEST)}, whose facts these are"
    print(f"torch {version}: " + ("; ".join(wrong) or "as the table of facts says") + known)
    return int(bool(wrong))


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))


# --- one environment ------------------------------------------------------------------------------------------


def make_environment(folder: Path, packages: Sequence[str], *, torch_of_here: bool = False) -> Path:
    """An environment with packages of its own, and else what this one has; its interpreter.

    Args:
        torch_of_here: what is installed here counts as installed there, torch above all.

    Raises:
        CalledProcessError: if it cannot be made.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    if not torch_of_here:
        subprocess.run([*install, *packages], check=True, stdout=sys.stderr)
    own = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    Path(own.stdout.strip(), "rpbench_beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    if torch_of_here:
        subprocess.run([*install, *packages], check=True, stdout=sys.stderr)
    return python


def run_inside(names: Sequence[str]) -> None:
    """Run schedules on the torch of this environment; a JSON line for each and number of ranks."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "torch_runtime")]
    import torch
    from torch_cases import FAITHFUL, LATER, TWO_WAY, request_for

    from rpbench.torch_runtime.processes.diagnosis import RunFailed
    from rpbench.torch_runtime.processes.ranks import Ranks

    for count in RANKS:
        left = [*(names or (*FAITHFUL, *LATER, *TWO_WAY))]
        while left:  # a failure ends the processes
            with Ranks(count) as ranks:
                while left:
                    row: dict[str, Any] = {"torch": torch.__version__, "schedule": left.pop(0), "ranks": count}
                    try:
                        row |= _ran(ranks.run(request_for(row["schedule"], count, MICROBATCHES, num_steps=2)).fields())
                    except (RunFailed, ValueError) as error:
                        row["error"] = str(error)[:2000]
                    print(json.dumps(row), flush=True)
                    if "error" in row:
                        break


def _ran(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in ("grad_max_abs_diff", "weight_max_abs_diff", "rows_as_ours")}


# --- all of them ----------------------------------------------------------------------------------------------


def matrix(versions: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of all versions, an environment after another."""
    rows = []
    for version in versions:
        with tempfile.TemporaryDirectory(prefix=f"rpbench-torch-{version}-") as folder:
            print(f"torch {version}: making an environment", file=sys.stderr, flush=True)
            python = make_environment(Path(folder), (f"torch=={version}",))
            inside = [str(python), "-m", "tests.torch_versions", "--inside", "--schedules", ",".join(names)]
            with subprocess.Popen(inside, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
                assert running.stdout is not None
                for line in running.stdout:
                    rows.append(json.loads(line))
                    print(line, end="", file=sys.stderr, flush=True)
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line a schedule, a column for each version and number of ranks."""
    columns = list(dict.fromkeys((row["torch"], row["ranks"]) for row in rows))
    cells = {(row["schedule"], row["torch"], row["ranks"]): _cell(row) for row in rows}
    versions = ", ".join(dict.fromkeys(row["torch"] for row in rows))
    lines = [
        textwrap.fill(
            f"{datetime.now(UTC):%d %B %Y}, torch {versions}, Python {platform.python_version()}, gloo on CPUs, "
            f"{MICROBATCHES} microbatches, two steps in float64. The largest difference of any gradient of the second "
            "step, or of any weight after it, from plain training; rows ran action for action as written.",
            120,
        ),
        "",
        "| schedule | " + " | ".join(f"{version}, {ranks} ranks" for version, ranks in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    lines += [
        f"| {name} | " + " | ".join(cells.get((name, *column), "not run") for column in columns) + " |"
        for name in dict.fromkeys(row["schedule"] for row in rows)
    ]
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"].splitlines()[0].replace("|", "/")[:80]
    if not row["rows_as_ours"]:
        return "other rows"
    most = max(row["grad_max_abs_diff"], row["weight_max_abs_diff"])
    return f"{most:.1e}" if most else "0"


def write_table(table: str, page: Path = PAGE, begin: str = BEGIN, end: str = END) -> None:
    """Put the table between its marks."""
    text = page.read_text()
    head, rest = text.split(begin)
    page.write_text(f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}")


def main() -> int:
    """0 if every run gave plain training's gradients and weights, bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default=",".join(VERSIONS))
    parser.add_argument("--schedules", default="", help="all flushed ones, where none is named")
    parser.add_argument("--facts", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = [name for name in asked.schedules.split(",") if name]
    if asked.facts:
        return check_newest()
    if asked.inside:
        run_inside(names)
        return 0
    rows = matrix(asked.versions.split(","), names)
    table = as_table(rows)
    print(table)
    if not names and asked.versions == ",".join(VERSIONS):
        write_table(table)
    return int(any(_cell(row) != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
