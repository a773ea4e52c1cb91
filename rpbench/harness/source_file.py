"""Source files: what a request is made of besides its values, read once, and known by their bytes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from rpbench.harness.choices import ConfigError


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the request was made."""

    path: Path
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

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


def read_source(key: str, name: str | None) -> SourceFile | None:
    """The file that a key names; None where it names none.

    Raises:
        ConfigError: if it cannot be read.
    """
    if name is None:
        return None
    path = Path(name)
    try:
        if not path.is_file():
            raise FileNotFoundError(2, "there is no such file" if not path.exists() else "it is no regular file")
        return SourceFile(path, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{key}={name}: cannot be read ({error.strerror}); name a file that is there") from None
