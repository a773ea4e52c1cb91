"""Checkpoints: training that stops and goes on is the same, bit for bit, as training that does not stop."""

import zipfile
from dataclasses import replace

import pytest
import torch
from cases import build
from spared import slow
from training_cases import TINY, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.reference import largest_difference
from rpbench.engine.state import checkpoint
from rpbench.engine.state.checkpoint import CheckpointError
from rpbench.engine.state.loss_scale import LossScaling
from rpbench.engine.state.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training

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
        path = tmp_path / f"{number}.pt"
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


def _misnamed(whole):
    """A file in whose first local header the name is said to be UTF-8 and is none."""
    flag, name = 6, 30
    found = bytearray(whole)
    found[flag + 1] |= 0x08
    found[name] = 0x9F
    return bytes(found)


def test_what_cannot_be_gone_on_from_is_refused(tmp_path):
    path = tmp_path / "c.pt"
    with pytest.raises(CheckpointError, match="no such checkpoint; save one"):
        checkpoint.load(path, SUBJECT)
    checkpoint.save(path, run("1f1b", 1).state(), SUBJECT)
    whole = path.read_bytes()
    for torn in (b"", whole[:100], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(torn)
        with pytest.raises(CheckpointError, match="torn"):
            checkpoint.load(path, SUBJECT)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(CheckpointError, match="torn"):
        checkpoint.load(path, SUBJECT)
    path.write_bytes(_misnamed(whole))  # its first member's local header, not the table at its end
    with pytest.raises(CheckpointError, match="torn"):
        checkpoint.load(path, SUBJECT)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("c/data.pkl", bytes(10**6))
    with pytest.raises(CheckpointError, match="which packs none"):
        checkpoint.load(path, SUBJECT)
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="saved with dtype=float32, this run has dtype=float16"):
        checkpoint.load(path, SUBJECT | {"dtype": "float16"})
    torch.save({"something": "else"}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        checkpoint.load(path, SUBJECT)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path, state = tmp_path / "c.pt", run("1f1b", 1).state()
    checkpoint.save(path, state, SUBJECT)
    before = path.read_bytes()

    def full(content, target):
        target.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(path, state, SUBJECT)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["c.pt"]


def test_an_order_that_decides_versions_leaves_no_state():
    schedule = build("1f1b", 2, 3)
    with pytest.raises(ValueError, match="leaves no state to go on from"):
        Training(workload_of(schedule), schedule, Settings(keep_state=True))
    assert train(schedule, workload_of(schedule)).training.mean_loss(0) > 0
