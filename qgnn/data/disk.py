"""What survives a power failure, and files that are read whole or not at all."""

import contextlib
import errno
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

Line = TypeVar("Line")

_FOLDER = 0x10  # attribute of an entry of a zip archive


def load_whole(file: BinaryIO) -> Any:
    """What :func:`torch.save` wrote, tensors in the memory of the host.

    Args:
        file: Open at its beginning; it is read twice, the first time in pieces, to check its sums.

    Raises:
        ValueError: If it is damaged, or would run code; the message is one line.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()  # torch checks no sums, and takes what is marked as a folder for read
            marked = (entry.filename for entry in archive.infolist() if entry.external_attr & _FOLDER)
            if (name := damaged or next(marked, None)) is not None:
                raise ValueError(f"{name!r} is not what was written")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # of any type, by where it is damaged
        raise ValueError(str(error).partition("\n")[0] or type(error).__name__) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole: whatever ends this process, the path holds the old content or the new one.

    What is being written is beside it, in a file of its own whose name ends in ``.part``: an error leaves none of it,
    and what a kill leaves is of no use.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(content)
        sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Lock an open file or folder until it is closed; where there are no such locks, as under Windows, do nothing.

    Raises:
        BlockingIOError: If it is open and locked elsewhere, and ``wait`` is false.
    """
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within the block no other process is in one of the same path, where an empty file is, and is gone behind it.

    Raises:
        BlockingIOError: If another process is.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock(descriptor)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner removed it between our opening and locking it
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked, so that it is nobody else's
        os.close(descriptor)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_whole(file: int, path: Path, content: bytes) -> None:
    """Append to a file by a single write; it is on the disk when this returns.

    Args:
        file: The file, open for appending, which nobody else writes meanwhile.
        path: Its path.
        content: What is appended.

    Raises:
        OSError: If there is no space, or the disk fails; the file is then as it was before.
    """
    size = os.fstat(file).st_size
    try:
        if os.write(file, content) < len(content):
            raise OSError(errno.ENOSPC, "no space left")
        os.fsync(file)
        if not size:
            sync(path.parent)
    except OSError:
        os.ftruncate(file, size)  # nothing may ever follow half a line
        raise


def whole_lines(content: bytes, parse: Callable[[bytes], Line | None]) -> tuple[list[Line | None], int]:
    """The lines of a file that is appended to, and the number of its bytes before what a kill, or a power failure, left
    behind them.

    Args:
        content: Of the file.
        parse: The line that some bytes are, without its end; ``None`` if they are none.

    Returns:
        The lines, ``None`` for one before the last that is damaged; and the number of bytes.
    """
    *texts, torn = content.split(b"\n")  # empty behind a whole line
    lines = [parse(text) for text in texts]
    keep = len(content) - len(torn)
    if not torn and lines and lines[-1] is None:  # blocks that a power failure left without content
        keep -= len(texts[-1]) + 1
        del lines[-1]
    return lines, keep


def shorten(file: int, size: int) -> None:
    """Cut away what an open file has behind so many bytes, if it has more."""
    if size < os.fstat(file).st_size:
        os.ftruncate(file, size)
        os.fsync(file)
