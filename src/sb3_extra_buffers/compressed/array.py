"""`CompressedArray`: a NumPy-like array of observations that keeps them compressed."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.codecs.registry import codec_options
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.compressed.dtypes import element_dtype
from sb3_extra_buffers.errors import ArgumentError, DamagedFileError, FileFormatError
from sb3_extra_buffers.files.folders import SavedAsFolder
from sb3_extra_buffers.files.parts import Cut, LoadedParts, Parts, make_view
from sb3_extra_buffers.stores.choice import add_preference
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CompressedArray"]


class CompressedArray(StoreView, SavedAsFolder):
    """Behaves like an array of shape ``(*shape, *obs_shape)`` and stores it compressed, losslessly.

    An array-like, not a subclass of ``ndarray``: it is indexed and assigned to like an array, has the usual methods,
    such as `mean`, `min`, `astype` and `tolist`, and is accepted by NumPy's functions. Reading decodes into new
    arrays; ``np.asarray(array)`` and ``torch.as_tensor(array)`` decode everything.

    The first axis is time: consecutive observations are expected to be similar. Every index of the other leading axes
    is a stream of its own, such as an environment.

    Args:
        shape: Leading axes, such as ``(n_steps, n_envs)`` or ``n_steps``.
        obs_shape: Shape of one observation.
        dtype: Dtype of the observations; ``dtypes`` may name it instead.
        dtypes: What `find_buffer_dtypes` returned.
        compression_method: ``"auto"``, or a method such as ``"delta"``, ``"zstd-5"`` or ``"rle-jit"``.
        compression_kwargs: Options of that method, such as ``{"dictionary": 16384}`` for ``"zstd"``.
        decompression_kwargs: Options for decoding; no method has any.
        heap_bytes: Upper limit for the payloads; beyond it, writing raises `HeapFullError`.
        path: A file for the payloads, instead of memory; with ``storage="mmap"``, a folder.
        storage: ``"mmap"`` to keep the array in the folder ``path``, where everything written survives the process.
        prefer: ``"memory"`` or ``"speed"``: lets ``"auto"`` choose a smaller or a faster method than by default.

    Examples:
        >>> import numpy as np
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> frames = CompressedArray((1000, 4), (4, 84, 84), np.uint8)
        >>> frames[0] = np.zeros((4, 4, 84, 84), np.uint8)
        >>> frames[[0, 0], [1, 2]].shape
        (2, 4, 84, 84)
        >>> frames[:2].mean(), frames.max()
        (np.float64(0.0), np.uint8(0))
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
        prefer: Literal["memory", "speed"] | None = None,
    ) -> None:
        if storage not in ("memory", "mmap") or (storage == "mmap" and path is None):
            raise ArgumentError(f"storage must be 'memory', or 'mmap' with the path of a folder; got {storage!r}")
        lead = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        lead = tuple(check_count(length, "every axis of shape", 0) for length in lead)
        per_obs = (obs_shape,) if isinstance(obs_shape, (int, np.integer)) else tuple(obs_shape)
        spec = ObsSpec(per_obs, element_dtype(dtype, dtypes))
        options = add_preference(prefer, compression_kwargs, compression_method)
        store = ObservationStore(
            spec,
            n_streams=max(int(np.prod(lead[1:], dtype=np.int64)), 1),
            method=compression_method,
            options=codec_options(compression_method, options, decompression_kwargs),
            heap_bytes=None if heap_bytes is None else check_count(heap_bytes, "heap_bytes"),
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
        """Make the observations that ``index`` selects unwritten, and free their memory."""
        if self.mmap_folder is not None:
            self.mmap_folder.prepare_step()
        super().erase(index)

    def sibling(self) -> Self:
        """Return another array of the same shape that shares frames with this one."""
        return self.next_view()

    def next_view(self) -> Self:
        """Return another array of the same shape that shares frames with this one."""
        view = super().next_view()
        if self.mmap_folder is not None:
            view.mmap_folder = self.mmap_folder
            self.mmap_folder.checkpoint()  # records of the journal assume the number of views
        return view

    def __copy__(self) -> CompressedArray:
        # as of an ndarray
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        # a copy lives in memory
        return {name: value for name, value in vars(self).items() if name not in ("mmap_folder", "last_save")}


def to_parts(array: CompressedArray, tag: str) -> Parts:
    """Return what ``array`` consists of, for files."""
    description = {"lead_shape": list(array.lead_shape), "base": array.first_index}
    columns = {} if array.indices is None else {"cells": np.ascontiguousarray(array.indices)}
    return Parts(tag, description, columns, {"array": array.store})


def make_array(parts: LoadedParts) -> CompressedArray:
    """Make the array that `to_parts` was given."""
    lead_shape = parts.entry("lead_shape", kind=list)
    if len(lead_shape) > 32 or not all(type(n) is int and 0 <= n < 1 << 48 for n in lead_shape):
        raise FileFormatError(f"lead_shape must be a list of axis lengths, got {lead_shape!r}")
    if set(parts.stores) != {"array"}:
        raise FileFormatError(f"an array has the single store 'array', got {sorted(parts.stores)}")
    cls = parts.target if parts.target is not None and issubclass(parts.target, CompressedArray) else CompressedArray
    return make_view(cls, parts.stores["array"], tuple(lead_shape), parts.number("base"), parts.columns.get("cells"))


def cut(parts: LoadedParts, bad_rows: dict[str, Any], bad_indices: dict[str, Any]) -> Cut:
    """Return what is left without the damaged observations, which then read as unwritten."""
    if bad_rows:
        raise DamagedFileError("the table of indices of the array is damaged")
    is_lost, store = bad_indices["array"], parts.stores["array"]
    viewed = make_array(parts).locate_whole(...)
    n_lost = int(is_lost[viewed].sum())
    steps = np.split(np.arange(store.n_obs), range(store.n_streams, store.n_obs, store.n_streams))
    kept = {"array": [step[~is_lost[step]] for step in steps if not is_lost[step].all()]}
    return Cut(parts.description, parts.columns, kept, viewed.size - n_lost, n_lost)
