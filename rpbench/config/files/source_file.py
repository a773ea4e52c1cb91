"""Source files: what a request is made of besides its values, read once, and known by their bytes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from rpbench.config.choices import ConfigError
from rpbench.whole_file import read_bytes, sha256

MOST_BYTES = 2**28  # of a file that is read whole; a checkpoint is not


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the request was made.

    Args:
        content: empty for a file that whoever needs it reads itself.
    """

    path: Path
    content: bytes
    sha256: str

    @property
    def text(self) -> str:
        """Its content as text.

        Raises:
            ConfigError: if it is no UTF-8.
        """
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{self.path}: cannot be read (UnicodeDecodeError); give a text file") from None


def source_of(path: Path, content: bytes) -> SourceFile:
    """What was read from a path."""
    return SourceFile(path, content, hashlib.sha256(content).hexdigest())


def read_source(key: str, name: str | None, *, whole: bool = True) -> SourceFile | None:
    """The file that a key names; None where it names none.

    Args:
        whole: read it into memory; otherwise its bytes are only counted into its digest, however many there are.

    Raises:
        ConfigError: if it cannot be read, or is too large to be.
    """
    if name is None:
        return None
    path = Path(name)
    try:
        if whole:
            return source_of(path, read_bytes(path, MOST_BYTES))
        return SourceFile(path, b"", sha256(path))
    except ValueError as error:
        raise ConfigError(f"{key}={name}: {error}") from None
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(f"{key}={name}: cannot be read ({reason}); name a file that is there") from None
