"""What a recording is made of, for files: from a buffer to parts and back."""

from __future__ import annotations

import errno
import os
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.files.loading import load_file
from sb3_extra_buffers.files.parts import LoadedParts, Parts, make_view
from sb3_extra_buffers.files.values import value_from_json, value_to_json
from sb3_extra_buffers.recording.buffers import BaseRecordBuffer, FramelessRecordBuffer, RecordBuffer
from sb3_extra_buffers.recording.columns import MOST_DEPTH, Column
from sb3_extra_buffers.stores.checks import check_flags, entry, require, whole
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
_Buffer = TypeVar("_Buffer", bound=BaseRecordBuffer)
# frames that are decoded at once when they are encoded anew
_BLOCK = 256
_FIXED = ("rewards", "dones", "starts")


def to_parts(buffer: BaseRecordBuffer, tag: str) -> Parts:
    """What ``buffer`` is made of: its records where they lie, and where the oldest is."""
    n = len(buffer)
    columns = {name: getattr(buffer, f"_{name}")[:n] for name in _FIXED}
    described: dict[str, Any] = {
        "size": buffer.size,
        "n_records": n,
        "oldest": buffer._n_added % buffer.size if buffer.full else 0,
        "ended": buffer._ended,
        "features": None if buffer._features is None else list(buffer._features),
        "shapes": {},
        "frames": None,
    }
    for name, column in _columns(buffer).items():
        # before the first record nothing is known of a column
        described["shapes"][name] = {"of": column.shape} if column.arrays else None
        columns |= {f"{name}/{place}": array[:n] for place, array in enumerate(column.arrays.values())}
    if isinstance(buffer, RecordBuffer):
        described["frames"] = {
            "res": list(buffer.res),
            "ch_num": buffer.ch_num,
            "compression_method": buffer.compression_method,
            "compression_kwargs": value_to_json(buffer.compression_kwargs, "compression_kwargs"),
        }
        return Parts(tag, described, columns, {"frames": buffer._frames.store})
    if not isinstance(buffer, FramelessRecordBuffer):
        raise NotSaveableError(f"a {type(buffer).__name__} is neither a RecordBuffer nor a FramelessRecordBuffer")
    return Parts(tag, described, columns, {})


def _columns(buffer: BaseRecordBuffer) -> dict[str, Column]:
    features = {f"feature {name}": column for name, column in (buffer._features or {}).items()}
    return {"action": buffer._actions} | features


def load(cls: type[_Buffer], path: str | os.PathLike[str], compression_method: str | None = None) -> _Buffer:
    """The buffer that was saved as the file ``path``, which must be a ``cls``."""
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    loaded: _Buffer = load_file(path, cls)
    if compression_method is not None and isinstance(loaded, RecordBuffer):
        _encode_anew(loaded, compression_method)
    return loaded


def _encode_anew(buffer: RecordBuffer, compression_method: str) -> None:
    frames, n = buffer._frames, len(buffer)
    buffer.compression_method, buffer.compression_kwargs = compression_method, {}
    made = buffer._make_frames(frames.obs_shape)
    # in the order in which they were added: each is much like the one before
    order = buffer._order()
    for start in range(0, n, _BLOCK):
        places = order[start : start + _BLOCK]
        for place, frame in zip(places.tolist(), frames[places], strict=True):
            made[place] = frame
    buffer._frames = made


