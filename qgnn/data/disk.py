"""What survives a power failure, and files that are read whole or not at all."""

import os
import zipfile
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


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
