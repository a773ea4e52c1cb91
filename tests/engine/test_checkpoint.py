"""Checkpoints: training that stops and goes on is the same, bit for bit, as training that does not stop."""

import hashlib
import io
import json
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import build
from spared import slow
from torch.distributed import checkpoint as dcp
from training_cases import TINY, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.reference import largest_difference
from rpbench.engine.state import checkpoint
from rpbench.engine.state.checkpoint import CheckpointError
from rpbench.engine.state.loss_scale import LossScaling
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.places import CHECKPOINT

MODEL = replace(TINY, dropout=0.2, tied=True)
SUBJECT = {"model": "tiny", "dtype": "float32"}
SYSTEMS = [slow(("1f1b", {})), ("vocab_parallel", {}), slow(("roundpipe", {})), ("roundpipe", {"asynchronous": True})]
NAMES = ["1f1b", "vocab_parallel", "roundpipe", "roundpipe-asynchronous"]


def run(name, num_steps, start=None, *, dtype=torch.float32, **options) -> Training:
    schedule = build(name, 2, 3, num_steps=num_steps, steps=True, **options)
    scaling = LossScaling(2.0**19, growth_steps=2) if dtype == torch.float16 else None
    optimizer = OptimizerSettings(1e-2, num_warmup_steps=3, clip_norm=0.5, loss_scaling=scaling)
    settings = Settings(optimizer, keep_gradients=True, keep_state=True)
    training = Training(workload_of(schedule, MODEL, dtype), schedule, settings, start)
    costs = uneven_costs(schedule)
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return training


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name, options", SYSTEMS, ids=NAMES)
def test_going_on_is_as_not_stopping(name, options, dtype, tmp_path):
    straight = run(name, 5, dtype=dtype, **options)
    state, losses = None, []
    for number, steps in enumerate((2, 1, 2)):  # a run of one step needs the weights before it, too
        training = run(name, steps, state, dtype=dtype, **options)
        losses += [training.mean_loss(step) for step in range(steps)]
        path = tmp_path / f"{number}"
        checkpoint.save(path, training.state(), SUBJECT)
        state = checkpoint.load(path, SUBJECT)
    assert state.num_steps == 5
    assert losses == [straight.mean_loss(step) for step in range(5)]
    end = straight.state()
    assert largest_difference(state.masters, end.masters) == 0.0
    assert state.scales == end.scales
    assert state.stale.keys() == end.stale.keys()
    for age in end.stale:
        assert largest_difference(state.stale[age], end.stale[age]) == 0.0
    for place, moments in end.moments.items():
        assert largest_difference(state.moments[place], moments) == 0.0


def test_the_weights_before_the_last_ones_matter(tmp_path):
    """Stale training that goes on from the newest weights alone is not the same."""
    straight, begun = run("roundpipe", 4, asynchronous=True), run("roundpipe", 2, asynchronous=True)
    forgetful = run("roundpipe", 2, replace(begun.state(), stale={}), asynchronous=True)
    assert forgetful.mean_loss(0) != straight.mean_loss(2)


def test_the_reference_goes_on_too():
    begun = run("roundpipe", 2, asynchronous=True)
    training = run("roundpipe", 3, begun.state(), asynchronous=True)
    reads = training.reads
    reference = reference_of(
        type("Run", (), {"training": training}), read_version=lambda _, mb: reads.fixed(mb), start=training.start
    )
    assert largest_difference(training.optimizer.masters, reference.masters) == 0.0
    assert reference.losses[0] == pytest.approx(training.mean_loss(0), rel=1e-6)


def one_file(folder):
    """The file of a checkpoint that holds its tensors."""
    return next(folder.glob("data-*/*.distcp"))


def forged(folder, name, content):
    """Replace one of the files and say so in the manifest, as somebody who means harm would."""
    found = json.loads((folder / CHECKPOINT).read_text())
    (folder / found["data"] / name).write_bytes(content)
    found["files"][name] = hashlib.sha256(content).hexdigest()
    del found["digest"]
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    (folder / CHECKPOINT).write_text(json.dumps(found | {"digest": digest}))


def test_what_cannot_be_gone_on_from_is_refused(tmp_path):
    folder = tmp_path / "c"
    with pytest.raises(CheckpointError, match="no complete checkpoint; save one"):
        checkpoint.load(folder, SUBJECT)
    checkpoint.save(folder, run("1f1b", 1).state(), SUBJECT)
    for path in (one_file(folder), one_file(folder).with_name(".metadata"), folder / CHECKPOINT):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for torn in (b"", whole[:100], whole[: len(whole) // 2], whole[:-1], bytes(flipped)):
            path.write_bytes(torn)
            with pytest.raises(CheckpointError, match=f"c is torn.*{path.name}"):
                checkpoint.load(folder, SUBJECT)
        path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="saved with dtype=float32, this run has dtype=float16"):
        checkpoint.load(folder, SUBJECT | {"dtype": "float16"})
    kept = one_file(folder).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="distcp is missing"):
        checkpoint.load(folder, SUBJECT)
    (folder / CHECKPOINT).write_text('{"something": "else"}')
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        checkpoint.load(folder, SUBJECT)
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        checkpoint.load(kept, SUBJECT)


