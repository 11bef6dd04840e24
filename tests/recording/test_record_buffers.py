"""Record buffers: ring order, exact contents, and errors for invalid records."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.errors import (
    ArgumentError,
    DamagedFileError,
    EmptyBufferError,
    FileFormatError,
    SpecMismatchError,
    UnknownCodecError,
    UnsupportedVersionError,
)
from sb3_extra_buffers.files import manifest
from sb3_extra_buffers.files.parts import LoadedParts
from sb3_extra_buffers.recording import (
    BaseRecordBuffer,
    DummyRecordBuffer,
    Episode,
    FramelessRecordBuffer,
    RecordBuffer,
)
from sb3_extra_buffers.recording.buffers import make_recording


def frame_of(number: int, shape: tuple[int, ...] = (4, 84, 84)) -> Any:
    frame = np.zeros(shape, np.uint8)
    frame.reshape(-1)[number % 97 :: 97] = number % 256
    return frame


def make_filled(n: int, size: int = 10, **options: Any) -> RecordBuffer:
    buffer = RecordBuffer(size=size, **options)
    for number in range(n):
        buffer.add(frame_of(number), number / 2, number % 6, {"x": float(number)}, done=number % 4 == 3)
    return buffer


def test_documented_snippet() -> None:
    frame, reward, action = frame_of(7), 1.5, 3
    record_buffer = RecordBuffer(res=(84, 84), ch_num=4, size=40_000)
    record_buffer.add(frame, reward, action)

    assert len(record_buffer) == 1
    record = record_buffer[0]
    np.testing.assert_array_equal(record.frame, frame)
    assert (record.reward, record.action, record.features, record.done) == (1.5, 3, {}, False)


@pytest.mark.parametrize("method", ["auto", "none", "rle", "delta"])
@pytest.mark.parametrize("n", [0, 1, 9, 10, 11, 37, 40])
def test_buffer_holds_the_newest_records_oldest_first(n: int, method: str) -> None:
    buffer = make_filled(n, compression_method=method)
    expected = list(range(max(n - 10, 0), n))

    assert len(buffer) == len(expected)
    assert buffer.full == (n >= 10)
    assert buffer.rewards.tolist() == [number / 2 for number in expected]
    for index, number in enumerate(expected):
        for record in (buffer[index], buffer[index - len(expected)]):
            np.testing.assert_array_equal(record.frame, frame_of(number))
            assert (record.reward, record.action) == (number / 2, number % 6)
            assert record.features == {"x": number}
            assert record.done == (number % 4 == 3)
    np.testing.assert_array_equal(
        np.asarray(buffer.frames), np.array([frame_of(number) for number in expected]).reshape(-1, 4, 84, 84)
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(-5, 5), st.booleans()), max_size=40), st.data())
def test_buffer_behaves_like_a_list_of_the_last_records(
    size: int, added: list[tuple[int, bool]], data: st.DataObject
) -> None:
    buffer = FramelessRecordBuffer(size=size)
    for value, done in added:
        buffer.add(None, value, value, {"twice": 2 * value}, done)
    model = added[-size:]

    assert [(record.reward, record.done) for record in buffer] == model
    if not model:
        return
    index = data.draw(st.slices(len(model)))
    assert buffer[index].action.tolist() == [value for value, _ in model[index]]
    several = data.draw(st.lists(st.integers(-len(model), len(model) - 1), max_size=9))
    assert buffer[several].features["twice"].tolist() == [2 * model[index][0] for index in several]
    # episodes cover all records and end where done is set
    episodes = buffer.episodes
    assert [index for episode in episodes for index in range(episode.start, episode.stop)] == list(range(len(model)))
    assert all(model[episode.stop - 1][1] for episode in episodes[:-1])
    assert not any(model[index][1] for episode in episodes for index in range(episode.start, episode.stop - 1))
    assert sum(episode.reward for episode in episodes) == sum(value for value, _ in model)


def test_index_of_several_records() -> None:
    buffer = make_filled(23)
    part = buffer[2:5]

    assert part.frame.shape == (3, 4, 84, 84)
    np.testing.assert_array_equal(part.frame[1], frame_of(16))
    assert part.action.tolist() == [15 % 6, 16 % 6, 17 % 6]
    np.testing.assert_array_equal(buffer[buffer.dones].reward, [15 / 2, 19 / 2])
    assert buffer[::-1].reward.tolist() == [number / 2 for number in range(22, 12, -1)]


@pytest.mark.parametrize("index", [10, -11, [0, 10], 1.5, "x", np.ones(3, bool)])
def test_index_out_of_range_raises(index: Any) -> None:
    with pytest.raises(IndexError):
        make_filled(23)[index]


def test_records_that_were_read_do_not_change_later() -> None:
    buffer = RecordBuffer(res=(8, 8), ch_num=1, size=2)
    for number in range(2):
        buffer.add(np.full((8, 8), number, np.uint8), number, np.array([number, number]))
    first, rest = buffer[0], buffer[:2]
    for _ in range(2):
        buffer.add(np.full((8, 8), 9, np.uint8), 9, np.array([9, 9]))

    assert (first.frame == 0).all()
    assert first.action.tolist() == [0, 0]
    assert rest.action.tolist() == [[0, 0], [1, 1]]


def test_episodes_report_whether_they_are_whole() -> None:
    buffer = make_filled(15)  # episodes end after 3, 7 and 11; record 5 is the oldest
    assert buffer.episodes == [
        Episode(0, 3, (5 + 6 + 7) / 2, whole=False),
        Episode(3, 7, (8 + 9 + 10 + 11) / 2, whole=True),
        Episode(7, 10, (12 + 13 + 14) / 2, whole=False),
    ]
    assert [len(episode) for episode in buffer.episodes] == [3, 4, 3]
    assert buffer[buffer.episodes[1].indices].reward.tolist() == [4, 4.5, 5, 5.5]
    buffer.end_episode()
    assert buffer.episodes[-1].whole
    assert make_filled(14).episodes[0] == Episode(0, 4, (4 + 5 + 6 + 7) / 2, whole=True)


def test_reset_removes_all_records() -> None:
    buffer = make_filled(15)
    buffer.reset()
    assert (len(buffer), buffer.episodes) == (0, [])
    buffer.add(frame_of(1), 0, 0, {"x": 1.0})
    np.testing.assert_array_equal(buffer[0].frame, frame_of(1))


# ---- frames ----


@pytest.mark.parametrize("shape", [(3, 24, 32), (24, 32, 3)])
def test_frames_are_returned_as_added(shape: tuple[int, ...]) -> None:
    buffer = RecordBuffer(res=(24, 32), ch_num=3, size=40)
    for number in range(50):
        buffer.add(frame_of(number, shape), 0, 0)

    assert buffer.frame_shape == shape
    np.testing.assert_array_equal(buffer[-1].frame, frame_of(49, shape))
    with pytest.raises(SpecMismatchError, match="frame has shape"):
        buffer.add(frame_of(1, shape[::-1]), 0, 0)
    with pytest.raises(SpecMismatchError, match="frame has shape"):
        buffer.add(frame_of(1, (3, 24, 32) if shape[-1] == 3 else (24, 32, 3)), 0, 0)


def test_single_channel_frames_may_omit_the_channel_axis() -> None:
    buffer = RecordBuffer(res=(20, 30), ch_num=1, size=4)
    buffer.add(frame_of(3, (20, 30)), 0, 0)
    assert buffer[0].frame.shape == (20, 30)


def test_stacked_frames_are_compressed() -> None:
    buffer = RecordBuffer(size=600)
    random = np.random.default_rng(0)
    screen = random.integers(0, 255, (84, 84), np.uint8)
    stack = np.zeros((4, 84, 84), np.uint8)
    for number in range(600):
        screen[number % 84, :8] = number % 256
        stack = np.concatenate([stack[1:], screen[None]])
        buffer.add(stack, 0, 0)
    usage = buffer.memory_usage()

    assert usage.dense_observations == 600 * 4 * 84 * 84
    assert usage.total < 0.03 * usage.dense
    assert usage.other >= 600 * 8
    np.testing.assert_array_equal(buffer[-1].frame, stack)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((4, 84, 83), np.uint8), r"\(4, 84, 83\), expected \(4, 84, 84\)"),
        (np.zeros((84, 84), np.uint8), r"shape \(84, 84\)"),
        (np.zeros((1, 4, 84, 84), np.uint8), "shape"),
        (np.zeros((4, 84, 84), np.float32), "float32, expected uint8.*dtype='float32'"),
        (np.zeros((4, 84, 84), np.int64), "int64, expected uint8"),
        (None, "shape"),
    ],
)
@pytest.mark.parametrize("n", [0, 3, 12])
def test_invalid_frames_raise_and_change_nothing(frame: Any, message: str, n: int) -> None:
    buffer = make_filled(n)
    before = buffer.rewards.tolist()
    with pytest.raises(SpecMismatchError, match=message):
        buffer.add(frame, 0, 0, {"x": 0.0})

    assert buffer.rewards.tolist() == before
    buffer.add(frame_of(5), 99, 0, {"x": 0.0})
    assert buffer[-1].reward == 99


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 1.5}, {"res": (0, 84)}, {"ch_num": 0}, {"res": (84,)}])
def test_invalid_sizes_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        RecordBuffer(**options)


def test_unknown_method_raises_in_the_constructor() -> None:
    with pytest.raises(UnknownCodecError, match="made-up"):
        RecordBuffer(compression_method="made-up")


# ---- actions and features ----

SPACES = [
    spaces.Discrete(5),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(5),
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "fire": spaces.Discrete(2)}),
    spaces.Tuple((spaces.Discrete(3), spaces.Dict({"a": spaces.MultiBinary(2)}))),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("declared", [True, False])
def test_any_action_space(space: Any, declared: bool, tmp_path: Path) -> None:
    space.seed(3)
    actions = [space.sample() for _ in range(9)]
    buffer = FramelessRecordBuffer(size=6, action_space=space if declared else None)
    for action in actions:
        buffer.add(None, 0.0, action)
    buffer.save(tmp_path / "actions.npz")

    for each in (buffer, FramelessRecordBuffer.load(tmp_path / "actions.npz")):
        for record, action in zip(each, actions[-6:], strict=True):
            assert space.contains(record.action)
            assert repr(record.action) == repr(action)


def test_action_outside_the_space_raises_and_changes_nothing() -> None:
    buffer = RecordBuffer(size=5, action_space=spaces.Discrete(3))
    with pytest.raises(SpecMismatchError, match="action 3 is not in"):
        buffer.add(frame_of(0), 0, 3)
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (1.5, r"1\.5.*int64 cannot hold"),
        ([1, 2], "shape"),
        ({"a": 1}, "parts"),
        ("left", "numbers"),
        (None, "numbers"),
        (2**63, "9223372036854775808.*int64 cannot hold"),
    ],
)
def test_actions_of_another_type_raise(action: Any, message: str) -> None:
    buffer = FramelessRecordBuffer(size=5)
    buffer.add(None, 0, 1)
    with pytest.raises(SpecMismatchError, match=message):
        buffer.add(None, 0, action)
    assert len(buffer) == 1


def test_features_are_declared_or_set_by_the_first_record() -> None:
    declared = RecordBuffer(size=3, features={"health": "float32", "position": ("float32", (3,))})
    declared.add(frame_of(0), 0, 0, {"health": 50, "position": [1, 2, 3.5]})
    inferred = RecordBuffer(size=3)
    inferred.add(frame_of(0), 0, 0, {"kills": 2, "alive": True})
    bare = RecordBuffer(size=3)
    bare.add(frame_of(0), 0, 0, np.array([1.0, 2.0]))

    assert declared[0].features["position"].tolist() == [1, 2, 3.5]
    assert declared.features["health"].dtype == np.float32
    assert inferred.features["kills"].dtype == np.int64
    assert inferred.features["alive"].dtype == bool
    assert bare[0].features["features"].tolist() == [1, 2]


@pytest.mark.parametrize("features", [{"x": [1.0]}, {"x": "high"}, {"x": 1.0, "y": "high"}])
def test_invalid_features_raise(features: Any) -> None:
    buffer = make_filled(3)
    with pytest.raises(SpecMismatchError):
        buffer.add(frame_of(0), 0, 0, features)
    assert len(buffer) == 3
    assert buffer.features["x"].tolist() == [0, 1, 2]


def test_features_that_were_not_declared_raise() -> None:
    buffer = FramelessRecordBuffer(5, features={"x": "float32"})
    with pytest.raises(SpecMismatchError, match=r"\['y'\].*created for \['x'\]"):
        buffer.add(None, 0, 0, {"y": 1.0})
    buffer.add(None, 0, 0)
    buffer.add(None, 0, 0, {"x": 2})
    assert buffer.features["x"].tolist() == [None, 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.sets(st.sampled_from("xyz")), max_size=16), st.booleans())
def test_every_record_has_the_features_it_was_given(size: int, given_names: list[set[str]], declared: bool) -> None:
    values: dict[str, Any] = {"x": 1.5, "y": np.array([1, 2]), "z": {"a": 3, "b": (True, 4.0)}}
    buffer = FramelessRecordBuffer(size, features={"x": "f8", "y": ("i8", (2,))} if declared else None)
    added = []
    for number, names in enumerate(given_names):
        record = {name: values[name] for name in sorted(names - {"z"} if declared else names)}
        buffer.add(None, number, 0, record)
        added.append(record)
    added = added[-size:]
    for copied in (buffer, pickle.loads(pickle.dumps(buffer)), make_recording(loaded(buffer))):
        for index, record in enumerate(added):
            found = copied[index].features
            assert found.keys() == record.keys()
            for name in record:
                np.testing.assert_equal(found[name], values[name])
        columns = copied.features
        for name in columns.keys() & {"x", "y"}:
            column, present = columns[name], [name in record for record in added]
            assert isinstance(column, np.ma.MaskedArray) == (not all(present))
            missing = np.ma.getmaskarray(column).reshape(len(added), np.size(values[name])).any(axis=1)
            assert (~missing).tolist() == present
            assert (np.ma.compressed(column) == np.tile(values[name], sum(present))).all()


def loaded(buffer: BaseRecordBuffer) -> LoadedParts:
    parts = buffer.to_parts()
    return LoadedParts(parts.kind, json.loads(json.dumps(parts.description)), dict(parts.columns), parts.stores)


def test_a_frameless_buffer_takes_its_size_alone() -> None:
    assert FramelessRecordBuffer(100).size == FramelessRecordBuffer(np.int64(100)).size == 100
    assert FramelessRecordBuffer((84, 84), 4, 100).size == 100
    with pytest.raises(ArgumentError, match="size"):
        FramelessRecordBuffer(0)
    with pytest.raises(ArgumentError, match=r"size must be an integer of at least 1, got 1\.5"):
        FramelessRecordBuffer(1.5)  # type: ignore[arg-type]


def test_an_empty_recording_is_true() -> None:
    assert FramelessRecordBuffer(100)
    assert RecordBuffer()


@pytest.mark.parametrize("reward", [[1.0, 2.0], "much", None, 1j])
def test_reward_must_be_one_number(reward: Any) -> None:
    buffer = make_filled(3)
    with pytest.raises(SpecMismatchError, match="one number"):
        buffer.add(frame_of(0), reward, 0, {"x": 0.0})
    assert len(buffer) == 3


# ---- buffers without frames, and the dummy ----


@pytest.mark.parametrize("kind", [RecordBuffer, FramelessRecordBuffer, DummyRecordBuffer])
def test_buffers_are_interchangeable(kind: type[BaseRecordBuffer], tmp_path: Path) -> None:
    arguments: Any = {"res": (84, 84), "ch_num": 4, "size": 10, "compression_method": "rle"}
    buffer = kind(**arguments)
    for number in range(12):
        buffer.add(frame_of(number), 1.0, 0, {"x": 1}, done=number == 5)
    buffer.end_episode()
    buffer.save(tmp_path / "some.npz")

    assert isinstance(buffer, BaseRecordBuffer)
    assert len(buffer) == (0 if kind is DummyRecordBuffer else 10)
    assert len(buffer.episodes) == (0 if kind is DummyRecordBuffer else 2)
    assert (buffer.frames is not None) == (kind is RecordBuffer)
    assert (tmp_path / "some.npz").exists() == (kind is not DummyRecordBuffer)


def test_dummy_records_and_writes_nothing(tmp_path: Path) -> None:
    buffer = DummyRecordBuffer()
    buffer.add("anything", object(), None)
    buffer.export(tmp_path / "x.gif")

    assert list(buffer) == []
    assert buffer.rewards.tolist() == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(IndexError):
        buffer[0]
    with pytest.raises(EmptyBufferError):
        DummyRecordBuffer.load(tmp_path / "x.npz")


# ---- files and copies ----


@pytest.mark.parametrize("n", [0, 4, 10, 27])
@pytest.mark.parametrize("method", ["auto", "delta", "none"])
def test_loaded_buffer_continues_like_the_saved_one(n: int, method: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.npz"
    buffer = make_filled(n, compression_method=method)
    buffer.save(path)
    again = RecordBuffer.load(path)
    for each in (buffer, again):
        each.add(frame_of(200), 5.0, 1, {"x": 3.0}, done=True)

    assert again.compression_method == method
    assert again.episodes == buffer.episodes
    assert again.features["x"].tolist() == buffer.features["x"].tolist()
    np.testing.assert_array_equal(np.asarray(again.frames), np.asarray(buffer.frames))
    assert again.actions.tolist() == buffer.actions.tolist()
    assert [path.name] == [file.name for file in path.parent.iterdir()]


def test_load_with_another_method_recompresses(tmp_path: Path) -> None:
    make_filled(8).save(tmp_path / "run.npz")
    again = BaseRecordBuffer.load(tmp_path / "run.npz", compression_method="rle")
    assert isinstance(again, RecordBuffer)
    np.testing.assert_array_equal(again[3].frame, frame_of(3))
    assert "rle" in again.memory_usage().codecs[""]


def test_damaged_files_raise(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    make_filled(8).save(path)
    whole = path.read_bytes()
    with pytest.raises(FileFormatError, match="FramelessRecordBuffer"):
        FramelessRecordBuffer.load(path)
    for damaged in (whole[: len(whole) // 2], whole[:300] + b"\x55" * 40 + whole[340:], b"", b"no archive"):
        path.write_bytes(damaged)
        with pytest.raises((DamagedFileError, FileFormatError), match=r"run\.npz"):
            RecordBuffer.load(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        RecordBuffer.load(tmp_path / "nothing.npz")


def test_files_of_newer_versions_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", manifest.VERSION + 1)
    make_filled(3).save(tmp_path / "run.npz")
    monkeypatch.undo()
    with pytest.raises(UnsupportedVersionError, match="update"):
        RecordBuffer.load(tmp_path / "run.npz")


def test_pickles_and_copies_are_equal_and_independent() -> None:
    buffer = make_filled(23)
    for again in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        np.testing.assert_array_equal(np.asarray(again.frames), np.asarray(buffer.frames))
        again.add(frame_of(1), 0, 0, {"x": 0.0})
        assert buffer[-1].reward == 11
