"""`CompressedArray`: a NumPy-like array of observations that keeps them compressed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.registry import codec_options
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.compressed.dtypes import element_dtype
from sb3_extra_buffers.errors import DamagedFileError, FileFormatError
from sb3_extra_buffers.files.folders import SavedAsFolder
from sb3_extra_buffers.files.parts import Cut, LoadedParts, Parts, make_view
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CompressedArray"]


class CompressedArray(StoreView, SavedAsFolder):
    """Behaves like an array of shape ``(*shape, *obs_shape)`` and holds it compressed, lossless.

    The first axis is time: observations that follow each other along it are expected to be alike. Every index of the
    remaining leading axes is a stream of its own, such as an environment.

    Args:
        shape: Leading axes, such as ``(n_steps, n_envs)`` or ``n_steps``.
        obs_shape: Shape of one observation.
        dtype: Its dtype; ``dtypes`` may name it instead.
        dtypes: What `find_buffer_dtypes` returned.
        compression_method: ``"auto"``, or a method such as ``"delta"``, ``"zstd-5"`` or ``"rle-jit"``.
        compression_kwargs: Options of that method, such as ``{"dictionary": 16384}`` for ``"zstd"``.
        decompression_kwargs: Options for reading; no method has any.
        heap_bytes: The most bytes that payloads may take; beyond it, writing raises `HeapFullError`.
        path: A file to keep the payloads in, instead of memory; with ``storage="mmap"``, a folder.
        storage: ``"mmap"`` to live in the folder ``path``: what was written is there whatever ends the process.

    Example:
        >>> frames = CompressedArray((1000, 4), (4, 84, 84), np.uint8)
        >>> frames[0] = np.zeros((4, 4, 84, 84), np.uint8)
        >>> frames[[0, 0], [1, 2]].shape
        (2, 4, 84, 84)
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        obs_shape: int | Sequence[int] = (),
        dtype: npt.DTypeLike | None = None,
        dtypes: Mapping[str, Any] | None = None,
        compression_method: str = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        heap_bytes: int | None = None,
        path: str | os.PathLike[str] | None = None,
        storage: Literal["memory", "mmap"] = "memory",
    ) -> None:
        if storage not in ("memory", "mmap") or (storage == "mmap" and path is None):
            raise ValueError(f"storage is 'memory', or 'mmap' with the path of a folder; got {storage!r}")
        lead = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        per_obs = (obs_shape,) if isinstance(obs_shape, (int, np.integer)) else tuple(obs_shape)
        spec = ObsSpec(per_obs, element_dtype(dtype, dtypes))
        store = ObservationStore(
            spec,
            n_streams=max(int(np.prod(lead[1:], dtype=np.int64)), 1),
            method=compression_method,
            options=codec_options(compression_method, compression_kwargs, decompression_kwargs),
            heap_bytes=heap_bytes,
            path=path if storage == "memory" else None,
        )
        super().__init__(store, lead)
        if storage == "mmap" and path is not None:
            from sb3_extra_buffers.files.mmap_buffer import check_new, keep_in_file

            keep_in_file(self, check_new(path))

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.mmap_folder is not None:
            self.mmap_folder.prepare_step()
        super().__setitem__(index, value)

    def erase(self, index: Any) -> None:
        """Make the observations that ``index`` selects unwritten, and give back what they took."""
        if self.mmap_folder is not None:
            self.mmap_folder.prepare_step()
        super().erase(index)

    def sibling(self) -> Self:
        """Another array of the same shape whose frames are shared with this one's."""
        return self.next_view()

    def next_view(self) -> Self:
        """Another array of the same shape whose frames are shared with this one's."""
        made = super().next_view()
        if self.mmap_folder is not None:
            made.mmap_folder = self.mmap_folder
            self.mmap_folder.checkpoint()  # the journal is about an array that had none
        return made

    def __getstate__(self) -> dict[str, Any]:
        # a copy lives in memory
        return {name: value for name, value in vars(self).items() if name not in ("mmap_folder", "last_save")}


def to_parts(array: CompressedArray, tag: str) -> Parts:
    """What an array is made of: its store, and the cells of it that it shows."""
    described = {"lead_shape": list(array.lead_shape), "base": array.first_index}
    columns = {} if array.indices is None else {"cells": np.ascontiguousarray(array.indices)}
    return Parts(tag, described, columns, {"array": array.store})


def make_array(parts: LoadedParts) -> CompressedArray:
    """The array that `to_parts` saw."""
    lead = parts.entry("lead_shape", kind=list)
    if len(lead) > 32 or not all(type(n) is int and 0 <= n < 1 << 48 for n in lead):
        raise FileFormatError(f"{lead!r} is no shape")
    if set(parts.stores) != {"array"}:
        raise FileFormatError("an array has one store")
    cls = parts.target if parts.target is not None and issubclass(parts.target, CompressedArray) else CompressedArray
    indices = parts.columns.get("cells")
    return make_view(cls, parts.stores["array"], tuple(lead), parts.number("base"), indices)


def cut(parts: LoadedParts, bad_rows: dict[str, Any], bad_indices: dict[str, Any]) -> Cut:
    """What is left without the observations that are lost: those read as unwritten."""
    if bad_rows:
        raise DamagedFileError("the cells that the array shows are damaged")
    lost, store = bad_indices["array"], parts.stores["array"]
    shown = make_array(parts)._table()
    n_lost = int(lost[shown].sum())
    n_streams = store.n_streams
    rows = [np.arange(at, min(at + n_streams, store.n_obs)) for at in range(0, store.n_obs, n_streams)]
    kept = {"array": [row[~lost[row]] for row in rows if not lost[row].all()]}
    return Cut(parts.description, parts.columns, kept, shown.size - n_lost, n_lost)