def test_a_strangers_checkpoint_runs_no_code_and_reads_no_other_file(tmp_path):
    folder = tmp_path / "c"
    checkpoint.save(folder, run("1f1b", 1).state(), SUBJECT)
    tensors, metadata = one_file(folder), one_file(folder).with_name(".metadata")
    whole = metadata.read_bytes()
    forged(folder, ".metadata", pickle.dumps(Path("x").exists))
    with pytest.raises(CheckpointError, match=r"is torn or no checkpoint"):
        checkpoint.load(folder, SUBJECT)
    name = tensors.name.encode()
    forged(folder, ".metadata", whole.replace(name, b"../" + name[3:]))
    with pytest.raises(CheckpointError, match="none of its files"):
        checkpoint.load(folder, SUBJECT)
    forged(folder, ".metadata", whole)
    found = pickle.loads(whole)
    largest = next(iter(found.state_dict_metadata.values()))
    largest.size = torch.Size([10**9, 10**3])
    forged(folder, ".metadata", pickle.dumps(found))
    with pytest.raises(CheckpointError, match="bytes of tensors in fewer bytes of files"):
        checkpoint.load(folder, SUBJECT)
    forged(folder, ".metadata", whole)
    where = next(iter(pickle.loads(whole).storage_data.values()))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("c/data.pkl", bytes(10**6))
    content = bytearray(tensors.read_bytes())
    content[where.offset : where.offset + where.length] = packed.getvalue().rjust(where.length, b"\0")
    forged(folder, tensors.name, bytes(content))
    with pytest.raises(CheckpointError, match="packs none"):
        checkpoint.load(folder, SUBJECT)


def test_what_a_model_needs_has_to_be_there(tmp_path):
    state = run("1f1b", 1).state()
    shapes = {place: master.shape for place, master in state.masters.items()}
    moments = ("step", "exp_avg", "exp_avg_sq")

    def saved(changed):
        checkpoint.save(tmp_path / "c", changed, SUBJECT)
        return checkpoint.opened(tmp_path / "c", SUBJECT)

    saved(state).check_holds(shapes, moments)
    place = (2, "mlp.down.weight")
    with pytest.raises(CheckpointError, match=r"parameter 2.mlp.down.weight is not in it; ask for"):
        saved(replace(state, masters={p: t for p, t in state.masters.items() if p != place})).check_holds(
            shapes, moments
        )
    with pytest.raises(CheckpointError, match=r"2.mlp.down.weight is \(3,\) in it and"):
        saved(replace(state, masters=state.masters | {place: torch.ones(3)})).check_holds(shapes, moments)
    partly = {name: tensor for name, tensor in state.moments[place].items() if name != "exp_avg"}
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 2.mlp.down.weight is not in it"):
        saved(replace(state, moments=state.moments | {place: partly})).check_holds(shapes, moments)


def test_torch_reads_it_by_names_in_the_whole_model(tmp_path):
    """`torch.distributed.checkpoint` alone finds every weight and what the optimizer knows of it."""
    state = run("1f1b", 1).state()
    checkpoint.save(tmp_path / "c", state, SUBJECT)
    assert json.loads((tmp_path / "c" / CHECKPOINT).read_text())["format"] == 2, "that of all checkpoints there are"
    wanted = {f"model.{module}.{name}": torch.empty_like(tensor) for (module, name), tensor in state.masters.items()}
    wanted["optimizer.state.1.mlp.up.weight.exp_avg"] = torch.empty_like(state.masters[1, "mlp.up.weight"])
    dcp.load(wanted, checkpoint_id=one_file(tmp_path / "c").parent, no_dist=True)
    for (module, name), tensor in state.masters.items():
        assert torch.equal(wanted[f"model.{module}.{name}"], tensor)
    assert torch.equal(wanted["optimizer.state.1.mlp.up.weight.exp_avg"], state.moments[1, "mlp.up.weight"]["exp_avg"])


@pytest.mark.parametrize("step", ["write", "commit"])
def test_a_checkpoint_is_replaced_whole_or_not_at_all(step, tmp_path, monkeypatch):
    folder = tmp_path / "c"
    checkpoint.save(folder, run("1f1b", 1).state(), SUBJECT)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def full(*arguments, **options):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(*{"write": (dcp, "save"), "commit": (os, "replace")}[step], full)
        with pytest.raises(OSError, match="no space left"):
            checkpoint.save(folder, run("1f1b", 2).state(), SUBJECT)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (folder / "data-9-killed").mkdir()  # whoever wrote it did not come to its end
    assert checkpoint.load(folder, SUBJECT).num_steps == 1
    checkpoint.save(folder, run("1f1b", 2).state(), SUBJECT)
    assert checkpoint.load(folder, SUBJECT).num_steps == 2
    assert len(list(folder.iterdir())) == 2


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    """Torch reports it as an exception that is no Exception, with no word of the disk."""

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem.FileSystem.create_stream", full)
        with pytest.raises(CheckpointError, match=r"c: no checkpoint can be written, .*No space left on device\)"):
            checkpoint.save(tmp_path / "c", run("1f1b", 1).state(), SUBJECT)
    assert not list((tmp_path / "c").iterdir())


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")
    with pytest.raises(CheckpointError, match=r"mine holds thesis.tex, and is left alone"):
        checkpoint.save(tmp_path / "mine", run("1f1b", 1).state(), SUBJECT)
    with pytest.raises(CheckpointError, match=r"thesis.tex is no folder, and is left alone"):
        checkpoint.save(tmp_path / "mine" / "thesis.tex", run("1f1b", 1).state(), SUBJECT)


def test_an_order_that_decides_versions_leaves_no_state():
    schedule = build("1f1b", 2, 3)
    with pytest.raises(ValueError, match="leaves no state to go on from"):
        Training(workload_of(schedule), schedule, Settings(keep_state=True))
    assert train(schedule, workload_of(schedule)).training.mean_loss(0) > 0
