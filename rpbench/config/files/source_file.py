"""Source files: what a request is made of besides its values, read once, and known by their bytes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from rpbench.config.choices import ConfigError
from rpbench.whole_file import read_bytes

MOST_BYTES = 2**28


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the request was made."""

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


def read_source(key: str, name: str | None, *, within: str = "") -> SourceFile | None:
    """The file that a key names; None where it names none.

    Args:
        within: the file to read of a folder that the key names.

    Raises:
        ConfigError: if it cannot be read, or is too large to be.
    """
    if name is None:
        return None
    path = Path(name, within)
    try:
        return source_of(path, read_bytes(path, MOST_BYTES))
    except ValueError as error:
        raise ConfigError(f"{key}={name}: {error}") from None
    except OSError as error:
        if within and isinstance(error, NotADirectoryError):
            raise ConfigError(f"{key}={name}: it is no folder; name one that {within} lies in") from None
        reason = (
            f"there is no such {'checkpoint' if within else 'file'}"
            if isinstance(error, FileNotFoundError)
            else error.strerror
        )
        raise ConfigError(f"{key}={name}: cannot be read ({reason}); name a file that is there") from None
