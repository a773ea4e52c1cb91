"""Identity: whether a record answers the cell whose manifest names it.

The cell's overrides and experiment are composed into a request again. A record answers it if it has the same names
and configuration, was made by this code, and has the digest that its sweep wrote down.
"""

import json
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rpbench.config.choices import AnyDuel, Duel, GpuDuel, Predict
from rpbench.config.composing import Composer
from rpbench.config.loading import request_of
from rpbench.config.request import Request
from rpbench.records import provenance, record
from rpbench.records.manifest import Cell
from rpbench.records.record import Record
from rpbench.run.modes.duel.contenders import contenders, gpu_contenders, torch_contenders
from rpbench.run.recording import names
from rpbench.untrusted import parsed
from rpbench.whole_file import read_text

_OPTIONAL = ("mesh", "contender")  # names that most records do not have


def problem(row: Record, experiment: str | None, cell: Cell, digests: Collection[str]) -> str | None:
    """The first field of a record that contradicts its cell, if any.

    `digests` are those in all manifests that name the record: sweeps that share a record may each run it.
    """
    if unlike := _unlike(row, experiment, cell):
        return unlike
    if row.get("digest") in digests:
        return None
    return "a value of it is not the one that its sweep wrote down" if digests else "its manifest keeps no digest of it"


def problem_of_unreadable(path: Path, experiment: str | None, cell: Cell) -> str | None:
    """As `problem`, for a record that cannot be read; None if too little of it is there."""
    try:
        return _unlike(parsed(read_text(path)), experiment, cell)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # the file may hold anything
        return None


def _unlike(row: Record, experiment: str | None, cell: Cell) -> str | None:
    named = () if experiment is None else (f"experiment={experiment}",)
    try:
        request = _asked((*(f"{key}={value}" for key, value in cell.overrides.items()), *named))
    except ValueError as error:
        return f"the cell cannot be asked again: {error}"
    due = {key: value for key, value in _stated_by(request, row).items() if key not in _found_out(request)}
    found, wanted = (
        {".".join(path): value for path, value in leaves({key: said.get(key) for key in (*due, *_OPTIONAL)})}
        for said in (row, due)
    )
    for name in dict.fromkeys((*wanted, *found)):
        if found.get(name) != wanted.get(name) and name != "overrides":  # others may ask for the same
            return f"its {name} is {found.get(name)!r:.80}, the cell asks for {wanted.get(name)!r:.80}"
    return _asked_otherwise(row, request) or _made_elsewhere(row)


def _asked(overrides: tuple[str, ...]) -> Request:
    return _request(overrides, provenance.code_version(), provenance.conf_version())


@cache
def _request(overrides: tuple[str, ...], code_version: str, conf_version: str) -> Request:
    return request_of(_composer().compose(overrides))


_composer = cache(Composer)


def _stated_by(request: Request, row: Record) -> Record:
    """The fields that a record of a request has to have; for a duel, those of its contender's record."""
    said = names(request) | {"config": dict(request.subject), "code_version": provenance.code_version()}
    if isinstance(request.mode, AnyDuel):
        said |= _stated_of(request, request.mode, row.get("contender"))
    return dict(json.loads(json.dumps(said)))


def _stated_of(request: Request, mode: AnyDuel, contender: str | None) -> Record:
    """The fields of a contender's record that depend on the contender."""
    known: dict[str, Record]
    if isinstance(mode, Duel):
        made = contenders(mode.contenders)
        known = {each.name: {"schedule": each.schedule, "dispatch": each.dispatch} for each in made}
    elif isinstance(mode, GpuDuel):
        known = {each.name: {"schedule": each.schedule} for each in gpu_contenders(request.schedule.chosen)}
    else:
        named = torch_contenders(mode.schedules)
        known = {each.name: {"schedule": each.schedule, "generator": each.schedule} for each in named}
    return {"contender": contender, **known[contender]} if contender in known else {"contender": " or ".join(known)}


def _found_out(request: Request) -> frozenset[str]:
    """Names of a record whose values the run finds out; the request does not fix them."""
    if request.tuning_budget is not None:
        return frozenset({"partition", "num_microbatches", "num_steps"})
    if isinstance(request.mode, Predict) and request.mode.by_action:
        return frozenset({"generator", "num_microbatches"})
    if request.schedule.file is not None:
        return frozenset({"schedule", "generator", "num_devices", "num_microbatches", "num_steps"})
    return frozenset() if request.mesh is None else frozenset({"notes"})


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path and value of every leaf of nested objects."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def _asked_otherwise(row: Record, request: Request) -> str | None:
    """A problem if the record was made with other overrides that ask for something else."""
    words = tuple(row.get("overrides") or ())
    if sorted(words) == sorted(request.overrides):
        return None
    try:
        same = _asked(words).subject == request.subject
    except ValueError:
        same = False
    return None if same else f"its overrides, {' '.join(words)!r:.200}, ask for something else"


def _made_elsewhere(row: Record) -> str | None:
    """A problem if versions or machine of a record differ from its surroundings, which its run_id follows from."""
    around = row.get("surroundings")
    if around is None:
        return None if row.get("contender") else "it has no surroundings, which its run_id follows from"
    if row.get("schema") != record.SCHEMA:
        return f"its schema is {row.get('schema')!r:.80}, this code writes {record.SCHEMA}"
    for name, version in around["versions"].items():
        if row["versions"].get(name) != version:
            return f"its versions.{name} is {row['versions'].get(name)!r:.80}, its surroundings say {version!r:.80}"
    if row["hardware"] != around.get("hardware", row["hardware"]):
        return "its hardware is not that of its surroundings"
    return None
