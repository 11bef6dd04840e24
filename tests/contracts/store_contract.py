"""The contract of every store: subclass `StoreContract` to test another one."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sb3_extra_buffers.codecs import ByteRows, ObsSpec, get_codec
from sb3_extra_buffers.errors import HeapFullError
from sb3_extra_buffers.stores.base import FrozenStore
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import make_store
from tests.contracts.store import UNWRITTEN, Walk, check_rows, examples, needs, write_rows
from tests.torture.interrupts import interrupt_at

Axis = Literal["first", "last"]
UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True)
class Case:
    """A configuration of a store, and the observations for it."""

    method: str = "delta"
    frame: tuple[int, ...] = (16, 16)
    stack: int = 1
    axis: Axis = "first"
    n_streams: int = 3
    frames: int | None = None  # to a segment
    dtype: str = "u1"
    channels: int = 0  # of a pixel, along the last axis

    @property
    def spec(self) -> ObsSpec:
        if self.channels:
            return ObsSpec((*self.frame, self.stack * self.channels), UINT8)
        if self.stack == 1:
            return ObsSpec(self.frame, np.dtype(self.dtype))
        shape = (self.stack, *self.frame) if self.axis == "first" else (*self.frame, self.stack)
        return ObsSpec(shape, np.dtype(self.dtype))

    @property
    def layout(self) -> StackLayout:
        return StackLayout(self.spec, self.stack, self.axis)

    def build(self, n_obs: int, compiled: bool, **options: Any) -> Any:
        codec_options = {} if self.frames is None else {"frames": self.frames}
        codec = get_codec(self.method, **codec_options).bind(self.layout.frame_spec)
        return make_store(self.layout, n_obs, self.n_streams, codec, compiled=compiled, **options)

    def stacks(self, n_rows: int, seed: int = 0) -> ByteRows:
        """Rows of consecutive observations of one stream."""
        return self.rows(planes_of(self, n_rows, seed))

    def rows(self, planes: Any) -> ByteRows:
        """``[row, stack, *frame]`` of bytes as rows of stacked observations."""
        if self.channels:
            # a colour for each value, without the zeros that are not black
            pixels = np.stack([planes * np.uint8(2 * channel + 1) for channel in range(self.channels)], axis=-1)
            return np.ascontiguousarray(np.moveaxis(pixels, 1, -2)).reshape(len(planes), -1)
        if self.dtype != "u1":
            planes = (planes / np.float64(255) if "f" in self.dtype else planes).astype(self.dtype)
        if self.stack == 1:
            planes = planes[:, 0]
        elif self.axis == "last":
            planes = np.moveaxis(planes, 1, -1)
        return np.ascontiguousarray(planes).reshape(len(planes), -1).view(np.uint8)

    def __str__(self) -> str:
        size = "x".join(map(str, self.frame))
        kind = f"-{self.channels}channels" if self.channels else "" if self.dtype == "u1" else f"-{self.dtype}"
        return f"{self.method}-{size}-{self.stack}{self.axis}{kind}"


_PACKAGES = {"zstd": "zstd", "delta2": "zstd", "delta3": "zstd", "scroll": "scroll", "scroll2": "zstd"}
CASES = [
    pytest.param(case, id=str(case), marks=needs(_PACKAGES[case.method]) if case.method in _PACKAGES else ())
    for case in (
        Case(),
        Case(frame=(5, 7), stack=4),
        Case(frame=(5, 7), stack=4, axis="last", frames=3),
        Case("delta2", (16, 16)),
        Case("delta2", (5, 7), stack=4, axis="last", frames=5),
        Case("delta3", (16, 16), stack=4, frames=6),
        Case("zstd", (16, 16), stack=4),
        Case("gzip", (5, 7), stack=4, axis="last"),
        Case("gzip", (5, 7)),
        Case("none", (5, 7), stack=4),
        Case("palette", (5, 7), channels=3),
        Case("palette", (5, 7), stack=2, axis="last", channels=3),
        Case("palette:none", (5, 7), channels=3),
        Case("table", (16, 16), dtype="<f4"),
        Case("table", (5, 7), stack=4, dtype="<f8"),
        Case("table", (5, 7), stack=4, axis="last", dtype="<i2"),
        Case("none", (5, 7), stack=3, axis="last"),
        Case("none", (5, 7)),
        Case("scroll", (16, 16)),
        Case("scroll", (5, 7, 3), stack=3, axis="last", frames=5),
        Case("scroll2", (5, 7), stack=4, frames=3),
        Case("camera", (16, 16, 3), frames=6),
        Case("camera", (5, 7), stack=3, axis="last", frames=5),
    )
]


def planes_of(case: Case, n_rows: int, seed: int = 0) -> Any:
    """Consecutive stacks of one stream, ``[row, stack, *frame]``."""
    frames = Walk(case.frame, seed).frames(n_rows + case.stack - 1)
    return np.stack([frames[row : row + case.stack] for row in range(n_rows)])


class StoreMachine(RuleBasedStateMachine):
    """A store beside a dict of rows. Streams continue from write to write."""

    case: Case
    make: Callable[[int], Any]
    n_obs = 24

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).make(self.n_obs)
        self.n_allocated = self.n_obs
        self.model: dict[int, bytes] = {}
        self.walks = [Walk(self.case.frame, seed) for seed in range(self.case.n_streams)]
        self.planes = [[walk.frame] * self.case.stack for walk in self.walks]
        self.next = 0

    def observe(self, stream: int, reset: bool, hold: bool) -> Any:
        """The next observation of a stream; ``hold`` repeats the last one, as obs does after next_obs."""
        if reset:
            self.planes[stream] = [np.zeros_like(self.walks[stream].frame)] * self.case.stack
        if not hold:
            self.planes[stream] = [*self.planes[stream][1:], self.walks[stream].step()]
        return np.stack(self.planes[stream])

    def write(self, indices: list[int], streams: list[int], planes: list[Any]) -> None:
        rows = self.case.rows(np.stack(planes))
        write_rows(self.store, indices, streams, rows)
        self.model.update(zip(indices, [row.tobytes() for row in rows], strict=True))

    @rule(
        count=st.integers(1, 30),
        reset=st.booleans(),
        hold=st.integers(0, 3),
        stream=st.integers(0, 2),
        one=st.booleans(),
    )
    def write_in_turn(self, count: int, reset: bool, hold: int, stream: int, one: bool) -> None:
        stream %= self.case.n_streams
        indices, streams, planes = [], [], []
        for step in range(count):
            at = stream if one else step % self.case.n_streams
            indices.append(self.next)
            streams.append(at)
            planes.append(self.observe(at, reset and step == count // 2, hold > 0 and step % 4 < hold))
            self.next = (self.next + 1) % self.n_obs
        self.write(indices, streams, planes)

    @rule(
        indices=st.lists(st.integers(0, 23), min_size=1, max_size=12), stream=st.integers(0, 2), seed=st.integers(0, 99)
    )
    def write_anywhere(self, indices: list[int], stream: int, seed: int) -> None:
        """Any order, an index twice, observations of no stream."""
        stream %= self.case.n_streams
        planes = Walk(self.case.frame, seed).frames(len(indices) * self.case.stack)
        self.write(
            indices, [stream] * len(indices), list(planes.reshape(len(indices), self.case.stack, *self.case.frame))
        )

    @rule(count=st.integers(1, 4), apart=st.integers(0, 12), reset=st.booleans(), hold=st.booleans())
    def write_pairs(self, count: int, apart: int, reset: bool, hold: bool) -> None:
        """Observations and their successors in one call, as a replay buffer adds them."""
        for _ in range(count):
            streams = list(range(self.case.n_streams))
            last = self.n_obs - len(streams)
            index, next_index = min(self.next, last), min((self.next + apart) % self.n_obs, last)
            indices = [index + stream for stream in streams]
            next_indices = [next_index + stream for stream in streams]
            before = self.case.rows(np.stack([self.observe(stream, reset, True) for stream in streams]))
            after = self.case.rows(np.stack([self.observe(stream, False, hold) for stream in streams]))
            self.store.write_step(index, next_index, before, after)
            self.model.update(zip(indices, [row.tobytes() for row in before], strict=True))
            self.model.update(zip(next_indices, [row.tobytes() for row in after], strict=True))
            self.next = (self.next + len(streams)) % self.n_obs

    @rule(least=st.integers(0, 4))
    def clean_soon(self, least: int) -> None:
        self.store._next_clean = least

    @rule()
    def pickle(self) -> None:
        self.store = pickle.loads(pickle.dumps(self.store))

    @rule()
    def copy_deeply(self) -> None:
        old, self.store = self.store, copy.deepcopy(self.store)
        old.clear()

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        if self.n_allocated < 40:
            self.store.allocate(count)
            self.n_allocated += count

    @rule(really=st.integers(0, 5))
    def clear(self, really: int) -> None:
        if really == 0:
            self.store.clear()
            self.model.clear()

    @rule(indices=st.lists(st.integers(0, 23), min_size=1, max_size=9))
    def erase(self, indices: list[int]) -> None:
        self.store.erase(np.array(indices, np.int64))
        for index in indices:
            self.model.pop(index, None)

    @rule(indices=st.lists(st.integers(0, 23), min_size=1, max_size=9), seed=st.integers(0, 99))
    def undo(self, indices: list[int], seed: int) -> None:
        planes = Walk(self.case.frame, seed).frames(len(indices) * self.case.stack)
        rows = self.case.rows(planes.reshape(len(indices), self.case.stack, *self.case.frame))
        self.store.commit()
        write_rows(self.store, indices, [0] * len(indices), rows)
        assert self.store.undo_write()
        assert not self.store.undo_write()

    @rule(indices=st.lists(st.integers(0, 23), max_size=9))
    def read_some(self, indices: list[int]) -> None:
        check_rows(self.store, self.model, indices, self.case.spec.nbytes)

    @rule(starts=st.lists(st.integers(0, 23), min_size=1, max_size=4), length=st.integers(1, 12), newest=st.booleans())
    def read_windows(self, starts: list[int], length: int, newest: bool) -> None:
        steps = np.arange(length) * self.case.n_streams
        indices = (np.array(starts)[:, None] + steps) % self.n_obs
        empty = bytes(self.case.spec.nbytes)
        wanted = [self.model.get(index, empty) for index in indices.ravel().tolist()]
        rows = np.frombuffer(b"".join(wanted), np.uint8).reshape(*indices.shape, -1)
        if newest and self.store.layout is not None:
            rows = self.case.layout.newest(rows)
        np.testing.assert_array_equal(self.store.read_windows(indices, newest), rows)

    @rule(indices=st.lists(st.integers(0, 22), min_size=1, max_size=9))
    def read_together(self, indices: list[int]) -> None:
        rows = self.store.read(np.array([indices, [index + 1 for index in indices]]))
        empty = bytes(self.case.spec.nbytes)
        for position, index in enumerate(indices):
            assert rows[0, position].tobytes() == self.model.get(index, empty)
            assert rows[1, position].tobytes() == self.model.get(index + 1, empty)

    @invariant()
    def holds_the_model(self) -> None:
        self.store.check()
        check_rows(self.store, self.model, list(range(self.n_allocated)), self.case.spec.nbytes)


class StoreContract:
    """What every store promises. Subclasses parametrise ``case`` and ``compiled``, and may override `make`."""

    def make(self, case: Case, compiled: bool, n_obs: int = 24, **options: Any) -> Any:
        return case.build(n_obs, compiled, **options)

    def filled(self, case: Case, compiled: bool) -> tuple[Any, ByteRows]:
        store, rows = self.make(case, compiled), case.stacks(24)
        for index in range(24):
            write_rows(store, [index], [index % case.n_streams], rows[index : index + 1])
        return store, rows

    def test_it_holds_what_a_dict_holds(self, case: Case, compiled: bool) -> None:
        body = {"case": case, "make": staticmethod(lambda n_obs: self.make(case, compiled, n_obs))}
        run_state_machine_as_test(type("Machine", (StoreMachine,), body), settings=examples(12 if compiled else 5, 25))

    def test_windows_hold_what_single_reads_hold(self, case: Case, compiled: bool) -> None:
        store, rows = self.make(case, compiled, 48), case.stacks(48)
        n_streams, n_steps, frame_bytes = case.n_streams, 48 // case.n_streams, case.layout.frame_bytes
        # not all of them: some are unwritten
        n_written = max(n_steps - 2, 1)
        for step in range(n_written):
            indices = step * n_streams + np.arange(n_streams)
            store.write(indices, np.arange(n_streams), rows[step * n_streams : (step + 1) * n_streams])
        rows[n_written * n_streams :] = store.read(np.arange(n_written * n_streams, 48))
        windows = {
            "streams": np.arange(n_steps * n_streams).reshape(n_steps, n_streams).T,
            "across the seam": (np.arange(24)[None] + np.array([[36], [40]])) % 48,
            "backwards and the same twice": np.array([[9, 6, 3, 0, 0, 0, 3, 40], [0, 30, 1, 29, 2, 28, 3, 27]]),
            "one window": np.arange(48)[None],
            "single steps": np.arange(48)[:, None],
            "none": np.zeros((0, 5), np.int64),
            "no steps": np.zeros((5, 0), np.int64),
        }
        newest = case.layout.newest(rows)
        assert newest.shape == (48, frame_bytes)
        for name, indices in windows.items():
            found = store.read_windows(indices)
            np.testing.assert_array_equal(found, rows[indices], name)
            out = np.full((*indices.shape, case.spec.nbytes), UNWRITTEN, np.uint8)
            assert store.read_windows(indices, out=out) is out
            np.testing.assert_array_equal(out, rows[indices], name)
            # a store that keeps observations whole returns them whole
            frames = store.read_windows(indices, newest_only=True)
            expected = rows[indices] if store.layout is None else newest[indices]
            np.testing.assert_array_equal(frames, expected, name)
            out = np.full(frames.shape, UNWRITTEN, np.uint8)
            assert store.read_windows(indices, True, out) is out
            np.testing.assert_array_equal(out, expected, name)

    def test_unwritten_observations_are_zeros(self, case: Case, compiled: bool) -> None:
        store = self.make(case, compiled)
        assert not store.read(np.arange(24)).any()
        write_rows(store, [3], [0], case.stacks(1))
        assert not store.read(np.delete(np.arange(24), 3)).any()
        store.allocate(5)
        assert not store.read(np.arange(24, 29)).any()
        store.check()

    def test_an_empty_batch_is_written_and_read(self, case: Case, compiled: bool) -> None:
        store, none = self.make(case, compiled), np.zeros(0, np.int64)
        store.write(none, none, np.zeros((0, case.spec.nbytes), np.uint8))
        assert store.read(none).shape == (0, case.spec.nbytes)
        assert store.read(np.zeros((2, 0), np.int64)).shape == (2, 0, case.spec.nbytes)
        store.check()

    def test_a_step_and_its_successor_are_one_write(self, case: Case, compiled: bool) -> None:
        store, rows = self.filled(case, compiled)
        new = case.stacks(2 * case.n_streams, 1)
        store.commit()
        store.write_step(0, 12, new[: case.n_streams], new[case.n_streams :])
        np.testing.assert_array_equal(store.read(np.arange(case.n_streams)), new[: case.n_streams])
        np.testing.assert_array_equal(store.read(12 + np.arange(case.n_streams)), new[case.n_streams :])

        assert store.undo_write()

        np.testing.assert_array_equal(store.read(np.arange(24)), rows)
        store.check()

    def test_a_committed_write_stays(self, case: Case, compiled: bool) -> None:
        store, rows = self.filled(case, compiled)
        write_rows(store, [3], [0], case.stacks(1, 1))
        store.commit()
        assert not store.undo_write()
        rows[3] = case.stacks(1, 1)[0]
        np.testing.assert_array_equal(store.read(np.arange(24)), rows)

    def test_an_interrupted_write_is_undone_or_complete(self, case: Case, compiled: bool) -> None:
        new = case.stacks(6, 1)
        position, interrupted = 1, True
        while interrupted:
            store, rows = self.filled(case, compiled)
            action = functools.partial(write_rows, store, list(range(6)), [0] * 6, new)
            interrupted = bool(interrupt_at(position, action, "sb3_extra_buffers/stores").where)
            batch = store.read(np.arange(24))
            assert batch[:6].tobytes() in (rows[:6].tobytes(), new.tobytes()), f"opcode {position}"
            np.testing.assert_array_equal(batch[6:], rows[6:])
            store.check()
            write_rows(store, list(range(6)), [0] * 6, new)
            np.testing.assert_array_equal(store.read(np.arange(6)), new)
            position = position + max(position // 3, 1)

    def test_erasing_and_clearing_leave_zeros(self, case: Case, compiled: bool) -> None:
        store, rows = self.filled(case, compiled)
        store.erase(np.array([2, 5, 5]))
        rows[[2, 5]] = 0
        np.testing.assert_array_equal(store.read(np.arange(24)), rows)
        store.check()
        store.clear()
        assert not store.read(np.arange(24)).any()
        write_rows(store, [0], [0], rows[:1])
        np.testing.assert_array_equal(store.read(np.array([0]))[0], rows[0])
        store.check()

    def test_a_limit_is_an_error_and_what_is_stored_stays(self, case: Case, compiled: bool) -> None:
        store = self.make(case, compiled, 200, heap_bytes=6 * case.spec.nbytes)
        noise = np.random.default_rng(0).integers(0, 256, (200, case.spec.nbytes)).astype(np.uint8)
        n_stored = 0
        with contextlib.suppress(HeapFullError):
            while n_stored < 200:
                write_rows(store, [n_stored], [0], noise[n_stored : n_stored + 1])
                n_stored += 1
        assert n_stored < 200
        np.testing.assert_array_equal(store.read(np.arange(n_stored)), noise[:n_stored])
        assert not store.read(np.arange(n_stored, 200)).any()
        store.check()

    def test_copies_do_not_change_with_the_original(self, case: Case, compiled: bool) -> None:
        store, rows = self.filled(case, compiled)
        copies = [copy.deepcopy(store), pickle.loads(pickle.dumps(store))]
        store.clear()
        for copied in copies:
            np.testing.assert_array_equal(copied.read(np.arange(24)), rows)
            copied.check()

    def test_copies_share_nothing_that_changes_in_place(self, case: Case, compiled: bool) -> None:
        store, _ = self.filled(case, compiled)
        own = vars(store)
        for name, part in vars(FrozenStore.of(store).thaw()).items():
            shared = part is own.get(name) and isinstance(part, list | dict | set | np.ndarray)
            assert not shared, f"{name} is shared with the copy"

    def test_reports_agree(self, case: Case, compiled: bool) -> None:
        store, _ = self.filled(case, compiled)
        assert store.held_bytes >= store.memory_usage().total > 0
        assert store.describe().startswith(case.method.partition(":")[0])
