"""Readers: every way in for what strangers wrote, each with what holds for whatever it accepts."""

import contextlib
import io
import json
import os
import socket
import socketserver
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path

from analysis.dashboard.server import Dashboard, Rows
from rpbench.advice.model_source import architecture_of
from rpbench.cli import _dispatch
from rpbench.commands.recorded.store import canonical, pack, table, table_of
from rpbench.config.loading import cluster_file
from rpbench.places import places
from rpbench.records import record
from rpbench.records.manifest import PLAN, PLANNED, STATES, Manifest, Plan, is_settled, read_manifest
from rpbench.records.record import Record
from rpbench.sweep.lease import Leases

from .documents import TRAIN, Documents
from .guard import Wrong

Read = Callable[[Path, bytes], object]


@dataclass(frozen=True)
class Reader:
    """A way in.

    Args:
        name: what it is called.
        documents: the kind of what it reads.
        form: how that is bent (`bending.BENDS`).
        read: reads it as a user would; raises what is no refusal.
        free: the document is the user's own words, which may name any file.
    """

    name: str
    documents: str
    form: str
    read: Read
    free: bool = False


def command(*words: str) -> tuple[int, str]:
    """A command line: its status, and what it prints.

    Raises:
        Wrong: if a run broke, or JSON on stdout is none.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = _dispatch(list(words))
    finally:
        sys.stdout.write(out.getvalue())
        sys.stderr.write(err.getvalue())
    if status == 1:
        raise Wrong(err.getvalue()[-1500:])
    return status, out.getvalue()


def strict(text: str) -> object:
    """JSON as other programs read it."""

    def refuse(word: str) -> None:
        raise Wrong(f"{word} on stdout")

    return json.loads(text, parse_constant=refuse)


def readers(seeds: Documents) -> list[Reader]:
    """All of them; some need a sound document beside the bent one."""
    of = Bound(seeds)
    return [
        Reader("record", "record", "json", of.sealed_record),
        Reader("record in tables", "old record", "json", of.tables),
        Reader("record in compare", "old record", "json", of.compared),
        Reader("record in the dashboard", "old record", "json", of.shown),
        Reader("record in explain", "old record", "json", of.explained),
        Reader("record under a sweep", "old record", "json", of.previewed),
        Reader("pack", "pack", "bytes", of.packed),
        Reader("plan", "plan", "json", of.plan),
        Reader("journal", "journal", "lines", of.journal),
        Reader("lease", "lease", "json", lease),
        Reader("timeline", "timeline", "tokens", of.timeline),
        Reader("checkpoint", "checkpoint", "json", of.checkpoint),
        Reader("checkpoint's metadata", "checkpoint_metadata", "bytes", of.checkpoint_metadata),
        Reader("import kineto", "kineto", "json", lambda here, it: imported(here, it, "kineto", "trace.json")),
        Reader("import wandb", "wandb", "lines", lambda here, it: imported(here, it, "wandb", "runs.json")),
        Reader("import csv", "table", "tokens", lambda here, it: imported(here, it, "csv", "table.csv")),
        Reader("config.json", "config", "json", config),
        Reader("cluster file", "cluster", "yaml", cluster),
        Reader("rpbench.yaml", "places", "yaml", own_places, free=True),
        Reader("own model", "model", "yaml", lambda here, it: own(here, it, "model"), free=True),
        Reader("own cluster", "cluster", "yaml", lambda here, it: own(here, it, "cluster"), free=True),
        Reader("own experiment", "experiment", "yaml", lambda here, it: own(here, it, "experiment"), free=True),
        Reader("schedule file", "schedule", "tokens", lambda here, it: scheduled(here, it, "own.txt")),
        Reader("schedule as CSV", "torch_csv", "tokens", lambda here, it: scheduled(here, it, "own.csv")),
        Reader("messages of a table", "torch_csv", "tokens", messages),
        Reader("profile", "profile", "json", profile),
        Reader("PipeDream nodes", "nodes", "tokens", of.nodes),
        Reader("PipeDream edges", "edges", "tokens", of.edges),
        Reader("text", "text", "text", text),
        Reader("dashboard request", "request", "bytes", of.request),
        Reader("query", "sql", "text", of.query),
        Reader("command line", "words", "lines of words", of.words, free=True),
    ]


class Bound:
    """Readers that need sound documents beside the bent one."""

    def __init__(self, seeds: Documents) -> None:
        self._seeds = seeds
        self._sound = [json.loads(document) for document in seeds["record"]]
        self._known = {row["run_id"]: row for row in self._sound}

    def _put(self, folder: Path, document: bytes) -> tuple[Path, str]:
        """Results with the document, under its own name where it says one, and two sound records of other runs."""
        results = folder / "results"
        try:
            name = str(json.loads(document)["run_id"])
        except (ValueError, KeyError, TypeError, RecursionError):
            name = ""
        name = name if len(name) == 16 and name.isalnum() and name.isascii() else "f" * 16
        files = {row["run_id"]: json.dumps(row).encode() for row in self._beside(name)[:2]} | {name: document}
        for run, content in files.items():
            (results / run).mkdir(parents=True)
            (results / run / "record.json").write_bytes(content)
        return results, name

    def _beside(self, name: str) -> list[Record]:
        """The sound records of other runs."""
        return [row for row in self._sound if row["run_id"] != name]

    def sealed_record(self, folder: Path, document: bytes) -> None:
        """What is accepted is what was written, to the last value."""
        for name, row in self._known.items():
            (folder / name).mkdir()
            (folder / name / "record.json").write_bytes(document)
            found = record.read(folder / name)
            if found is not None and found != row:
                changed = [key for key in {**row, **found} if row.get(key) != found.get(key)]
                raise Wrong(f"accepted with other values: {changed}")

    def tables(self, folder: Path, document: bytes) -> None:
        results, _ = self._put(folder, document)
        where = f"results_dir={results}"
        for form in ("csv", "jsonl", "latex"):
            command("export", "--format", form, where)
        command("export", "--format", "parquet", where, f"out={folder / 'table.parquet'}")
        command("query", "select schedule, count(*) as n from runs group by schedule order by n", where)
        command("pivot", "--rows", "model", "--columns", "schedule", "--value", "makespan_s", where)

    def packed(self, folder: Path, document: bytes) -> None:
        """Whatever stands in a pack, the table is that of the records."""
        for row in self._sound:
            (folder / row["run_id"]).mkdir()
            (folder / row["run_id"] / "record.json").write_text(json.dumps(row))
        path, _ = pack(folder)
        path.write_bytes(document)
        if table(folder).to_pylist() != table_of(canonical(folder)).to_pylist():
            raise Wrong("a table of other values")

    def compared(self, folder: Path, document: bytes) -> None:
        results, name = self._put(folder, document)
        other = self._beside(name)[0]["run_id"]
        strict(command("compare", other, name, f"results_dir={results}")[1])
        strict(command("compare", name, other, f"results_dir={results}")[1])

    def shown(self, folder: Path, document: bytes) -> None:
        results, _ = self._put(folder, document)
        strict(json.dumps(Rows(results).read()))

    def explained(self, folder: Path, document: bytes) -> None:
        results, name = self._put(folder, document)
        sound = next(row["run_id"] for row in self._beside(name) if row["mode"] == "simulate")
        strict(command("explain", sound, name, f"results_dir={results}")[1])

    def previewed(self, folder: Path, document: bytes) -> None:
        results, _ = self._put(folder, document)
        command("-m", "--dry-run", "schedule=gpipe", "num_devices=2", f"results_dir={results}")
        canonical(results)

    def _manifest(self, folder: Path, plan: bytes, journal: bytes) -> Manifest:
        place = folder / "manifests" / "sweep"
        place.mkdir(parents=True)
        (place / PLAN).write_bytes(plan)
        (place / "worker.jsonl").write_bytes(journal)
        found = read_manifest(folder, "sweep")
        assert found is not None
        for cell in found.cells:
            if cell.state not in STATES or not all(isinstance(run_id, str) for run_id in cell.run_ids):
                raise Wrong(f"{cell!r}")
            is_settled(folder, cell, [f"{key}={value}" for key, value in cell.overrides.items()])
            str(cell)
        Plan("sweep", "x").folder(folder)
        sum(found.counts.values())
        found.command.encode()
        return found

    def plan(self, folder: Path, document: bytes) -> None:
        """What is accepted is what was written, to the last value."""
        self._manifest(folder, document, self._seeds["journal"][0])
        if json.loads(document) not in map(json.loads, self._seeds["plan"]):
            raise Wrong("accepted with other values")

    def journal(self, folder: Path, document: bytes) -> None:
        """A cell is as it was told, or planned."""
        told = self._manifest(folder / "sound", self._seeds["plan"][0], b"\n".join(self._seeds["journal"]))
        found = self._manifest(folder, self._seeds["plan"][0], document)
        for cell, sound in zip(found.cells, told.cells, strict=True):
            if cell != sound and cell.state != PLANNED:
                raise Wrong(f"accepted with other values: {cell!r}")

    def timeline(self, folder: Path, document: bytes) -> None:
        """As the page reads it, beside every sound record: it is the one that was kept, or none."""
        for row in self._sound:
            place = folder / row["run_id"]
            place.mkdir()
            (place / "record.json").write_text(json.dumps(row))
            (place / "timeline.csv").write_bytes(document)
            found = Rows(folder).timeline(row["run_id"])
            strict(json.dumps(found))
            if found is not None and document not in self._seeds["timeline"]:
                raise Wrong("a timeline that nobody kept")

    def checkpoint(self, folder: Path, document: bytes) -> None:
        """What is accepted is what was written."""
        self._resumed(folder, document, self._seeds["checkpoint_metadata"][0])
        if json.loads(document) != json.loads(self._seeds["checkpoint"][0]):
            raise Wrong("goes on from another checkpoint than was saved")

    def checkpoint_metadata(self, folder: Path, document: bytes) -> None:
        """Torch's metadata, with a manifest that vouches for it."""
        content = json.loads(self._seeds["checkpoint"][0])
        content["files"][".metadata"] = sha256(document).hexdigest()
        del content["digest"]
        digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        row = self._resumed(folder, json.dumps(content | {"digest": digest}).encode(), document)
        if row["status"] == "ok" and not isfinite(row["loss"]):
            raise Wrong("goes on from weights that are no numbers")

    def _resumed(self, folder: Path, manifest: bytes, metadata: bytes) -> Record:
        data = folder / "state" / json.loads(self._seeds["checkpoint"][0])["data"]
        data.mkdir(parents=True)
        (data / ".metadata").write_bytes(metadata)
        (data / "__0_0.distcp").write_bytes(self._seeds["checkpoint_data"][0])
        (folder / "state" / "checkpoint.json").write_bytes(manifest)
        found = command(*TRAIN, "num_steps=4", "checkpoint.resume_from=state", "results_dir=out")
        return json.loads(found[1])

    def nodes(self, folder: Path, document: bytes) -> None:
        self._pipedream(folder, document, self._seeds["edges"][0])

    def edges(self, folder: Path, document: bytes) -> None:
        self._pipedream(folder, self._seeds["nodes"][0], document)

    def _pipedream(self, folder: Path, nodes: bytes, edges: bytes) -> None:
        (folder / "n.csv").write_bytes(nodes)
        (folder / "e.csv").write_bytes(edges)
        words = ("profile=n.csv", "edges=e.csv", "num_machines=4", "bandwidth_bytes_per_s=1e9")
        strict(command("plan", "plan=pipedream", *words)[1])

    def query(self, folder: Path, document: bytes) -> None:
        results, _ = self._put(folder, self._seeds["record"][-1])
        command("query", document.decode("utf-8", "replace"), f"results_dir={results}")

    def words(self, folder: Path, document: bytes) -> None:
        """A command line beside results and files that are sound."""
        results, name = self._put(folder, self._seeds["record"][-1])
        (folder / "n.csv").write_bytes(self._seeds["nodes"][0])
        (folder / "e.csv").write_bytes(self._seeds["edges"][0])
        (folder / "table.csv").write_bytes(self._seeds["table"][0])
        line = document.decode("utf-8", "replace").replace("\x00", "")
        line = line.replace("RUN", name).replace("OTHER", self._beside(name)[0]["run_id"])
        words = [word for word in line.split("\n") if word]
        if words and not is_endless(words):
            command(*words)
        assert results.is_dir()

    def request(self, folder: Path, document: bytes) -> None:
        """The page's server over loopback; an exception in one of its threads is heard."""
        results, name = self._put(folder, self._seeds["record"][-1])
        broken: list[BaseException | None] = []

        def heard(self: object, request: object, address: object) -> None:
            broken.append(sys.exc_info()[1])

        before, socketserver.BaseServer.handle_error = socketserver.BaseServer.handle_error, heard  # type: ignore[method-assign, assignment]
        try:
            with Dashboard(results) as server:
                _ask(server.url, document, name)
        finally:
            socketserver.BaseServer.handle_error = before  # type: ignore[method-assign]
        if any(not isinstance(error, ConnectionError) for error in broken):
            raise Wrong(repr(broken))


