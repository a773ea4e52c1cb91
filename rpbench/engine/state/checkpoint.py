"""Checkpoints: the state that a training run resumes from, in a folder that is written whole or not at all.

    FOLDER/checkpoint.json   what is trained, after how many steps, and the digest of every file; it comes last
    FOLDER/data-STEPS-WORD/  what `torch.distributed.checkpoint` writes: `.metadata`, `__RANK_NUMBER.distcp`

Tensors have their names in the whole model, so a run may resume under another schedule, partition or number of ranks;
shards are joined or cut as they are read. Data and dropout have no other state: the position in the data is the number
of steps times microbatches a step, and dropout draws from seed, layer and microbatch. A new checkpoint counts from the
moment `checkpoint.json` is replaced, in one operation.

Torch's metadata is a pickle: it is read after the digest of every file has been checked, by an unpickler that knows the
classes of metadata and no others.
"""

import hashlib
import io
import json
import os
import pickle
import secrets
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rpbench.engine.state.gradients import Place, Tensors
from rpbench.engine.state.loss_scale import Scale
from rpbench.places import CHECKPOINT
from rpbench.untrusted import parsed
from rpbench.whole_file import read_text, sha256

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

FORMAT = 2
DATA = "data-"
Moments = dict[Place, dict[str, torch.Tensor]]


class CheckpointError(ValueError):
    """A folder that a run cannot resume from, or cannot be saved to."""


@dataclass(frozen=True)
class State:
    """A training run after some optimizer steps."""

    num_steps: int  # how many; data, dropout and learning rate continue from there
    masters: Tensors
    moments: Moments
    # 1, 2, ... -> the working weights of so many versions ago, where the schedule reads them
    stale: dict[int, Tensors] = field(default_factory=dict)
    # 0, -1, ... -> the loss scale of the newest version and of those before; empty without loss scaling
    scales: dict[int, Scale] = field(default_factory=dict)

    def changed(self, change: Callable[[Tensors], Tensors]) -> "State":
        """The same state with masters, moments and stale weights all cut, or all joined."""
        moments: Moments = {}
        for name in dict.fromkeys(name for found in self.moments.values() for name in found):
            of_all = change({place: found[name] for place, found in self.moments.items() if name in found})
            for place, tensor in of_all.items():
                moments.setdefault(place, {})[name] = tensor
        stale = {age: change(tensors) for age, tensors in self.stale.items()}
        return replace(self, masters=change(self.masters), moments=moments, stale=stale)


# --- names ----------------------------------------------------------------------------------------------------


