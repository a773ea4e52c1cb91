"""`new`: a model, a cluster, a device or a schedule of the user's own, as a commented file that runs at once."""

import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rpbench import registry
from rpbench.commands.usages import usage
from rpbench.config.choices import ConfigError
from rpbench.config.configuration import options_of
from rpbench.config.keys import CLUSTER, GPU, MODEL
from rpbench.places import FILE, FLAG, VARIABLE, home
from rpbench.records.record import check_writable, write_atomically

FOLDER = "own"  # beside an `rpbench.yaml` that names it: all YAML of a place is checked, and here may lie a clone
MOST_LETTERS = 100
NO_TEXTS = ("null", "true", "false", "yes", "no", "on", "off", "nan", "inf")  # to YAML or on a command line

# The command that tries each kind.
_RUNS = {
    "model": "rpbench model={name} cluster=8x_rtx4090 cost=analytic",
    "cluster": "rpbench model=qwen3_1p7b cluster={name} cost=analytic",
    "gpu": "rpbench advise model=qwen3_1p7b gpu={name} num_devices=4",
    "schedule": "rpbench show schedule={name} num_devices=3 num_microbatches=4",
}


def new(arguments: Sequence[str]) -> dict[str, str]:
    """Write the file; its path and the command that runs it. ConfigError for another kind, a name that is invalid or
    taken, or a folder that cannot be written.
    """
    if len(arguments) != 2 or arguments[0] not in _RUNS:
        raise ConfigError(
            f"{' '.join(['new', *arguments])}: write rpbench {usage('new')}, as in rpbench new model my_3b"
        )
    kind, name = arguments
    _check_name(kind, name)
    named = home()
    folder = named or Path.cwd() / FOLDER
    path = folder / kind / f"{name}.{'py' if kind == 'schedule' else 'yaml'}"
    if path.exists():
        raise ConfigError(f"name={name}: {path} is there; take another name, or move it away")
    check_writable(folder, "folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text_of(kind, name))
    if named is None:
        _name_folder(Path.cwd() / FILE)
    command = _RUNS[kind].format(name=name)
    print(f"rpbench: written: {path}\nrpbench: run it: {command}", file=sys.stderr)
    return {"kind": kind, "name": name, "path": str(path), "command": command}


def text_of(kind: str, name: str) -> str:
    text = (Path(__file__).with_name("texts") / f"new_{kind}.txt").read_text(encoding="utf-8")
    if kind == "schedule":
        return text.replace("NAME", name)
    keys = {"model": MODEL, "cluster": CLUSTER, "gpu": GPU}[kind]
    width = max(len(f"{key}: {about.example}") for key, about in keys.items())
    lines = [f"{f'{key}: {about.example}':<{width}}   # {about.says}; {about.range}" for key, about in keys.items()]
    return text.replace("name: NAME", "\n".join([f"name: {name}", *lines]))


def _check_name(kind: str, name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"name {name!r}: lower-case letters, digits and underscores, a letter first, as in my_{kind}")
    if len(name) > MOST_LETTERS:
        raise ConfigError(f"name {name[:20]}...: it has {len(name)} letters, a file's name takes {MOST_LETTERS}")
    if name in NO_TEXTS:
        raise ConfigError(f"name {name!r}: a YAML file or a command line takes it for no text; take another, my_{name}")
    if keyword.iskeyword(name) and kind == "schedule":
        raise ConfigError(f"name {name!r}: a word of Python, which no function can have; take another, as in my_{name}")
    if name in options_of(kind):
        entry = registry.offered().get(name) if kind == "schedule" else None
        by = f" ({entry.source})" if entry else ""
        raise ConfigError(f"{kind}={name}: there is one of this name{by}; take another")


def _name_folder(path: Path) -> None:
    """Write an `rpbench.yaml` that names the folder of the user's own files."""
    if path.exists():
        raise ConfigError(f"{path} names no folder, so that nothing here is found: add path: [{FOLDER}] to it")
    lines = (
        "# Folders with model/, cluster/, experiment/ and schedule/ of your own, relative to this file. They are found",
        f"# where rpbench runs beside it; {VARIABLE} and {FLAG} name others, which come first.",
        f"path: [{FOLDER}]",
    )
    write_atomically(path, "\n".join(lines) + "\n")