def is_endless(words: list[str]) -> bool:
    """Command lines that serve, measure or train for as long as they are asked to: no readers."""
    return words[0] in ("dashboard", "calibrate", "advise", "report", "profile", "new") or any(
        word.startswith(("backend=", "mode=", "experiment=", "results_dir=/")) for word in words
    )


def _ask(url: str, document: bytes, name: str) -> None:
    host = url.removeprefix("http://").rstrip("/")
    words = document.replace(b"HOST", host.encode()).replace(b"RUN", name.encode())
    with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), timeout=20) as wire:
        wire.sendall(words)
        wire.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := wire.recv(65536):
            answer += piece
    if b"Traceback" in answer:
        raise Wrong(answer[-500:].decode("utf-8", "replace"))


def lease(folder: Path, document: bytes) -> None:
    """A lease that lapses, or is somebody's; whoever takes it and gives it back leaves nothing."""
    place = folder / ".leases"
    place.mkdir()
    (place / "run.3").write_bytes(document)
    leases = Leases(folder)
    held = leases.is_held("run")
    mine = leases.take("run")
    if held == (mine is not None):
        raise Wrong("held and free at once")
    if mine is not None:
        leases.give_back(mine)
        if list(place.iterdir()):
            raise Wrong("leases are left")
    leases.close()


