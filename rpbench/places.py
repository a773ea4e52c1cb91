"""Places: the folders of models, clusters, experiments and schedules, the project's own and the user's.

    --config-dir DIR   beside any verb, once for each folder
    RPBENCH_PATH       folders, separated as in PATH
    rpbench.yaml       in the working directory: `path: [FOLDER, ...]`, relative to that file
    rpbench.conf       entry points of installed packages, whose folders have the files

A place is laid out like `conf/`: model/NAME.yaml, cluster/NAME.yaml, experiment/NAME.yaml, schedule/NAME.yaml, and
schedule/NAME.py, whose generators are registered (`rpbench.registry`).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "RPBENCH_PATH"
FILE = "rpbench.yaml"
FLAG = "--config-dir"
GROUP = "rpbench.conf"
CHECKPOINT = "checkpoint.json"  # in the folder of a checkpoint; has the digests of all its other files
ORDERS = (".txt", ".csv")  # suffixes of files with an order of actions
MOST_FILES = 20_000  # of a folder

_HERE = Path(__file__).resolve().parent
# An installed wheel has conf/ inside the package; in a clone that is a link to the folder beside it.
CONF = (_HERE / "conf").resolve() if (_HERE / "conf" / "config.yaml").is_file() else _HERE.parent / "conf"


def places() -> tuple[Path, ...]:
    """The user's folders, the nearest first; ValueError for a missing folder, or an unreadable `rpbench.yaml`."""
    return tuple(dict.fromkeys(folder for folder in (*_named(), *_of_packages()) if folder != CONF))


def home() -> Path | None:
    """The folder for new files: the nearest place that is no package; None without one."""
    return next(iter(_named()), None)


def _named() -> list[Path]:
    named = [(VARIABLE, Path(name)) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    named += [(FILE, folder) for folder in _of_file(Path.cwd() / FILE)]
    for said, folder in named:
        _check_folder(said, folder)
    return [folder.resolve() for _, folder in named]


def _check_folder(said: str, folder: Path | str) -> None:
    if not os.path.isdir(folder):  # unlike Path.is_dir it accepts impossible names
        raise ValueError(f"{said}: {str(folder)[:200]} is no folder; make it, or name one that is there")


def files_of(group: str, ending: str = ".yaml") -> list[Path]:
    """The files of a group's options: the project's own, then those of each place, sorted by name."""
    return [path for folder in (CONF, *places()) for path in sorted((folder / group).glob(f"*{ending}"))]


def own_yaml() -> Iterator[Path]:
    """Every YAML file of the user's folders; ValueError for a folder with too many files to be a place."""
    for place in places():
        num_files = 0
        for folder, _, names in os.walk(place, followlinks=True):
            num_files += len(names) + 1
            if num_files > MOST_FILES:
                raise ValueError(
                    f"{place} holds more than {MOST_FILES:,} files; name the folder in which model/, cluster/, "
                    "experiment/ or schedule/ lie"
                )
            yield from (path for name in names if name.endswith(".yaml") and (path := Path(folder) / name).is_file())


def file_of(group: str, name: str) -> Path | None:
    """The file of an option; None if there is none, ValueError if there are two."""
    found = [path for folder in (CONF, *places()) if os.path.isfile(path := folder / group / f"{name}.yaml")]
    if len(found) > 1:
        raise ValueError(
            f"{group}={name}: two files have this name, {' and '.join(map(str, found[:2]))}; rename yours, so that a "
            "name always says the same"
        )
    return found[0] if found else None


def split_dirs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments without `--config-dir DIR`, and the folders, "" for a flag without one."""
    rest: list[str] = []
    folders: list[str] = []
    waiting = list(arguments)
    while waiting:
        item = waiting.pop(0)
        flag, equals, value = item.partition("=")
        if flag != FLAG:
            rest.append(item)
        else:
            folders.append(value if equals else (waiting.pop(0) if waiting else ""))
    return rest, folders


@contextmanager
def with_dirs(arguments: Sequence[str]) -> Iterator[list[str]]:
    """The arguments without `--config-dir DIR`; inside, these folders come first, for child processes too.

    Raises ValueError for a flag without a folder, or with one that is not there.
    """
    rest, folders = split_dirs(arguments)
    if "" in folders:
        raise ValueError(f"{FLAG}: name a folder behind it, as in {FLAG} ./mine")
    for folder in folders:
        _check_folder(FLAG, folder)
    before = os.environ.get(VARIABLE)
    if folders:
        ahead = [str(Path(folder).absolute()) for folder in folders]
        os.environ[VARIABLE] = os.pathsep.join([*ahead, *([before] if before else [])])
    try:
        yield rest
    finally:
        if folders and before is None:
            del os.environ[VARIABLE]
        elif folders:
            os.environ[VARIABLE] = str(before)


def _of_file(path: Path) -> list[Path]:
    if not path.is_file():
        return []
    stat = path.stat()
    return _read(path, stat.st_mtime_ns, stat.st_size)


@cache
def _read(path: Path, changed_ns: int, size: int) -> list[Path]:
    """The folders of a `rpbench.yaml`, which is read again when it has changed."""
    from rpbench.yaml_file import read_keys  # PyYAML, only for such a file

    example = f"write folders, as in path: [mine], in {path.name}"
    found = read_keys(path)
    names = found.get("path", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: path={names!r}: {example}")
    if unknown := set(found) - {"path"}:
        raise ValueError(f"{path}: unknown key {min(map(str, unknown))!r}; {example}")
    return [path.parent / name for name in names]


@cache
def _of_packages() -> tuple[Path, ...]:
    """The folders of packages with an entry point of the group `rpbench.conf`."""
    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            spec = find_spec(point.value)
        except ImportError:
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"entry point {point.name} of {GROUP}: {point.value} is no package that can be imported")
        found.append(Path(next(iter(spec.submodule_search_locations))).resolve())
    return tuple(found)
