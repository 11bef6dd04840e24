"""Robustness of recordings: interrupts, invalid arguments, copies during writes, damaged and forged files."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.errors import (
    ArgumentError,
    CodecOptionError,
    ExportError,
    ExtraBuffersError,
    FileFormatError,
    IndexOutOfRangeError,
    NotSaveableError,
    SpecMismatchError,
    UnknownCodecError,
)
from sb3_extra_buffers.files import load_file, save_file
from sb3_extra_buffers.files.parts import LoadedParts, Parts
from sb3_extra_buffers.recording import BaseRecordBuffer, DummyRecordBuffer, FramelessRecordBuffer, RecordBuffer
from sb3_extra_buffers.recording.buffers import make_recording
from tests.contracts.store import needs_proc
from tests.torture.interrupts import Injector

GOLDEN = Path(__file__).parent / "golden"
SIZE = 10
KINDS = ["frameless", "delta", "none", "gzip1"]


def frame_of(at: int) -> Any:
    frame = np.tile(np.arange(12, dtype=np.uint8), (4, 12, 1))
    frame[:, at % 12, (5 * at) % 12] = 200
    return frame


def make_buffer(kind: str) -> BaseRecordBuffer:
    if kind == "frameless":
        return FramelessRecordBuffer(size=SIZE)
    return RecordBuffer((12, 12), 4, SIZE, compression_method=kind)


def add(buffer: BaseRecordBuffer, at: int, optional: bool = True) -> None:
    action = {"arm": np.array([at, 2.0]), "legs": (at % 3, np.float32(at))}
    features = {"health": at, "at": np.array([at, -at])} | ({"seen": at} if optional and at % 5 == 1 else {})
    buffer.add(frame_of(at), float(at), action, features, done=at % 4 == 3)


def contents(buffer: BaseRecordBuffer) -> dict[str, Any]:
    """Everything that can be read from a buffer."""
    frames = buffer.frames
    return {
        "frames": None if frames is None else np.asarray(frames).tolist(),
        "rewards": buffer.rewards.tolist(),
        "actions": pickle.dumps(buffer.actions),
        "features": pickle.dumps(buffer.features),
        "dones": buffer.dones.tolist(),
        "episodes": buffer.episodes,
        "ended": buffer._ended,
        "known": sorted(buffer._features),
    }


def make_filled(kind: str, count: int, optional: bool = True) -> BaseRecordBuffer:
    buffer = make_buffer(kind)
    for at in range(count):
        add(buffer, at, optional)
    return buffer


# ---- interrupts ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 5, SIZE - 1, SIZE, 24])
@pytest.mark.parametrize("call", [add, lambda buffer, at: buffer.end_episode(), lambda buffer, at: buffer.reset()])
def test_an_interrupted_call_has_all_of_its_effect_or_none(kind: str, count: int, call: Callable[..., None]) -> None:
    saved = pickle.dumps(make_filled(kind, count))
    before, done = contents(pickle.loads(saved)), pickle.loads(saved)
    with Injector() as counter:
        call(done, count)
    after = contents(done)
    add(done, count + 1)
    later = contents(done)
    for point in np.unique(np.linspace(1, counter.count, 70).astype(int)).tolist():
        buffer = pickle.loads(saved)
        injector = Injector(point, MemoryError("injected") if point % 3 == 0 else KeyboardInterrupt())
        with contextlib.suppress(KeyboardInterrupt, MemoryError), injector:
            call(buffer, count)
        if not injector.where:
            break
        state = contents(buffer)
        assert state in (before, after), injector.where
        if state != after:
            call(buffer, count)
            assert contents(buffer) == after
        add(buffer, count + 1)
        assert contents(buffer) == later, injector.where


# ---- arguments ----


def test_an_invalid_first_record_sets_no_dtypes_or_shapes() -> None:
    buffer = RecordBuffer((12, 12), 4, SIZE, compression_method="delta")
    bad: list[tuple[Any, ...]] = [
        (frame_of(0).transpose(1, 2, 0), "text", 1, {"x": 1.0}),
        (frame_of(0), 0.0, "text", {"x": 1.0}),
        (frame_of(0), 0.0, {"a": 1, "b": None}, {"x": 1.0}),
        (frame_of(0), 0.0, 1, {"x": 1.0, "y": "text"}),
        (frame_of(0)[:3], 0.0, 1, {"x": 1.0}),
        (frame_of(0).astype(np.float32), 0.0, 1, None),
        (None, 0.0, 1, None),
        ([[1], [1, 2]], 0.0, 1, None),
        (frame_of(0), 0.0, [[1], [1, 2]], None),
        (frame_of(0), [[1], [1, 2]], 1, None),
        (frame_of(0), 0.0, 1, {1: 1.0, "1": 2.0}),
        (frame_of(0), 0.0, {1: 1.0, "1": 2.0}, None),
        (frame_of(0), 0.0, 1, None, "yes"),
        (frame_of(0), 0.0, 1, None, [True, False]),
        (frame_of(0), 0.0, 1, None, None),
    ]
    for arguments in bad:
        with pytest.raises(SpecMismatchError):
            buffer.add(*arguments)
        assert len(buffer) == 0
        assert not buffer._features
        assert not buffer._actions.arrays
        assert buffer.frame_shape == (4, 12, 12)
    # a valid record of other types is still accepted
    buffer.add(frame_of(1).transpose(1, 2, 0), 1.0, (1, 2.0), {"z": [1, 2]})
    assert buffer.frame_shape == (12, 12, 4)
    assert buffer.actions[0].tolist() == [1]


def test_an_invalid_record_changes_nothing() -> None:
    buffer = make_filled("delta", SIZE + 3)
    before = contents(buffer)
    good = [frame_of(1), 1.0, {"arm": np.array([1, 2.0]), "legs": (1, np.float32(1))}, {"health": 1, "at": [1, 2]}]
    for position, bad in itertools.chain(
        ((0, value) for value in (None, "text", frame_of(0)[1:], frame_of(0).astype(int))),
        ((1, value) for value in (None, "text", [1.0, 2.0], 1j, {"a": 1})),
        ((2, value) for value in (None, "text", 1, {"arm": 1}, {"arm": np.zeros(2), "legs": (1, 2, 3)})),
        (
            (3, value)
            for value in ("text", {"health": "text"}, {"health": "text", "at": [1, 2]}, {"health": 1, "at": 1})
        ),
    ):
        arguments = list(good)
        arguments[position] = bad
        with pytest.raises(SpecMismatchError):
            buffer.add(*arguments)
        assert contents(buffer) == before
    add(buffer, 4)


def test_feature_names_are_converted_to_strings() -> None:
    buffer = FramelessRecordBuffer(size=4)
    for at in range(3):
        buffer.add(None, 0.0, 0, {1: at})
    assert buffer.features["1"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("options", [
    {"size": 0}, {"size": -1}, {"size": 2.5}, {"size": float("nan")}, {"size": "many"}, {"size": True},
    {"res": (0, 3)}, {"res": 84}, {"res": (3, 3, 3)}, {"res": ("a", 3)}, {"res": (float("nan"), 3)}, {"res": None},
    {"ch_num": 0}, {"ch_num": 1.5}, {"ch_num": None}, {"dtype": "nothing"}, {"dtype": object},
    {"features": {"x": "nothing"}}, {"features": {"x": object}}, {"features": {"x": "U4"}}, {"features": 3},
    {"features": {1: "f4"}},
])  # fmt: skip
def test_invalid_sizes_and_dtypes_raise(options: dict[str, Any]) -> None:
    with pytest.raises((ArgumentError, SpecMismatchError)):
        RecordBuffer(**options)


def test_invalid_methods_raise() -> None:
    with pytest.raises(UnknownCodecError):
        RecordBuffer(compression_method=None)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(CodecOptionError):
        RecordBuffer(compression_method="delta", compression_kwargs=3)  # type: ignore[arg-type]  # wrong on purpose
    assert issubclass(CodecOptionError, ExtraBuffersError)


def test_actions_outside_any_space_raise() -> None:
    for space in (spaces.Discrete(3), spaces.MultiDiscrete([2, 2]), spaces.Dict({"a": spaces.Discrete(2)})):
        buffer = FramelessRecordBuffer(size=4, action_space=space)
        for action in ("text", None, 9, np.array([1, 2, 3]), {"b": 1}, object()):
            with pytest.raises(SpecMismatchError, match="is not in"):
                buffer.add(None, 0.0, action)
        assert len(buffer) == 0


@pytest.mark.parametrize(
    "index", [SIZE, -SIZE - 1, "a", 1.5, None, [0, SIZE], [True, False], [[0], [0, 1]], slice("a")]
)
def test_invalid_indices_raise(index: Any) -> None:
    buffer = make_filled("delta", SIZE + 2)
    with pytest.raises(IndexOutOfRangeError):
        buffer[index]


@pytest.mark.parametrize("options", [
    {"fps": 0}, {"fps": "a"}, {"fps": float("nan")}, {"scale": 0}, {"scale": 1.5}, {"scale": "a"}, {"channels": 9},
    {"channels": [0, 1]}, {"channels": "abc"}, {"which": "a"}, {"which": 99}, {"which": 1.5},
])  # fmt: skip
def test_invalid_export_arguments_raise_and_write_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    buffer = make_filled("delta", 5)
    with pytest.raises((ExportError, IndexOutOfRangeError)):
        buffer.export(tmp_path / "run.gif", **options)
    assert not list(tmp_path.iterdir())


# ---- copies ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("take", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_copies_during_writes_are_consistent(kind: str, take: Callable[[Any], Any]) -> None:
    buffer = make_filled(kind, SIZE)
    stop = threading.Event()

    def write() -> None:
        for at in itertools.count(SIZE):
            if stop.is_set():
                return
            add(buffer, at)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            copied = take(buffer)
            first = int(copied.rewards[0])
            expected = make_buffer(kind)
            for at in range(first, first + SIZE):
                add(expected, at)
            assert copied.rewards.tolist() == expected.rewards.tolist()
            assert pickle.dumps(copied.features) == pickle.dumps(expected.features)
            assert copied.dones.tolist() == expected.dones.tolist()
            if kind != "frameless":
                np.testing.assert_array_equal(np.asarray(copied.frames), np.asarray(expected.frames))
            add(copied, 3)
    finally:
        stop.set()
        writer.join()


# ---- files ----


@pytest.mark.parametrize("kind", ["frameless", "delta", "none", "auto"])
@pytest.mark.parametrize("count", [0, 3, SIZE, 23])
def test_loaded_recordings_are_complete_and_continue(kind: str, count: int, tmp_path: Path) -> None:
    buffer = make_filled(kind, count)
    save_file(buffer, tmp_path / "run")
    again = load_file(tmp_path / "run")
    assert type(again) is type(buffer)
    for each in (buffer, again):
        for at in (30, 31):
            add(each, at)
    assert contents(again) == contents(buffer)


def test_dummy_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(NotSaveableError, match="nothing"):
        save_file(DummyRecordBuffer(), tmp_path / "run")
    assert not list(tmp_path.iterdir())


#: values to replace entries of a description with
FORGED = [None, True, -1, 0, 1, 7, 1 << 40, 1 << 62, 0.5, "text", "", [], [1], ["a", "a"], {}, {"a": None}, {"of": 3}]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [path] * bool(path) + [leaf for key, part in parts for leaf in paths_of(part, (*path, key))]


def with_entry(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    copied = copy.deepcopy(value)
    inside = copied
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = to
    return copied


def can_be_loaded(parts: Parts, description: Any, columns: dict[str, Any]) -> bool:
    """Return whether these parts can be loaded; if so, check that the recording can be read and written to."""
    loaded = LoadedParts(parts.kind, description, columns, copy.deepcopy(parts.stores))
    try:
        buffer = make_recording(loaded)
    except ExtraBuffersError:
        return False
    except MemoryError:
        return False
    n = len(buffer)
    assert buffer.rewards.shape == (n,)
    assert buffer.dones.shape == (n,)
    for record in (buffer[:], *buffer):
        assert record.features.keys() <= buffer._features.keys()
    assert sum(len(episode) for episode in buffer.episodes) == n
    buffer.memory_usage()
    if isinstance(buffer, RecordBuffer):
        assert np.asarray(buffer.frames).shape == (n, *buffer.frame_shape)
    with contextlib.suppress(SpecMismatchError):
        add(buffer, 5)
    return True


@pytest.mark.parametrize("kind", ["frameless", "delta", "none"])
@pytest.mark.parametrize("count", [3, 13])
def test_forged_parts_raise_or_load_consistently(kind: str, count: int) -> None:
    parts = make_filled(kind, count).to_parts()
    columns = {name: np.array(column) for name, column in parts.columns.items()}
    assert can_be_loaded(parts, parts.description, columns)
    refused = 0
    for path in paths_of(parts.description):
        for to in FORGED:
            if path == ("size",) and to == 1 << 40:
                continue  # this much memory may be available
            refused += not can_be_loaded(parts, with_entry(parts.description, path, to), columns)
    for name, column in columns.items():
        others = [
            column[:-1], column[None], column[..., None], column.astype(np.complex64), column.astype("U8"),
            column.astype(np.float16), np.zeros(0, column.dtype), np.zeros((), column.dtype),
        ]  # fmt: skip
        if column.dtype == bool:
            others += [~column, np.full(column.shape, 2, np.uint8).view(bool)]
        for other in others:
            refused += not can_be_loaded(parts, parts.description, columns | {name: other})
        rest = {key: value for key, value in columns.items() if key != name}
        assert not can_be_loaded(parts, parts.description, rest)
        assert not can_be_loaded(parts, parts.description, columns | {f"{name}/9": column})
    assert refused > 250


def test_inconsistent_descriptions_raise() -> None:
    parts = make_filled("delta", 13).to_parts()
    columns = dict(parts.columns)
    cases: list[tuple[tuple[Any, ...], Any, str]] = [
        (("size",), 11, "oldest"),
        (("n_records",), 11, "n_records"),
        (("n_records",), 9, "oldest"),
        (("oldest",), 10, "oldest"),
        (("oldest",), 4, "episodes"),
        (("ended",), True, "episodes"),
        (("frames", "ch_num"), 3, "store of 10 frames"),
        (("frames", "res"), [12, 13], "store of 10 frames"),
        (("frames", "compression_method"), "rle", "not with 'rle'"),
        (("frames",), None, "got stores"),
        (("features",), ["health"], "columns"),
        (("features",), ["health", "health"], "distinct names"),
        (("shapes", "action", "of"), None, "unknown columns"),
        (("shapes", "action"), None, "have no actions"),
    ]
    for path, to, message in cases:
        with pytest.raises(FileFormatError, match=message):
            make_recording(LoadedParts(parts.kind, with_entry(parts.description, path, to), columns, parts.stores))


@needs_proc
def test_a_size_in_a_file_takes_no_memory() -> None:
    """A recording says how many records it has space for, and features that some records lack."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    parts = make_filled("frameless", 7).to_parts()
    description = parts.description | {"size": 1 << 29}
    before = resident()
    with contextlib.suppress(MemoryError):  # some systems refuse even memory that is never written
        buffer = make_recording(LoadedParts(parts.kind, description, parts.columns, parts.stores))
        assert resident() - before < 100_000_000
        assert buffer.features["seen"].mask.any()


@pytest.mark.parametrize("kind", ["frameless", "delta"])
def test_flipped_bits_are_detected(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    buffer = make_filled(kind, 13)
    buffer.save(path)
    intact, expected = path.read_bytes(), contents(buffer)
    random = np.random.default_rng(0)
    for at in random.integers(0, len(intact) * 8, 150).tolist():
        data = bytearray(intact)
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(bytes(data))
        with contextlib.suppress(ExtraBuffersError):
            # some bytes are padding
            assert contents(BaseRecordBuffer.load(path)) == expected


@pytest.mark.parametrize("kind", ["frameless", "delta"])
def test_golden_recordings_are_readable(kind: str) -> None:
    """The files were written by ``python -m tests.recording.test_trust``."""
    buffer = BaseRecordBuffer.load(GOLDEN / f"{kind}.recording")
    assert contents(buffer) == contents(make_filled(kind, 13, optional=False))
    add(buffer, 13)


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for kind in ("frameless", "delta"):
        make_filled(kind, 13, optional=False).save(GOLDEN / f"{kind}.recording")
