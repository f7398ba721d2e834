"""The compiled library: loading it, and calling its functions with tensors."""

import contextlib
import ctypes
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from qgnn.kernels.cpu import build
from torch import Tensor

PARTS = 16  # of rows, for threads to share and to add up in order, whatever the number of threads
FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in half.h
_STREAM_STEP = 0x5BF0363585EBCA6B

_HUGE_PAGE, _HUGE_BYTES, _MADV_HUGEPAGE = 1 << 21, 1 << 23, 14
_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_failure: str | None = None
_not_kept: str | None = None
_functions: dict[str, "ctypes._NamedFuncPointer"] = {}
_is_forked = False


def _after_fork_in_child() -> None:
    """OpenMP's threads do not survive a fork, and waiting for them would never end: a child works alone."""
    global _lock, _is_forked
    _lock = threading.Lock()
    _is_forked = True


def work_alone() -> None:
    """As after a fork: the process was forked, and torch's threads lost, before this module was imported."""
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _share_openmp() -> None:
    """Let the library use the OpenMP runtime that torch has loaded: two pools of threads would fight for the cores."""
    for path in build.loaded_libraries("libgomp", "libiomp", "libomp"):
        with contextlib.suppress(OSError):  # the file may have been replaced since it was loaded
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _load() -> ctypes.CDLL:
    global _library, _failure, _not_kept
    warning = None
    with _lock:
        if _library is None and _failure is None:
            _share_openmp()
            try:
                _library, _not_kept = build.load()
                if _not_kept is not None:
                    warning = (
                        f"each process compiles qgnn's CPU kernels anew, as they cannot be kept: {_not_kept}; "
                        f"repair this, or set QGNN_CACHE_DIR to a folder that you alone can write to"
                    )
            except build.BuildError as error:
                _failure = str(error)
                warning = f"on the CPU qgnn runs in plain PyTorch, which is slower than its C kernels: {_failure}"
    if warning is not None:  # without the lock: who shows the warning may call a kernel
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    if _library is None:
        raise build.BuildError(_failure)
    return _library


def unavailable() -> str | None:
    """Why the native kernels cannot be used here, or ``None``. The first call compiles them."""
    if _library is None:
        try:
            _load()
        except build.BuildError as error:
            return str(error)
    return None


def path() -> Path:
    """Where the loaded library is."""
    return Path(_load()._name)


def not_kept() -> str | None:
    """Why each process compiles the library anew, or ``None`` if it lies in the user's cache folder."""
    _load()
    return _not_kept


def num_threads() -> int:
    """Threads of a call: torch's setting, and one in a forked process."""
    return 1 if _is_forked else torch.get_num_threads()


def _type_of(value: Tensor | float | None) -> Any:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(value, float) else ctypes.c_int64


def launch(name: str, *args: Tensor | float | None) -> None:
    """Call an exported function: tensors become pointers, ``None`` a null pointer, integers int64, floats float; the
    number of threads is appended. What an argument was in the first call it is in all others."""
    function = _functions.get(name)
    if function is None:
        function = getattr(_load(), name)
        function.restype, function.argtypes = None, [*map(_type_of, args), ctypes.c_int64]
        _functions[name] = function
    function(*[value.data_ptr() if isinstance(value, Tensor) else value for value in args], num_threads())


def empty_codes(num_rows: int, width: int) -> Tensor:
    """int8 [N, F] on huge pages where the system gives them on request.

    Rows of codes are gathered at random, and each gather from small pages would also miss in the table of pages. Other
    results are written and read in order: for them huge pages save little, and new ones can cost more (on a virtual
    machine that gives free memory back to its host, for one).
    """
    x = torch.empty((num_rows, width), dtype=torch.int8)
    if x.nbytes >= _HUGE_BYTES and _madvise is not None:
        first = -(-x.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        last = (x.data_ptr() + x.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)  # advice: may be declined
    return x


def empty_floats(*shape: int) -> Tensor:
    """fp32 of any shape, which is what the kernels read and write, whatever torch's default type is."""
    return torch.empty(shape, dtype=torch.float32)


def stream_key(stream: int) -> int:
    """What is XORed into a seed to get its independent stream number ``stream``, as a signed 64-bit integer."""
    key = (stream * _STREAM_STEP) & ((1 << 64) - 1)
    return key - (1 << 64) if key >> 63 else key


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [N, F] in ``dtype`` with unit column stride and rows apart by ``x.stride(0)``; a copy only if need be."""
    x = x.detach().to(dtype)
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()
