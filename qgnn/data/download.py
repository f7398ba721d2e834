"""Run a data set class so that a missing network or a broken file ends in one clear line, and never in a hang."""

import contextlib
import pickle
import re
import shutil
import socket
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

# Seconds that a server has to accept a connection before the network counts as absent, and to send the next bytes.
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0


class DatasetError(RuntimeError):
    """A data set is neither on disk nor to be downloaded, or its files cannot be read. The message is one line."""


def one_line(error: BaseException) -> str:
    """The type and first line of an error, cut to a readable length."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()  # torch colors some of its messages
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def read_guarded(name: str, cls: type, arguments: dict[str, Any], raw_dir: Path, root: Path) -> Any:
    """Build ``cls(**arguments)``, a PyG data set, with its errors turned into a :class:`DatasetError`.

    Args:
        name: The name to show in messages.
        cls: The class; its ``download`` is called only where the raw files are missing.
        arguments: What to build it with.
        raw_dir: The folder that the class reads its raw files from.
        root: The folder that the user named; empty folders below it are removed again.
    """

    class Guarded(cls):
        def download(self) -> None:
            with guarded_download(name, download_url_of(cls, arguments), raw_dir):
                super().download()

        def _process(self) -> None:
            check_notes(Path(self.processed_dir))
            super()._process()

    Guarded.__name__ = cls.__name__
    existed = raw_dir.is_dir()
    try:
        with plain_files(name, raw_dir.parent / "processed"):
            return Guarded(**arguments)
    except DatasetError:
        if not existed:
            remove_empty(raw_dir, root)
        raise
    except ImportError as error:
        raise DatasetError(
            f"the data set {name!r} needs the package {error.name!r} to be read: pip install {error.name}"
        ) from error
    except Exception as error:
        raise DatasetError(
            f"the files of the data set {name!r} in {raw_dir.parent} cannot be read or processed "
            f"({one_line(error)}); the folder must be writable, and 'raw' in it hold the original files"
        ) from error


@contextlib.contextmanager
def plain_files(name: str, processed: Path) -> Iterator[None]:
    """Around the reading of a data set: a processed file of more than tensors and plain values is an error.

    PyG would warn, and unpickle it, which runs whatever code the file names.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Weights only load failed")
            yield
    except (UserWarning, pickle.UnpicklingError) as error:
        for path in sorted(processed.glob("*.pt")):
            try:
                torch.load(path, weights_only=True)
            except pickle.UnpicklingError:
                raise DatasetError(
                    f"the file {path} of the data set {name!r} is damaged, or would run code when it is read; delete "
                    f"the folder {processed}, which is made anew of the raw files"
                ) from error
        raise


def check_notes(processed: Path) -> None:
    """Raise unless PyG's notes of transforms, which it unpickles without a look, are plain values."""
    for path in (processed / "pre_transform.pt", processed / "pre_filter.pt"):
        if path.exists():
            torch.load(path, weights_only=True)


def download_url_of(cls: type, arguments: dict[str, Any]) -> str:
    """An address on the server that a PyG class downloads from."""
    for attribute in ("url", "github_url"):
        url = getattr(cls, attribute, None)
        if isinstance(url, str) and url.startswith("http"):
            return url
    return "https://drive.usercontent.google.com"  # the classes that name no address keep their files there


@contextlib.contextmanager
def guarded_download(name: str, url: str, folder: Path) -> Iterator[None]:
    """Around a download into ``folder``: bounded waits, partial files removed, errors in one line."""
    before = set(folder.iterdir()) if folder.is_dir() else set()
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(READ_TIMEOUT_S)
    try:
        check_reachable(url)
        yield
    except BaseException as error:
        # What is half there would be taken for complete the next time.
        if folder.is_dir():
            for path in set(folder.iterdir()) - before:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise DatasetError(
            f"the data set {name!r} is not in {folder} and could not be downloaded ({one_line(error)}); "
            "put its raw files there, or name the folder that holds them as root"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


def check_reachable(url: str) -> None:
    """Raise OSError unless the server of ``url`` accepts a connection in time.

    Libraries wait for minutes, or without end, on a network that swallows packets; a name server may do the same,
    and Python has no time limit for it, so a thread asks it that the process does not wait for. Behind a proxy only
    the proxy can tell, and nothing is checked.
    """
    parts = urlsplit(url)
    if not parts.hostname or parts.scheme in urllib.request.getproxies():
        return
    address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    outcome: list[OSError | None] = []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S + 1)
    error = outcome[0] if outcome else TimeoutError(f"no answer within {CONNECT_TIMEOUT_S:.0f} s")
    if error is not None:
        raise ConnectionError(f"no connection to {parts.hostname}: {error}") from error


def remove_empty(folder: Path, root: Path) -> None:
    """Remove ``folder`` and the parents that it leaves empty, below ``root``."""
    for path in [folder, *folder.parents]:
        if path == root or root not in path.parents:
            return
        try:
            path.rmdir()
        except OSError:
            return
