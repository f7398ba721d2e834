"""What survives a power failure."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole: whatever ends this process, the path holds the old content or the new one.

    What is being written is beside it, with ``.part`` behind its name.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    sync(part)
    part.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