def named(masters: Tensors, moments: Mapping[Place, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's state by names in the whole model, a sequence of modules with the embedding first."""
    return {f"model.{_word(place)}": tensor for place, tensor in masters.items()} | {
        moment_name(place, moment): tensor for place, found in moments.items() for moment, tensor in found.items()
    }


def moment_name(place: Place, moment: str) -> str:
    return f"optimizer.state.{_word(place)}.{moment}"


def _word(place: Place) -> str:
    module, name = place
    return f"{module}.{name}"


def _place(word: str) -> Place:
    module, _, name = word.partition(".")
    return int(module), name


def _unnamed(tensors: Mapping[str, torch.Tensor], manifest: "Manifest") -> State:
    state = State(manifest.num_steps, {}, {}, {}, manifest.scales)
    for key, tensor in tensors.items():
        kind, _, rest = key.partition(".")
        if kind == "model":
            state.masters[_place(rest)] = tensor
        elif kind == "before":
            age, _, word = rest.partition(".")
            state.stale.setdefault(int(age), {})[_place(word)] = tensor
        else:
            word, _, moment = rest.removeprefix("state.").rpartition(".")
            state.moments.setdefault(_place(word), {})[moment] = tensor
    return state


# --- writing --------------------------------------------------------------------------------------------------


def save(folder: Path, state: State, subject: Mapping[str, Any]) -> None:
    """Write a checkpoint of a `subject`, which `load` requires again: the model and its training, as plain data.

    Until it is complete and on the disk, the folder's former one stays valid. Raises CheckpointError as `check_target`.
    """
    tensors = named(state.masters, state.moments)
    for age, stale in state.stale.items():
        tensors |= {f"before.{age}.{_word(place)}": tensor for place, tensor in stale.items()}
    with begun(folder, state.num_steps) as data:
        write(data, tensors, alone=True)
        commit(folder, data, state.num_steps, subject, state.scales)


@contextmanager
def begun(folder: Path, num_steps: int) -> Iterator[Path]:
    """A new data folder within a checkpoint's, removed if the block raises; errors as of `check_target`."""
    check_target(folder)
    data = folder / f"{DATA}{num_steps}-{secrets.token_hex(4)}"
    data.mkdir(parents=True)
    try:
        yield data
    except BaseException:
        shutil.rmtree(data, ignore_errors=True)
        raise


def check_target(folder: Path) -> None:
    """Refuse to write where anything but a checkpoint is: a CheckpointError naming the file."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder, and is left alone; name a new folder")
    ours = DATA, f".{CHECKPOINT}"
    others = [found for found in folder.glob("*") if found.name != CHECKPOINT and not found.name.startswith(ours)]
    if others:
        raise CheckpointError(f"{folder} holds {others[0].name}, and is left alone; name a new folder")


def write(data: Path, tensors: Mapping[str, torch.Tensor], *, alone: bool) -> None:
    """Write tensors with torch; all processes call this, each with its own tensors, unless `alone`.

    CheckpointError if that fails, as on a full disk.
    """
    from torch.distributed import checkpoint as dcp  # half a second to import, and most runs keep nothing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        try:
            dcp.save({name: tensor.detach() for name, tensor in tensors.items()}, checkpoint_id=data, no_dist=alone)
        except dcp.CheckpointException as error:  # which is no Exception, and names no cause
            why: BaseException = next(iter(error.failures.values()))[0]
            while why.__context__ is not None:  # a zip file that cannot be ended hides that the disk is full
                why = why.__context__
            raise CheckpointError(f"{data.parent}: no checkpoint can be written, make room there ({why})") from error


def commit(
    folder: Path, data: Path, num_steps: int, subject: Mapping[str, Any], scales: Mapping[int, Scale] | None = None
) -> None:
    """Make `data` the checkpoint of a folder, and remove the former one."""
    content = {
        "format": FORMAT,
        "subject": dict(subject),
        "num_steps": num_steps,
        "scales": {str(version): list(scale) for version, scale in (scales or {}).items()},
        "data": data.name,
        "files": {found.name: sha256(found) for found in sorted(data.iterdir())},
    }
    _sync(data)
    temporary = folder / f".{CHECKPOINT}.{os.getpid()}"
    try:
        with temporary.open("w") as target:
            target.write(json.dumps(content | {"digest": _digest(content)}, indent=1))
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, folder / CHECKPOINT)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(folder)
    for old in folder.glob(f"{DATA}*"):
        if old != data:
            shutil.rmtree(old, ignore_errors=True)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# --- reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint whose files have the right digests; torch's files are in `data`."""

    folder: Path
    num_steps: int
    scales: dict[int, Scale]
    data: Path
    metadata: "Metadata"

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: kept.size for name, kept in self.metadata.state_dict_metadata.items()}  # type: ignore[union-attr]

    def check_holds(self, shapes: Mapping[Place, torch.Size], moments: Collection[str]) -> None:
        """Refuse (CheckpointError) a checkpoint without a trained parameter of these shapes, or one of its moments."""
        for place, shape in shapes.items():
            found = self.shapes.get(f"model.{_word(place)}")
            if found != shape:
                what = "is not in it" if found is None else f"is {tuple(found)} in it and {tuple(shape)} in the model"
                raise CheckpointError(
                    f"{self.folder}: parameter {_word(place)} {what}; ask for the model that was saved, or begin "
                    "without checkpoint.resume_from"
                )
            has = {name for name in moments if moment_name(place, name) in self.shapes}
            if has and has != set(moments):
                raise CheckpointError(
                    f"{self.folder}: {min(set(moments) - has)} of parameter {_word(place)} is not in it; begin without "
                    "checkpoint.resume_from"
                )

    def state(self) -> State:
        """The whole state; raises CheckpointError for a file that torch cannot read."""
        tensors = {
            name: torch.empty(kept.size, dtype=kept.properties.dtype)  # type: ignore[union-attr]  # looked at
            for name, kept in self.metadata.state_dict_metadata.items()
        }
        try:
            read(self.data, tensors, alone=True)
            return _unnamed(tensors, self)
        except _TORN as error:
            raise _torn(self.folder, type(error).__name__) from None


def state_in(data: Path, num_steps: int) -> State:
    """The state in the data folder of a checkpoint that `opened` has checked."""
    return Manifest(data.parent, num_steps, {}, data, metadata_of(data)).state()


def load(folder: Path, subject: Mapping[str, Any]) -> State:
    """Read a checkpoint; CheckpointError if there is none, it is torn, or its subject differs."""
    return opened(folder, subject).state()


def opened(folder: Path, subject: Mapping[str, Any]) -> Manifest:
    """A checkpoint of the same subject, all of whose files are whole; raises CheckpointError as `load` does."""
    content = _content(folder)
    for key, wanted in json.loads(json.dumps(dict(subject))).items():
        if (kept := content["subject"].get(key)) != wanted:
            raise CheckpointError(
                f"{folder} was saved with {key}={kept}, this run has {key}={wanted}; "
                "ask for the same, or begin without checkpoint.resume_from"
            )
    data = folder / content["data"]
    try:
        for name, digest in content["files"].items():
            if Path(name).name != name or sha256(data / name) != digest:
                raise _torn(folder, f"{content['data']}/{name} is damaged")
        scales = {int(version): Scale(*scale) for version, scale in content["scales"].items()}
        return Manifest(folder, content["num_steps"], scales, data, metadata_of(data))
    except FileNotFoundError as error:
        raise _torn(folder, f"{error.filename} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}); name another folder") from None
    except CheckpointError:
        raise
    except _TORN as error:
        raise _torn(folder, type(error).__name__) from None


# The errors of reading damaged files.
_TORN = (
    *(zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, struct.error),
    *(AttributeError, TypeError, AssertionError, ImportError, MemoryError),
)


def _torn(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{folder} is torn or no checkpoint ({why}); name another folder")


def _content(folder: Path) -> dict[str, Any]:
    """The content of `checkpoint.json`, after its digest is checked."""
    try:
        content = parsed(read_text(folder / CHECKPOINT))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: there is no complete checkpoint; save one with checkpoint.save_to=FOLDER"
        ) from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder, as checkpoint.save_to makes it") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}); name another folder") from None
    except ValueError as error:
        raise _torn(folder, f"{CHECKPOINT}: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: not a checkpoint of this program (format {FORMAT}); name another folder")
    digest = content.pop("digest", None)
    if digest != _digest(content) or not str(content["data"]).startswith(DATA) or "/" in content["data"]:
        raise _torn(folder, f"{CHECKPOINT} is damaged")
    return content


