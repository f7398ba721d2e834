"""What survives a power failure, and files that are read whole or not at all."""

import contextlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch


def load_whole(file: BinaryIO) -> Any:
    """What :func:`torch.save` wrote, tensors in the memory of the host.

    Args:
        file: Open at its beginning; it is read twice, the first time in pieces, to check its sums.

    Raises:
        ValueError: If it is damaged, or would run code; the message is one line.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            if (damaged := archive.testzip()) is not None:  # torch checks no sums
                raise ValueError(f"{damaged} is not what was written")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # of any type, by where it is damaged
        raise ValueError(str(error).partition("\n")[0] or type(error).__name__) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole: whatever ends this process, the path holds the old content or the new one.

    What is being written is beside it, with ``.part`` behind its name; an error leaves none of it.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content)
        sync(part)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def lock(descriptor: int) -> None:
    """Lock an open file or folder until it is closed; where there are no such locks, as under Windows, do nothing.

    Raises:
        BlockingIOError: If it is open and locked elsewhere.
    """
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within the block no other process is in one of the same path, where an empty file is, and is gone behind it.

    Raises:
        BlockingIOError: If another process is.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
