"""Bent documents: a small sample of what `python -m tests.fuzzing` reads, and whatever it has found once."""

import json
import random
import subprocess
import sys

import pytest

from rpbench.config.loading import load
from rpbench.records.manifest import Journal, write_plan
from rpbench.run.recording import run
from rpbench.yaml_file import keys_of

from .bending import bent
from .documents import LLAMA, plain_documents
from .guard import ROOT, problem
from .readers import readers
from .requests import PLAIN, Wrong, findings, problem_of

QUICK = (
    "record",
    "record in the dashboard",
    "pack",
    "plan",
    "journal",
    "lease",
    "timeline",
    "import kineto",
    "import wandb",
    "import csv",
    "config.json",
    "cluster file",
    "rpbench.yaml",
)
DEEP = b"[" * 100_000
# What was found once: reader, a piece of its document, and what took its place; or the whole document.
FOUND = [
    ("record", b'"makespan_s": 0.0', b'"makespan_s": 1.0'),
    ("record", b'"makespan_s": 0.0', b'"makespan_s": NaN'),
    ("record", b'"schema": 3', b'"schema": 2'),
    ("record", None, DEEP),
    ("record in the dashboard", b'"makespan_s": 0.0', b'"makespan_s": 1e999'),
    ("record in the dashboard", b'"config": {', b'"config": null, "was": {'),
    ("record in tables", b'"makespan_s": ', b'"makespan_s": "fast", "was": '),
    ("record in tables", b'"num_devices": 2', b'"num_devices": 1' + b"0" * 400),
    ("record in explain", b'"overrides": ["', b'"overrides": [7, "'),
    ("record in explain", b'"overrides": ["', b'"overrides": ["model.name=${oc.env:HOME}", "'),
    ("record in explain", b'"staleness_steps": 0', b'"staleness_steps": "late"'),
    ("plan", None, DEEP),
    ("plan", b'"cells": [', b'"cells": [5, '),
    ("plan", b'"experiment"', b'"other"'),
    ("journal", b'"run_ids": [', b'"run_ids": 5, "was": ['),
    ("journal", b'"run_ids": ["', b'"run_ids": ["../../outside/'),
    ("journal", None, DEEP),
    ("journal", b'"cell": 1', b'"cell": 0'),
    ("plan", b'"planned_at": "2', b'"planned_at": "3'),
    ("record", b'"seed": ', b'"seed": 7, "seed": '),
    ("import csv", b"schedule,", b"schedule,schedule,"),
    ("import csv", b"gpipe", b"gp\x00pe"),
    ("import csv", b"gpipe", b"g" * 200_000),
    ("timeline", b"0F0", b"0" * 10_000_000),
    ("lease", None, DEEP),
    ("lease", b'"pid": ', b'"pid": "../1", "was": '),
    ("timeline", b",0.0,", b",inf,"),
    ("import wandb", b'"summary": {', b'"summary": {"surroundings": "here", '),
    ("import wandb", b'"summary": {', b'"summary": {"reason": 5, '),
    ("config.json", None, DEEP),
    ("config.json", b'"hidden_size": 2048', b'"hidden_size": Infinity'),
    ("config.json", b'"num_hidden_layers": 16', b'"num_hidden_layers": 1e999'),
    ("cluster file", b"name: ", b"name: x\nname: "),
    ("cluster file", b"name: ", b"name: .inf # "),
    ("cluster file", b"published_name: ", b"published_name: .inf # "),
    ("cluster file", b"transfer_latency_s: ", b"transfer_latency_s: 1" + b"0" * 400 + b" # "),
    ("record in tables", b'"offload": "none"', b'"offload": 1e308'),
    ("record in tables", b'"num_steps": 1', b'"num_steps": {"": {}}'),
    ("record in explain", b'"step_time_s": ', b'"was": '),
    ("record in explain", b'"step_time_s": ', b'"step_time_s": 0, "was": '),
    ("profile", b'"forward": [', b'"forward": 1, "was": ['),
    ("profile", b'"backward": [', b'"backward": [[1], '),
    ("profile", b'"weight_grad": [', b'"weight_grad": [1.0, '),
    ("cluster file", b"declared:", b"measured: 0.5\nwas:"),
    ("cluster file", b"declared:", b"measured: 0.5\ndeclared:"),
    ("record in compare", b'"fill_s": ', b'"fill_s": [], "was": '),
    ("record in compare", b'"fill_s": ', b'"fill_s": 1' + b"0" * 400 + b', "was": '),
    ("record in compare", b'"config": {', b'"config": null, "was": {'),
    ("own experiment", b"defaults:\n  - override /cost: constant", b"defaults: 7"),
    ("rpbench.yaml", None, DEEP[:300]),
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Three records with their timelines, a manifest, and what is made of them."""
    folder = tmp_path_factory.mktemp("seeds")
    words = ("num_devices=2", "num_microbatches=4", "cost=constant", "save_timeline=true", f"results_dir={folder}")
    rows = [row for name in ("gpipe", "1f1b", "dapple") for row in run(load([f"schedule={name}", *words]))]
    plan = write_plan(folder, None, ["schedule=gpipe,1f1b"], [["schedule=gpipe"], ["schedule=1f1b"]])
    for number, row in enumerate(rows):
        Journal(folder, plan, number).ended([row])
    return plain_documents(folder)


def is_refused_or_sound(reader, document, folder):
    """Read a document; whether a refusal, if it is one, is in our words."""
    try:
        reader.read(folder, document)
    except Exception as error:
        return problem(error) is None
    return True


def reader_of(name, seeds):
    known = {each.name: each for each in readers({**{key: [b""] for key in KINDS}, **seeds})}
    return known[name]


KINDS = ("edges", "nodes", "checkpoint", "checkpoint_metadata", "checkpoint_data")


@pytest.mark.parametrize("name", QUICK)
def test_bent_documents_are_refused_in_words_or_sound(name, seeds, tmp_path, monkeypatch, capsys):
    reader, chance = reader_of(name, seeds), random.Random(name)
    for number in range(12):
        document = bent(
            chance.choice(seeds[reader.documents]), reader.form, chance, chance.choice(seeds[reader.documents])
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert is_refused_or_sound(reader, document, folder), document


@pytest.mark.parametrize("name, piece, other", FOUND)
def test_what_was_found_once_is_refused_or_sound(name, piece, other, seeds, tmp_path, monkeypatch, capsys):
    reader = reader_of(name, seeds)
    sound = next((each for each in seeds[reader.documents] if piece and piece in each), b"")
    assert piece is None or sound, "the piece is in no document"
    monkeypatch.chdir(tmp_path)
    assert is_refused_or_sound(reader, other if piece is None else sound.replace(piece, other, 1), tmp_path)


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: 1\na: 2", "line 2: it is no YAML \\(key 'a' stands twice\\)"),
        (
            "a: &x [1]\nb: &y [*x, *x]\nc: &z [*y, *y, *y]\n" + "d: [" + "*z, " * 3000 + "]",
            "more than 20,000 values",
        ),
        ("a: &x [*x]", "levels, with every alias"),
        ("- 1", "no keys, but one list"),
        ("a: 2024-01-01", "put it in quotes"),
        ("a: !!python/object/apply:os.getpid []", "it is no YAML"),
    ],
)
def test_own_yaml_is_keys_and_values_that_a_person_writes(text, words):
    with pytest.raises(ValueError, match=words):
        keys_of(text)


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong([*PLAIN[:-1], "results_dir=link"]),
        Wrong([*PLAIN[:-1], "results_dir=" + "a" * 300]),
        Wrong([*PLAIN[:3], "cost=bent"], {"mine/cost/bent.yaml": b"name: other", "rpbench.yaml": b"path: [mine]"}),
        Wrong(
            ["advise", "model=config.json", "gpu=rtx4090", "num_devices=2", "sequences_per_step=2", "schedules=1f1b"],
            {"config.json": json.dumps(LLAMA | {"model_type": {}}).encode()},
        ),
    ],
    ids=["a link to itself", "a long name", "another kind of cost", "a type that is no name"],
)
def test_requests_that_broke_once_are_answered_or_refused(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    problem = problem_of(wrong, tmp_path / "a" / "b")
    assert not problem or problem.partition(": ")[0].endswith(" s"), problem  # modules that are imported take theirs


@pytest.mark.exhaustive
def test_a_thousand_wrong_requests_are_answered_or_refused():
    found = [f"{wrong}\n{problem}" for wrong, problem in findings(seed=1, number=1000)]
    assert not found, "\n\n".join(found)


@pytest.mark.exhaustive
def test_an_hour_of_bent_documents_finds_nothing():
    line = [sys.executable, "-m", "tests.fuzzing", "--minutes", "60", "--seed", "1"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]


def test_yaml_is_read_to_forty_levels_and_no_further():
    assert keys_of("a: " + "[" * 40 + "]" * 40)["a"]
    for brackets in ("[" * 41 + "]" * 41, "[" * 60_000):  # the second never ends
        with pytest.raises(ValueError, match="nested too deeply; at most 40 levels are read"):
            keys_of(f"a: {brackets}")
