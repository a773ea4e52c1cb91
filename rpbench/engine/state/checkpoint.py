"""Checkpoints: everything a training run goes on from, in one file that is written whole or not at all.

A file is what `torch.save` makes of plain containers and tensors. It is read by `torch.load(weights_only=True)`,
which runs no code, after every checksum in it has been looked at.
"""

import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rpbench.engine.state.gradients import Place, Tensors
from rpbench.engine.state.loss_scale import Scale

FORMAT = 1


class CheckpointError(ValueError):
    """A file that a run cannot go on from."""


@dataclass(frozen=True)
class State:
    """A training run after some optimizer steps.

    Args:
        num_steps: how many; data, dropout and learning rate go on from there.
        masters: the optimizer's weights, by owner.
        moments: what AdamW knows of each of them.
        stale: 1, 2, ... -> the working weights of so many versions ago, where the schedule trains on them.
        scales: 0, -1, ... -> the loss scale of the newest version and of those before; empty without loss scaling.
    """

    num_steps: int
    masters: Tensors
    moments: dict[Place, dict[str, torch.Tensor]]
    stale: dict[int, Tensors] = field(default_factory=dict)
    scales: dict[int, Scale] = field(default_factory=dict)

    def changed(self, change: Callable[[Tensors], Tensors]) -> "State":
        """The same with all that is a tensor a weight - masters, moments, stale weights - cut or joined alike."""
        moments: dict[Place, dict[str, torch.Tensor]] = {}
        for name in dict.fromkeys(name for found in self.moments.values() for name in found):
            of_all = change({place: found[name] for place, found in self.moments.items() if name in found})
            for place, tensor in of_all.items():
                moments.setdefault(place, {})[name] = tensor
        stale = {age: change(tensors) for age, tensors in self.stale.items()}
        return replace(self, masters=change(self.masters), moments=moments, stale=stale)


def save(path: Path, state: State, subject: Mapping[str, Any]) -> None:
    """Write a checkpoint; until it is complete and on the disk, what was at `path` before is still there.

    Args:
        subject: what is trained, as plain data; `load` wants the same.

    Raises:
        CheckpointError: for a device, a pipe or a folder in its place.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no regular file, and is left alone; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    content = {
        "format": FORMAT,
        "subject": dict(subject),
        "num_steps": state.num_steps,
        "masters": state.masters,
        "moments": state.moments,
        "stale": state.stale,
        "scales": {version: tuple(scale) for version, scale in state.scales.items()},
    }
    try:
        with temporary.open("wb") as target:
            torch.save(content, target)
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, subject: Mapping[str, Any]) -> State:
    """Read a checkpoint of the same subject.

    Raises:
        CheckpointError: if there is none, it is torn, or it is of something else.
    """
    content = _read(path)
    for key, wanted in subject.items():
        if (found := content["subject"].get(key)) != wanted:
            raise CheckpointError(
                f"{path} was saved with {key}={found}, this run has {key}={wanted}; "
                "ask for the same, or begin without checkpoint.resume_from"
            )
    scales = {version: Scale(*scale) for version, scale in content["scales"].items()}
    return State(content["num_steps"], content["masters"], content["moments"], content["stale"], scales)


# What reading a file raises whose bytes are not those that were written.
_TORN = (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, struct.error)


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as file:
            if any(member.compress_type != zipfile.ZIP_STORED for member in file.infolist()):
                raise CheckpointError(f"{path}: no checkpoint of this program, which packs none; name another file")
            damaged = file.testzip()
        if damaged is None:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(content, dict) and content.get("format") == FORMAT:
                return content
            raise CheckpointError(f"{path}: not a checkpoint of this program (format {FORMAT}); name another file")
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint; save one with checkpoint.save_to") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); name another file") from None
    except _TORN as error:
        raise CheckpointError(f"{path} is torn or no checkpoint ({type(error).__name__}); name another file") from None
    raise CheckpointError(f"{path} is torn ({damaged} is damaged); name another file")
