"""Whole files: what is read at once, if it is a regular file and no larger than such a file can be."""

from pathlib import Path

MOST_BYTES = 2**26  # 64 MiB: a thousand times what this program writes of one run


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file.

    Raises:
        ValueError: for a folder, a pipe or a device, which may never end, and for a file of more than `most` bytes.
        OSError: if it is not there or cannot be read.
    """
    stat = path.stat()
    if not path.is_file():
        raise ValueError("it is no regular file; name one")
    if stat.st_size > most:
        raise ValueError(f"{stat.st_size:,} bytes; at most {most:,} are read")
    return path.read_bytes()


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The same as text.

    Raises:
        ValueError: also for what is no UTF-8.
    """
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 text (byte {error.start})") from None
