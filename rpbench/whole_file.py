"""Whole files: a named file is read at once if it is a regular file or a pipe, ends soon, and is not too large.

A device may never end, a pipe may have no writer, and some system files (`/proc/kmsg`) give nothing for hours: nothing
here waits for them. All files that others may have written are read by this module.
"""

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 2**26  # 64 MiB: a thousand times what this program writes of one run
UNWRITTEN_S = 0.5  # until a writer opens a pipe, and for a system file
SILENT_S = 2.0  # between two pieces of a pipe
ENDLESS_S = 10.0  # for all of a pipe or a system file

_PIECE = 2**20
_POLL_S = 0.02
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file or a pipe; OSError if it is missing or cannot be read.

    Raises ValueError for a folder, a device or a socket, for a pipe that is silent or does not end, and for more than
    `most` bytes.
    """
    return b"".join(_content(path, most))


def sha256(path: Path) -> str:
    """The digest of a regular file of any size, read in pieces; errors as of `read_bytes`, ValueError for a pipe."""
    digest = hashlib.sha256()
    if stat.S_ISFIFO(path.stat().st_mode):
        raise ValueError("it is a pipe, which can be read once; write it into a file and name that")
    for piece in _content(path, None):
        digest.update(piece)
    return digest.hexdigest()


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a file; errors as of `read_bytes` and `text_of`."""
    return text_of(read_bytes(path, most))


def text_of(content: bytes) -> str:
    """UTF-8 content as text, without a byte order mark; ValueError for other content."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"it is no UTF-8 text (line {line}, byte {error.start}); save it as UTF-8") from None


def _content(path: Path, most: int | None) -> Iterator[bytes]:
    """The pieces of a file, up to `most` bytes; None for the size of a regular file."""
    _check_kind(path.stat())  # before opening, which is a command for some devices
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        _check_kind(found)
        limit = max(found.st_size, MOST_BYTES) if most is None else most
        if found.st_size > limit:
            raise ValueError(f"{found.st_size:,} bytes; at most {limit:,} are read")
        is_pipe = stat.S_ISFIFO(found.st_mode)
        if not (is_pipe or found.st_size):  # a system file, all of which may take seconds
            limit = min(limit, _PIECE)
        yield from _pieces(file, limit, is_pipe=is_pipe)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(file)


def _check_kind(found: os.stat_result) -> None:
    for is_kind, words in _KINDS:
        if is_kind(found.st_mode):
            raise ValueError(f"it is {words}, no regular file and no pipe; name a file")


def _pieces(file: int, most: int, *, is_pipe: bool) -> Iterator[bytes]:
    """The content piece by piece, with short waits for what is not there yet."""
    left = most + 1
    began = last = time.monotonic()
    while left > 0:
        try:
            piece = os.read(file, min(left, _PIECE))  # b"" at the end, and for a pipe without a writer
        except BlockingIOError:
            piece = None
        now = time.monotonic()
        if piece:
            yield piece
            left, last = left - len(piece), now
        elif piece == b"" and (left <= most or not is_pipe):
            return
        else:
            if piece == b"" and now - began > UNWRITTEN_S:
                raise ValueError("it is a pipe that nobody writes to; name a file")
            what, most_s = ("it is a pipe", SILENT_S) if is_pipe else ("it is a file of the system", UNWRITTEN_S)
            if now - last > most_s:
                raise ValueError(f"{what} that has given nothing for {most_s:g} s; write it into a file and name that")
            if now - began > ENDLESS_S:
                raise ValueError(f"{what} that has not ended for {ENDLESS_S:g} s; write it into a file and name that")
            time.sleep(_POLL_S)
    raise ValueError(f"more than {most:,} bytes; no more are read")
