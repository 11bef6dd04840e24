"""Decompressing a batch with zstd's C function in a compiled loop: directly into the rows, without the GIL.

The function comes from the shared library in the zstandard package. Where that does not export it, or without numba,
rows are decompressed one by one through zstandard's Python API.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from functools import cache
from typing import Any

import numpy as np
import zstandard

from sb3_extra_buffers.codecs.base import Bytes, Ints
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import CorruptPayloadError

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # result, then arguments
    "ZSTD_versionNumber": (ctypes.c_uint,),
    "ZSTD_createDCtx": (_POINTER,),
    "ZSTD_freeDCtx": (_SIZE, _POINTER),
    "ZSTD_createDDict": (_POINTER, ctypes.c_char_p, _SIZE),
    "ZSTD_freeDDict": (_SIZE, _POINTER),
    "ZSTD_decompress_usingDDict": (_SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER),
    "ZSTD_decompress_usingDict": (_SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE),
}


@cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("zstandard._cffi")
    if spec is None or spec.origin is None:
        return None
    try:
        # RTLD_DEEPBIND: use the bundled zstd even if the process has loaded another version globally
        library = ctypes.CDLL(spec.origin, mode=ctypes.DEFAULT_MODE | getattr(os, "RTLD_DEEPBIND", 0))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    major, minor, patch = zstandard.ZSTD_VERSION
    return library if library.ZSTD_versionNumber() == (major * 100 + minor) * 100 + patch else None


@cache
def is_direct() -> bool:
    """Whether `DirectDecoder` can be used here."""
    if importlib.util.find_spec("numba") is None or ctypes.sizeof(_POINTER) != 8 or _library() is None:
        return False
    compiles: bool = not importlib.import_module("numba").config.DISABLE_JIT
    return compiles


class DirectContext:
    """``addresses`` of zstd's function that decompresses with a raw dictionary, and of a context; for one thread."""

    def __init__(self) -> None:
        library: Any = _library()
        self._library = library
        self._context = library.ZSTD_createDCtx()
        if not self._context:
            raise MemoryError("zstd could not allocate a decompression context")
        function = ctypes.cast(library.ZSTD_decompress_usingDict, _POINTER).value
        self.addresses = np.array([function, self._context], np.int64)

    def __del__(self) -> None:
        library = self.__dict__.get("_library")
        if library is not None:
            library.ZSTD_freeDCtx(self.__dict__.get("_context"))


class DirectDecoder:
    """Decompresses rows, with the dictionary ``learnt`` unless that is empty. To be used by one thread."""

    def __init__(self, learnt: bytes) -> None:
        library: Any = _library()
        self._library = library
        self._dictionary = 0
        self._context = library.ZSTD_createDCtx()
        if learnt:
            self._dictionary = library.ZSTD_createDDict(learnt, len(learnt))
        if not self._context:
            raise MemoryError("zstd could not allocate a decompression context")
        if learnt and not self._dictionary:
            raise CorruptPayloadError(f"zstd: the dictionary of {len(learnt)} bytes is damaged")
        address = ctypes.cast(library.ZSTD_decompress_usingDDict, _POINTER).value
        self._addresses = np.array([address, self._context, self._dictionary], np.int64)
        self._frame = np.empty(0, np.uint8)
        self._decompress = importlib.import_module("sb3_extra_buffers.codecs.zstd_loop").decompress_rows

    def decode(self, header: bytes, heap: Bytes, starts: Ints, lengths: Ints, out: ByteRows) -> int:
        """Decompress ``header`` plus a payload into each row of ``out``; return the first that fails, or -1."""
        longest = len(header) + int(lengths.max(initial=0))
        if self._frame.size < longest:
            self._frame = np.empty(2 * longest, np.uint8)
        self._frame[: len(header)] = np.frombuffer(header, np.uint8)
        frame_at, out_at = self._frame.ctypes.data, out.ctypes.data
        return int(
            self._decompress(
                self._addresses, heap.ctypes.data, starts, lengths, frame_at, len(header), out_at, out.shape[1]
            )
        )

    def __del__(self) -> None:
        library = self.__dict__.get("_library")
        if library is not None:
            library.ZSTD_freeDCtx(self.__dict__.get("_context"))
            library.ZSTD_freeDDict(self.__dict__.get("_dictionary"))