def make(parts: LoadedParts) -> BaseRecordBuffer:
    """The buffer that `to_parts` saw; everything is checked before it is put there."""
    about = parts.entry("frames")
    made: type[BaseRecordBuffer] = FramelessRecordBuffer if about is None else RecordBuffer
    if parts.target is not None and not issubclass(made, parts.target):
        raise FileFormatError(
            f"this is the recording of a {made.__name__}, which is no {parts.target.__name__}; "
            "BaseRecordBuffer.load reads any"
        )
    require(set(parts.stores) == (set() if about is None else {"frames"}), "a recording has a store of its frames")
    size = parts.number("size", low=1)
    n = parts.number("n_records", stop=size + 1)
    oldest = parts.number("oldest", stop=size if n == size else 1)
    buffer = FramelessRecordBuffer(size=size) if about is None else _with_frames(parts, size)
    for name in _FIXED:
        column = getattr(buffer, f"_{name}")
        column[:n] = parts.column(name, column.dtype, (n,))
    buffer._n_added, buffer._ended = n + oldest, parts.entry("ended", kind=bool)
    _check_episodes(buffer, n)
    names = parts.entry("features")
    if names is not None:
        fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
        require(fits and len(set(names)) == len(names), f"the features {names!r} are no names, or not different")
        buffer._features = {name: Column(f"feature {name!r}", size) for name in names}
    columns, shapes = _columns(buffer), parts.entry("shapes", kind=dict)
    require(shapes.keys() == columns.keys(), f"columns {sorted(shapes)} where {sorted(columns)} are due")
    known = {*_FIXED}
    for name, column in columns.items():
        known |= _put_column(parts, name, column, shapes[name], n)
    require(known == parts.columns.keys(), f"columns that nothing is known of: {sorted(parts.columns.keys() - known)}")
    return buffer


def _with_frames(parts: LoadedParts, size: int) -> RecordBuffer:
    store, about = parts.stores["frames"], parts.entry("frames", kind=dict)
    res = entry(about, "res", kind=list)
    require(len(res) == 2, f"{res!r} is no height and width")
    height, width = (whole(side, "height or width", 1, 1 << 31) for side in res)
    depth = whole(entry(about, "ch_num"), "ch_num", 1, 1 << 31)
    shapes = [(depth, height, width), (height, width, depth)] + [(height, width)] * (depth == 1)
    fits = store.n_obs == size and store.n_streams == 1 and store.spec.shape in shapes
    require(fits, f"a store of {store.n_obs} frames of {store.spec} is not one of {size} of {shapes[0]}")
    method = entry(about, "compression_method", kind=str)
    require(method == store.method, f"frames are stored with {store.method!r}, not with {method!r}")
    options = value_from_json(entry(about, "compression_kwargs", kind=dict))
    buffer = RecordBuffer(
        (height, width), depth, size, dtype=store.spec.dtype, compression_method=method, compression_kwargs=options
    )
    buffer._frames = make_view(StoreView, store, (size,))
    return buffer


def _check_episodes(buffer: BaseRecordBuffer, n: int) -> None:
    """A record begins an episode if the one before it ended one."""
    order = buffer._order()
    dones, starts = buffer._dones[order], buffer._starts[order]
    follows = bool((starts[1:] == dones[:-1]).all()) and buffer._ended == (bool(dones[-1]) if n else True)
    require(follows and (not n or buffer.full or bool(starts[0])), "episodes begin where none ended")


def _put_column(parts: LoadedParts, name: str, column: Column, about: Any, n: int) -> set[str]:
    """Fill ``column``; return the names of its arrays."""
    if about is None:
        require(not n or name != "action", "records have no actions")
        return set()
    require(isinstance(about, dict) and about.keys() == {"of"}, f"the shape of {name} is unreadable")
    found = {f"{name}/{place}": path for place, path in enumerate(_paths(about["of"], ()))}
    arrays: dict[tuple[str, ...], Array] = {}
    for each, path in found.items():
        rows = parts.columns.get(each)
        if rows is None or rows.dtype.kind not in "biuf" or rows.ndim < 1 or len(rows) != n:
            raise FileFormatError(f"{name} has no {n} numbers for {'/'.join(path) or 'its value'}")
        check_flags(name, rows)
        arrays[path] = np.zeros((column.size, *rows.shape[1:]), rows.dtype)
        arrays[path][:n] = rows
    column.arrays, column.shape = arrays, about["of"]
    return set(found)


def _paths(shape: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if len(path) > MOST_DEPTH:
        raise FileFormatError("a column has parts within parts without end")
    if shape is None:
        return [path]
    if isinstance(shape, dict):
        parts = list(shape.items())
    elif isinstance(shape, list):
        parts = [(str(place), part) for place, part in enumerate(shape)]
    else:
        raise FileFormatError(f"{shape!r} is no shape of a column")
    return [leaf for key, part in parts for leaf in _paths(part, (*path, key))]