def imported(folder: Path, document: bytes, form: str, name: str) -> None:
    """Records that an import writes are sound, and a trace has lanes without overlap."""
    (folder / name).write_bytes(document)
    _, out = command("import", form, name, "results_dir=out")
    for line in out.splitlines():
        strict(line)
    if form == "kineto":
        _check_lanes(json.loads((folder / "trace.timeline.json").read_text()))
        return
    if len(list(record.read_all(folder / "out"))) != len({json.loads(line)["run_id"] for line in out.splitlines()}):
        raise Wrong("a record it has written is not sound")
    if out:
        for shape in ("csv", "jsonl", "latex"):
            command("export", "--format", shape, "results_dir=out")


def _check_lanes(trace: dict) -> None:
    ends: dict[tuple[int, int], float] = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        lane = event["pid"], event["tid"]
        if event["ts"] < ends.get(lane, 0) or event["dur"] < 0:
            raise Wrong(f"slices of lane {lane} overlap")
        ends[lane] = event["ts"] + event["dur"]


def config(folder: Path, document: bytes) -> None:
    """A model whose sizes are whole numbers that can be, or a refusal that names the file."""
    path = folder / "config.json"
    path.write_bytes(document)
    try:
        found = architecture_of(path)
    except ValueError as error:
        _check_named(error, ("config.json",))
        raise
    sizes = (found.num_layers, found.hidden, found.heads, found.vocab, found.key_value_heads or 1)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise Wrong(f"sizes {sizes}")


