"""How a buffer keeps its observations, as its constructor was told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.stores.choice import choose_unseen


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The arguments that the compressed buffers have beyond those of SB3's.

    Attributes:
        dtypes: What `find_buffer_dtypes` returned, or one such mapping for each key. Checked against the space;
            observations come back in the space's own dtype in any case.
        normalize_images: Whether image observations come out of the buffer as float32 between 0 and 1. SB3's policies
            do that themselves unless they were made with ``normalize_images=False``.
        compression_method: ``"auto"``, a method such as ``"delta"`` or ``"zstd-5"``, or one for each key.
        compression_kwargs: Options of that method.
        decompression_kwargs: Options for reading; no method has any.
        output_dtype: ``"raw"`` for the space's dtype, ``"float"`` for float32.
        max_bytes: The most bytes that the buffer may hold; ``None`` for no such limit.
        on_max_bytes: ``"evict"`` to drop the oldest transitions beyond it, ``"raise"`` to refuse new ones.
        storage: ``"mmap"`` to live in a file, so that every completed step is there whatever ends the process.
        path: The folder for that, new or empty.
    """

    dtypes: Mapping[str, Any] | None = None
    normalize_images: bool = False
    compression_method: str | Mapping[str, str] = "auto"
    compression_kwargs: Mapping[str, Any] | None = None
    decompression_kwargs: Mapping[str, Any] | None = None
    output_dtype: Literal["raw", "float"] = "raw"
    max_bytes: int | None = None
    on_max_bytes: Literal["evict", "raise"] = "evict"
    storage: Literal["memory", "mmap"] = "memory"
    path: str | os.PathLike[str] | None = None
    # max_bytes, where going beyond it does either; looked at in every step
    evict_above: int | None = field(init=False, repr=False, default=None)
    raise_above: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.output_dtype not in ("raw", "float"):
            raise ValueError(f"output_dtype must be 'raw' or 'float', got {self.output_dtype!r}")
        if self.on_max_bytes not in ("evict", "raise"):
            raise ValueError(f"on_max_bytes must be 'evict' or 'raise', got {self.on_max_bytes!r}")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, got {self.max_bytes}")
        if self.storage not in ("memory", "mmap") or (self.storage == "mmap") != (self.path is not None):
            raise ValueError(
                f"storage is 'memory', or 'mmap' with the path of a folder; got {self.storage!r} and path={self.path!r}"
            )
        if self.path is not None:
            object.__setattr__(self, "path", os.fspath(self.path))
        object.__setattr__(self, f"{self.on_max_bytes}_above", self.max_bytes)

    def method_for(self, key: str | None, spec: ObsSpec) -> str:
        """The method for one leaf; a single one for a whole Dict is meant for its images."""
        if isinstance(self.compression_method, str):
            small = key is not None and choose_unseen(spec) is not None
            return "none" if small else self.compression_method
        return self.compression_method.get(key or "", "auto")

    def check_dtypes(self, key: str | None, space: spaces.Space[Any], spec: ObsSpec) -> None:
        """Raise if ``dtypes`` names an element type that cannot hold every value of the space."""
        named = self.dtypes
        if named is not None and key is not None and "elem_type" not in named:
            named = named.get(key)
        elif named is not None and key is not None and len(spec.shape) < 2:
            # a single mapping for a whole Dict is meant for its images
            named = None
        chosen = None if named is None else named.get("elem_type")
        if chosen is None or _holds(np.dtype(chosen), space, spec.dtype):
            return
        where = f" of key {key!r}" if key is not None else ""
        raise SpecMismatchError(
            f"dtypes['elem_type'] is {np.dtype(chosen)}, which cannot hold every value of the observation "
            f"space{where}, {space}; leave dtypes out, or pass {spec.dtype}"
        )


#: names of the arguments, for those who take them apart from a buffer's own
OPTION_NAMES = frozenset(option.name for option in fields(StorageOptions) if option.init)


def _holds(dtype: np.dtype[Any], space: spaces.Space[Any], space_dtype: np.dtype[Any]) -> bool:
    if np.can_cast(space_dtype, dtype, "safe"):
        return True
    if isinstance(space, spaces.Box) and dtype.kind in "iu" and space_dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool((space.low >= limits.min).all() and (space.high <= limits.max).all())
    if isinstance(space, spaces.Discrete) and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool(limits.min <= space.start and space.start + space.n - 1 <= limits.max)
    return False
