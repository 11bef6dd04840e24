"""The contents of packets: what each kind of store exports, and the stores that read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError
from sb3_extra_buffers.stores.base import Array, Indices, Store
from sb3_extra_buffers.stores.checks import column, entry, require, whole, within
from sb3_extra_buffers.stores.codec_records import codec_to_record, read_codecs
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.portable import NO_OWNER, EncodedFrames, PortableFrameStore
from sb3_extra_buffers.stores.portable_segments import PortableSegmentStore, fingerprint
from sb3_extra_buffers.stores.raw import RawStore
from sb3_extra_buffers.stores.registry import find_store
from sb3_extra_buffers.stores.restore import read_layout
from sb3_extra_buffers.stores.tables import TableStore

Bytes = npt.NDArray[np.uint8]

# prefixes of the names of arrays, for the stores inside a table
_INNER, _OUTSIDE = "inner.", "outside."


class SharedPart(NamedTuple):
    """A keyframe, dictionary or codec that many packets need, and its fingerprint."""

    mark: bytes
    data: Bytes


class Content(NamedTuple):
    """A description as JSON values, the arrays that it needs, and parts that other packets need too."""

    record: Mapping[str, Any]
    arrays: Mapping[str, Array]
    shared: Sequence[SharedPart]


# ---- out ----


def export_content(inner: Store, indices: Indices) -> Content | None:
    """Return the encoded observations of ``inner`` at ``indices``; None if they are to be sent as rows."""
    if isinstance(inner, PortableFrameStore):
        return _export_frames(inner, indices)
    if isinstance(inner, TableStore):
        return _export_table(inner, indices)
    return None


def _export_frames(inner: PortableFrameStore, indices: Indices, first_shared: int = 0, prefix: str = "") -> Content:
    frames, numbers = inner.export_frames(indices)
    if isinstance(inner, PortableSegmentStore):
        marks = [inner.keyframe_fingerprint(number) for number in numbers]
    else:
        marks = [fingerprint(part) for part in frames.shared]
    record = {
        "kind": "frames",
        "stack": inner.layout.stack,
        "axis": inner.layout.axis,
        "codec": codec_to_record(inner.codec),
        "shared": [first_shared, len(marks)],
    }
    n_ids = len(frames.lengths) * inner.per_segment + 1
    arrays: dict[str, Array] = {
        f"{prefix}ids": frames.frame_ids.astype("<u2" if n_ids < 1 << 16 else "<u4"),
        f"{prefix}lengths": frames.lengths,
        f"{prefix}owners": frames.owners.astype("<i2" if len(marks) < 1 << 15 else "<i4"),
        f"{prefix}data": frames.data,
    }
    return Content(record, arrays, [SharedPart(*part) for part in zip(marks, frames.shared, strict=True)])


def _export_table(inner: TableStore, indices: Indices) -> Content | None:
    """The indices into the table, as the nested stores encode them, and the table."""
    nested, outside = inner.inner, inner.outside
    if not isinstance(nested, PortableFrameStore) or not (outside is None or isinstance(outside, PortableFrameStore)):
        return None
    inner.recover()
    table_record, arrays = inner.table.to_parts()
    contents = _export_frames(nested, indices, 0, _INNER)
    shared = list(contents.shared)
    record: dict[str, Any] = {
        "kind": "table",
        "stack": inner.layout.stack,
        "axis": inner.layout.axis,
        "codec": codec_to_record(inner.codec),
        "inner": contents.record,
        "outside": None,
        "table": table_record,
    }
    arrays = {**arrays, **contents.arrays, "places": inner.places[indices.reshape(-1)]}
    if outside is not None:
        contents = _export_frames(outside, indices, len(shared), _OUTSIDE)
        record["outside"] = contents.record
        arrays |= contents.arrays
        shared += contents.shared
    return Content(record, arrays, shared)


# ---- in: nothing is trusted ----


def open_content(
    spec: ObsSpec, n_rows: int, content: Content, compiled: bool | None
) -> tuple[Store, EncodedFrames | None]:
    """Return a store that reads ``content``, and the encoded frames if these are all it contains.

    Raises if anything but the bytes of the segments is invalid: kernels check these bytes when they decode.
    """
    record, arrays = content.record, content.arrays
    kind = entry(record, "kind", kind=str)
    if kind == "rows":
        rows = column(arrays, "rows", np.uint8, (n_rows, spec.nbytes))
        return RawStore.from_arrays(rows, np.ones(n_rows, np.bool_), None), None
    if kind == "frames":
        return _open_frames(read_layout(spec, record), n_rows, content, compiled)
    require(kind == "table", f"contents of the kind {kind!r}; update sb3-extra-buffers")
    return _open_table(spec, n_rows, content, compiled), None


@lru_cache(maxsize=32)
def _template(layout: StackLayout, codec_record: str, compiled: bool | None) -> PortableFrameStore:
    """Return an empty store, whose `reader_of` creates readers."""
    codec = read_codecs([json.loads(codec_record)], layout.frame_spec)[0]
    store = find_store(codec, layout, of_frames=True)(layout, 0, 1, codec, None, None, compiled)
    if not isinstance(store, PortableFrameStore):
        raise CorruptPayloadError(f"frames of {codec.codec_id!r} cannot be sent")
    return store


def _open_frames(
    layout: StackLayout, n_rows: int, content: Content, compiled: bool | None, prefix: str = ""
) -> tuple[PortableFrameStore, EncodedFrames]:
    record, arrays = content.record, content.arrays
    template = _template(layout, json.dumps(entry(record, "codec", kind=list)), compiled)
    first, count = entry(record, "shared", kind=list)
    whole(count, "the number of keyframes", stop=len(content.shared) + 1)
    whole(first, "the first keyframe", stop=len(content.shared) - count + 1)
    shared = [part.data for part in content.shared[first : first + count]]
    ids = _integers(arrays, f"{prefix}ids", ("<u2", "<u4"), (n_rows, layout.stack))
    lengths = column(arrays, f"{prefix}lengths", np.int32, (None,))
    owners = _integers(arrays, f"{prefix}owners", ("<i2", "<i4"), (len(lengths),))
    data = column(arrays, f"{prefix}data", np.uint8, (None,))
    within(owners, NO_OWNER, count, "the keyframe of a segment")
    frames = EncodedFrames(ids, data, lengths, owners, shared)
    return template.reader_of(frames), frames


def _integers(arrays: Mapping[str, Array], name: str, dtypes: tuple[str, str], shape: tuple[int, ...]) -> Array:
    """Return an array of either dtype, as int32."""
    is_wide = name in arrays and arrays[name].dtype.itemsize > np.dtype(dtypes[0]).itemsize
    values = column(arrays, name, dtypes[is_wide], shape)
    if is_wide and values.dtype.kind == "u":
        within(values, 0, 1 << 31, f"a value of {name!r}")
    return values.astype(np.int32)


def _open_table(spec: ObsSpec, n_rows: int, content: Content, compiled: bool | None) -> TableStore:
    record, arrays = content.record, content.arrays
    layout = read_layout(spec, record)
    codec = read_codecs([entry(record, "codec", kind=list)], layout.frame_spec)[0]
    require(TableStore.accepts(codec, layout), f"a table of {codec.codec_id!r} does not fit {spec}")
    store = TableStore(layout, 0, 1, codec, None, None, compiled)
    store.table.restore(entry(record, "table", kind=dict), arrays)
    places = column(arrays, "places", np.uint8, (n_rows,))
    nested_layout = store.inner.layout
    require(nested_layout is not None, "a table without frames")
    assert nested_layout is not None
    nested = content._replace(record=entry(record, "inner", kind=dict))
    inner, _ = _open_frames(_same_layout(nested_layout, nested.record), n_rows, nested, compiled, _INNER)
    outside = None
    if record["outside"] is not None:
        nested = content._replace(record=entry(record, "outside", kind=dict))
        outside, _ = _open_frames(_same_layout(layout, nested.record), n_rows, nested, compiled, _OUTSIDE)
    store.hold(places.copy(), inner, outside)
    return store


def _same_layout(layout: StackLayout, record: Mapping[str, Any]) -> StackLayout:
    require(read_layout(layout.spec, record) == layout, "the store inside a table has another layout")
    return layout