def _check_named(error: ValueError, words: tuple[str, ...]) -> None:
    if not any(word in str(error) for word in words):
        raise Wrong(f"does not name the file: {error}") from error


def cluster(folder: Path, document: bytes) -> None:
    path = folder / "mine.yaml"
    path.write_bytes(document)
    found = cluster_file(path)
    for name, value in vars(found).items():
        if isinstance(value, float) and not isfinite(value):
            raise Wrong(f"{name}={value}")


def own_places(folder: Path, document: bytes) -> None:
    (folder / "mine").mkdir()
    (folder / "yours").mkdir()
    (folder / "rpbench.yaml").write_bytes(document)
    places()


def own(folder: Path, document: bytes, group: str) -> None:
    """A file of the user's own group, chosen and run."""
    place = folder / "mine" / group
    place.mkdir(parents=True)
    (place / "bent.yaml").write_bytes(document)
    words = ("--dry-run", "-m") if group == "experiment" else ()
    before = os.environ.get("RPBENCH_PATH")
    os.environ["RPBENCH_PATH"] = str(folder / "mine")
    try:
        command(*words, f"{group}=bent", "cost=constant", "num_devices=2", "num_microbatches=2", "results_dir=out")
    finally:
        if before is None:
            del os.environ["RPBENCH_PATH"]


def scheduled(folder: Path, document: bytes, name: str) -> None:
    (folder / name).write_bytes(document)
    try:
        command(f"schedule_file={name}", "cost=constant", "results_dir=out")
    except ValueError as error:
        _check_named(error, (name, "rank", "row", "schedule"))
        raise


def messages(folder: Path, document: bytes) -> None:
    """Judged, whatever the verdict, or refused."""
    (folder / "own.csv").write_bytes(document)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = _dispatch(["show", "check=communication", "schedule_file=own.csv"])
    found = {verdict["verdict"] for verdict in json.loads(out.getvalue())["verdicts"]}
    if (status == 0) != (found == {"alive"}) or not found <= {"alive", "mixed", "broken", "dead"}:
        raise Wrong(f"status {status} of {found}")


def profile(folder: Path, document: bytes) -> None:
    (folder / "times.json").write_bytes(document)
    words = ("cost=profiled", "model=tiny_gpt", "cost.profile=times.json", "num_devices=2", "num_microbatches=2")
    status, out = command(*words, "results_dir=out")
    row = json.loads(out)
    if row["status"] == "ok" and not (isfinite(row["makespan_s"]) and row["makespan_s"] >= 0):
        raise Wrong(f"makespan {row['makespan_s']}")
    assert status == 0


def text(folder: Path, document: bytes) -> None:
    (folder / "words.txt").write_bytes(document)
    command(*TRAIN, "workload=text", "workload.path=words.txt", "results_dir=out")