def read(data: Path, tensors: dict[str, torch.Tensor], *, alone: bool) -> None:
    """Fill tensors by name from data that `opened` has checked; `alone` as in `write`."""
    from torch.distributed import checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        """Torch's reader, with an unpickler that runs no code."""

        def read_metadata(self, *args: Any, **options: Any) -> "Metadata":
            return metadata_of(data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            dcp.load(tensors, storage_reader=Reader(data), no_dist=alone)
        except dcp.CheckpointException as error:  # which is no Exception
            raise RuntimeError(str(error)) from error


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    _METADATA: {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "bfloat16", "float16", "int64", "strided"},
}


class _Unpickler(pickle.Unpickler):
    """Reads torch's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if metadata has it."""
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return lambda *parts: "/".join(parts)  # where it was written, which nobody reads
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is none of torch's metadata")
        return super().find_class(module, name)


def metadata_of(data: Path) -> "Metadata":
    """Torch's metadata, checked; CheckpointError for files not beside it, packed ones, tensors too large."""
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

    with (data / ".metadata").open("rb") as file:
        found: Metadata = _Unpickler(file).load()
    found.storage_meta = StorageMeta()
    num_bytes = 0
    for kept in found.state_dict_metadata.values():
        if not isinstance(kept, TensorStorageMetadata):
            raise _torn(data, "other things than tensors")
        num_bytes += kept.size.numel() * kept.properties.dtype.itemsize
    if num_bytes > sum(each.stat().st_size for each in data.iterdir()):
        raise _torn(data, f"{num_bytes:,} bytes of tensors in fewer bytes of files")
    for where in found.storage_data.values():
        if "/" in where.relative_path or where.transform_descriptors:
            raise _torn(data, f"{where.relative_path} is none of its files")
        with (data / where.relative_path).open("rb") as file:
            file.seek(where.offset)
            members = zipfile.ZipFile(io.BytesIO(file.read(where.length))).infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise _torn(data, f"{where.relative_path} is packed, and this program packs none")
    return found
