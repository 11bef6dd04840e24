"""Other processes read a replay buffer through shared memory: contents, kills, clean-up, errors."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers._sb3.sharing import BufferSharing
from sb3_extra_buffers.compressed import (
    CompressedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    CompressedSequenceReplayBuffer,
    SharedReader,
)
from sb3_extra_buffers.errors import (
    ArgumentError,
    EmptyBufferError,
    IndexOutOfRangeError,
    InterruptedChangeError,
    MissingExtraError,
    OutOfMemoryError,
    OwnerEndedError,
    SharingError,
)
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.shared_memory import SharedPlace
from tests.compressed.shared_processes import N_ENVS, Case, images
from tests.torture.interrupts import Injector

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="forks")


def run(scenario: str, *arguments: Any, timeout: float = 200, code: int = 0) -> str:
    """The output of a scenario of `shared_processes`."""
    command = [sys.executable, "-m", "tests.compressed.shared_processes", scenario]
    command += [each if isinstance(each, str) else json.dumps(each) for each in arguments]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, cwd=Path(__file__).parents[2]
    )
    assert ran.returncode == code, f"ended with {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout.strip()


def assert_equal(batch: Any, expected: Any) -> None:
    for one, other in zip(batch, expected, strict=True):
        if isinstance(one, np.ndarray):
            assert np.array_equal(one, other)
        elif isinstance(one, dict):
            assert one.keys() == other.keys()
            assert all(th.equal(one[key], other[key]) for key in one)
        else:
            assert (one is None and other is None) or (one.dtype == other.dtype and th.equal(one, other))


def assert_reads_like(reader: SharedReader, buffer: Any) -> None:
    """``reader`` returns every transition that ``buffer`` does."""
    assert reader.size() == buffer.size()
    assert len(reader) == len(buffer)
    assert reader.n_added == buffer.n_added
    low, high, shift = buffer._range()
    steps = (np.repeat(np.arange(low, high), N_ENVS) + shift) % buffer.buffer_size
    envs = np.tile(np.arange(N_ENVS), high - low)
    assert_equal(reader.read(steps, envs), buffer._samples_at(steps, envs, None))


METHODS = ["auto", "delta", "delta3", "none", "zstd", "rle", "palette", "palette:none", "scroll", "scroll3", "camera"]


@pytest.mark.parametrize("method", METHODS)
def test_a_reader_gets_what_the_owner_has(method: str) -> None:
    try:
        case = Case(method=method, n_steps=60)
    except MissingExtraError as problem:
        pytest.skip(str(problem))
    reader = SharedReader.open(case.buffer.share())
    for count in (1, 3, 20, 40, 50, 400):
        # collected, chosen, sealed, full, wrapped, cleaned
        case.add(count)
        assert_reads_like(reader, case.buffer)
        case.check(reader.sample(50), case.n_added - 60, case.n_added)
    for view in case.buffer.obs_views()["observations"].stored.values():
        view.store.check()
    assert_reads_like(SharedReader.open(case.buffer.share().name), case.buffer)


@pytest.mark.parametrize("kind", ["vector", "dict"])
def test_vectors_and_dicts_can_be_shared(kind: str) -> None:
    case = Case(kind=kind, n_steps=60)
    case.add(5)
    reader = SharedReader.open(case.buffer.share())
    for count in (1, 20, 70, 300):
        case.add(count)
        assert_reads_like(reader, case.buffer)
        case.check(reader.sample(50), case.n_added - 60, case.n_added)


def test_images_with_colours_that_the_table_cannot_hold_can_be_shared() -> None:
    case = Case(method="palette", n_steps=60, noisy=True)
    reader = SharedReader.open(case.buffer.share())
    for count in (1, 30, 100):
        case.add(count)
        assert_reads_like(reader, case.buffer)


@pytest.mark.parametrize("method", ["none", "rle", "palette"])
def test_a_reader_follows_when_auto_changes_the_method(method: str) -> None:
    case = Case(method="auto", n_steps=100)
    case.add(60)
    reader = SharedReader.open(case.buffer.share())
    assert_reads_like(reader, case.buffer)
    store = case.buffer.observations.store
    # as `auto` does before a write, when another method has become better
    layout, index = store.layout, case.buffer.pos * N_ENVS
    store._compare_at = 1 << 60  # and keeps to it
    store.run_exclusively(lambda: store._change_method(store.inner, layout, Choice(method, "better now"), index))
    for count in (0, 1, 20, 200):
        case.add(count)
        assert_reads_like(reader, case.buffer)
    assert method in case.buffer.observations.store.describe()


def test_a_reader_never_draws_evicted_steps() -> None:
    case = Case(n_steps=400, max_bytes=150_000, noisy=True)
    reader = SharedReader.open(case.buffer.share())
    for _ in range(4):
        case.add(150)
        assert_reads_like(reader, case.buffer)
        for _ in range(5):
            case.check(reader.sample(64), case.n_added - case.buffer.size(), case.n_added)
    assert case.buffer.n_evicted


def test_n_step_returns_are_those_of_the_owner() -> None:
    space = spaces.Box(0, 255, (4, 40, 40), np.uint8)
    case = Case(n_steps=50)
    case.buffer = CompressedNStepReplayBuffer(100, space, spaces.Discrete(5), "cpu", N_ENVS, n_steps=3, gamma=0.5)
    case.add(70)
    reader = SharedReader.open(case.buffer.share())
    assert_reads_like(reader, case.buffer)
    assert reader.sample(8).discounts is not None


def test_an_empty_buffer_can_be_shared_and_cannot_be_sampled() -> None:
    case = Case()
    reader = SharedReader.open(case.buffer.share())
    assert len(reader) == 0
    with pytest.raises(EmptyBufferError):
        reader.sample(4)


def test_readers_draw_from_generators_of_their_own() -> None:
    case = Case()
    case.add(100)
    handle = case.buffer.share()
    first, same, other = (handle.open(seed).sample(64).rewards for seed in (1, 1, 2))
    assert th.equal(first, same)
    assert not th.equal(first, other)


def test_steps_that_do_not_exist_are_refused() -> None:
    case = Case(n_steps=20)
    case.add(30)
    reader = SharedReader.open(case.buffer.share())
    for steps, envs in (([20], [0]), ([-1], [0]), ([0], [N_ENVS]), ([0, 1], [0]), ([1.5], [0]), (["a"], [0])):
        with pytest.raises(IndexOutOfRangeError):
            reader.read(steps, envs)
    with pytest.raises(OutOfMemoryError):
        reader.sample(1 << 44)
    for seed in (-1, "x"):
        with pytest.raises(ArgumentError):
            SharedReader.open(case.buffer.share(), seed=seed)  # type: ignore[arg-type]  # on purpose


def test_threads_can_use_one_reader() -> None:
    case = Case()
    case.add(50)
    reader = SharedReader.open(case.buffer.share())
    problems: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                case.check(reader.sample(16))
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    case.add(300)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not problems


# ---- sequences ----


def add_to_sequences(buffer: Any, first: int, count: int) -> None:
    envs = np.arange(N_ENVS)
    for number in range(first, first + count):
        numbers = np.full(N_ENVS, number)
        state = {"h": np.full((N_ENVS, 3), number, np.float32)}
        done, reward = numbers % 13 == 12, numbers.astype(np.float32)
        action = (numbers % 5).reshape(-1, 1)
        obs, next_obs = images(numbers, envs), images(numbers + 1, envs)
        buffer.add(obs, next_obs, action, reward, done, [{}, {}], recurrent_state=state)


def test_windows_are_those_of_the_owner() -> None:
    space = spaces.Box(0, 255, (4, 40, 40), np.uint8), spaces.Discrete(5)
    buffer = CompressedSequenceReplayBuffer(120, *space, "cpu", N_ENVS, recurrent_states={"h": 3})
    add_to_sequences(buffer, 0, 10)
    reader = SharedReader.open(buffer.share())
    for first, count in ((10, 20), (30, 100)):
        add_to_sequences(buffer, first, count)
        for episode_end in ("stop", "pad", "continue"):
            for frames in ("stacked", "newest"):
                batches = []
                for source in (buffer, reader):
                    np.random.seed(3)  # noqa: NPY002  # SB3 draws from it
                    batches.append(source.sample_sequences(8, 6, 2, episode_end=episode_end, frames=frames))
                assert_equal(*batches)
    batch = buffer.sample_sequences(4, 3)
    buffer.update_recurrent_states(batch, {"h": th.full((4, 3), -1.0)})
    np.random.seed(0)  # noqa: NPY002
    assert_same_states(buffer, reader)
    buffer.reset()
    with pytest.raises(EmptyBufferError):
        reader.sample_sequences(4, 3)
    add_to_sequences(buffer, 0, 30)
    assert_same_states(buffer, reader)


def assert_same_states(buffer: Any, reader: SharedReader) -> None:
    batches = []
    for source in (buffer, reader):
        np.random.seed(1)  # noqa: NPY002
        batches.append(source.sample_sequences(16, 4, 1))
    assert_equal(*batches)


def test_only_buffers_with_sequences_have_windows() -> None:
    case = Case()
    case.add(30)
    with pytest.raises(SharingError, match="CompressedSequenceReplayBuffer"):
        SharedReader.open(case.buffer.share()).sample_sequences(4, 3)


# ---- the owner ----


def test_a_shared_buffer_behaves_like_one_that_is_not_shared(tmp_path: Path) -> None:
    shared, plain = Case(kind="dict", n_steps=80), Case(kind="dict", n_steps=80)
    for case in (shared, plain):
        case.add(30)
    handle = shared.buffer.share()
    for case in (shared, plain):
        case.add(200)
    shared.buffer.save(tmp_path / "saved")
    copies: list[Any] = [copy.deepcopy(shared.buffer), pickle.loads(pickle.dumps(shared.buffer))]
    for copied in (*copies, type(shared.buffer).load(tmp_path / "saved")):
        np.random.seed(0)  # noqa: NPY002  # SB3 draws from it
        batch = copied.sample(32)
        np.random.seed(0)  # noqa: NPY002
        assert_equal(batch, plain.buffer.sample(32))
        # a copy is not shared
        copied.add(*step_of(shared))
        assert handle.open().n_added == 230
    shared.buffer.reset()
    assert handle.open().size() == 0


def step_of(case: Case) -> tuple[Any, ...]:
    envs = np.arange(N_ENVS)
    obs = case.observations(envs, envs)
    return obs, obs, np.zeros((N_ENVS, 1), np.int64), np.zeros(N_ENVS, np.float32), np.zeros(N_ENVS, bool), [{}, {}]


def test_memory_is_returned_when_the_buffer_is_dropped() -> None:
    gc.collect()
    gc.disable()
    try:
        case = Case()
        case.add(100)
        reader = SharedReader.open(case.buffer.share())
        case.buffer.sample(4)
        buffer = weakref.ref(case.buffer)
        del case.buffer
        assert buffer() is None
        time.sleep(0.05)
        with pytest.raises(OwnerEndedError):
            reader.sample(4)
    finally:
        gc.enable()


def test_sharing_can_be_stopped_and_started_again() -> None:
    case = Case()
    case.add(20)
    reader = SharedReader.open(case.buffer.share())
    live = [reader.is_live]
    assert repr(reader) == f"SharedReader({reader.name!r}, live)"
    case.buffer.stop_sharing()
    assert [*live, reader.is_live] == [True, False]
    assert repr(reader) == f"SharedReader({reader.name!r}, ended)"
    with pytest.raises(OwnerEndedError, match="stopped sharing"):
        reader.sample(4)
    with pytest.raises(OwnerEndedError):
        SharedReader.open(reader.name)
    case.add(20)
    case.check(case.buffer.sample(16))
    assert_reads_like(SharedReader.open(case.buffer.share()), case.buffer)
    case.add(400)
    assert_reads_like(SharedReader.open(case.buffer.share()), case.buffer)


def test_a_step_that_fails_leaves_readers_with_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    case.add(20)
    reader = SharedReader.open(case.buffer.share())
    with pytest.raises(ValueError, match="shape"):
        case.buffer.add(np.zeros((1, 2)), *step_of(case)[1:])
    assert_reads_like(reader, case.buffer)

    def fail(*args: Any) -> None:
        raise RuntimeError("on purpose")

    store = case.buffer.observations.store
    store.on_change = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        case.add()
    store.on_change = None
    assert reader.n_added == 20
    assert_reads_like(reader, case.buffer)
    case.add(5)
    assert_reads_like(reader, case.buffer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "vector", "dict"])
@pytest.mark.parametrize("n_before", [3, 45, 170])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts in finalizers
def test_readers_recover_from_an_interrupt_at_any_point_of_add(kind: str, n_before: int) -> None:
    case = Case(kind=kind, n_steps=60)
    case.add(n_before)
    reader = SharedReader.open(case.buffer.share())
    case.add(2)
    with Injector() as counter:
        case.add()
    random = np.random.default_rng(n_before)
    for at in random.integers(1, counter.count + 1, 60):
        with contextlib.suppress(KeyboardInterrupt), Injector(int(at), KeyboardInterrupt()):
            case.add()
        case.n_added = case.buffer.n_added
        if can_be_read(reader):  # no signal is handled at the one bytecode where it is not
            with contextlib.suppress(InterruptedChangeError):
                case.check(reader.sample(16), case.n_added - 61, case.n_added + 1)
        case.buffer.recover()
        case.n_added = case.buffer.n_added
        case.add()
        assert_reads_like(reader, case.buffer)


@pytest.mark.parametrize("kind", ["image", "dict"])
def test_what_moves_in_a_step_that_is_interrupted_is_published_with_the_next(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kind=kind, n_steps=60)
    case.add(3)
    reader = SharedReader.open(case.buffer.share())
    writer = case.buffer._sharing._writer

    def interrupt(description: Any) -> None:
        raise KeyboardInterrupt

    n_interrupts = 0
    for _ in range(150):
        monkeypatch.setattr(writer, "describe", interrupt)
        try:
            case.add()
        except KeyboardInterrupt:
            n_interrupts += 1
            monkeypatch.undo()
            case.buffer.recover()
            case.n_added = case.buffer.n_added
            case.add()
            assert_reads_like(reader, case.buffer)
    assert n_interrupts > 3


def can_be_read(reader: SharedReader) -> bool:
    """Whether a reader would not have to wait now."""
    import fcntl

    piece = reader._shared._main.reopened()
    try:
        fcntl.flock(piece.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(piece.descriptor, fcntl.LOCK_UN)
    return True


@pytest.mark.parametrize("kind", ["image", "vector"])
def test_an_interrupt_at_the_end_of_a_step_stops_no_reader_and_the_next_step_excludes_all(kind: str) -> None:
    case = Case(kind=kind, n_steps=60)
    case.add(70)
    reader = SharedReader.open(case.buffer.share())
    sharing, left, tracing = case.buffer._sharing, [0], sys.gettrace()

    def trace(frame: Any, kind: str, argument: Any) -> Any:
        if frame.f_code.co_name not in ("end", "_end_store", "_publish") or "shar" not in frame.f_code.co_filename:
            return None
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return trace

    n_lines = 0
    while left[0] <= 0:
        n_lines += 1
        left[0] = n_lines
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            case.add()
        sys.settrace(tracing)
        case.n_added = case.buffer.n_added
        assert can_be_read(reader)
        with contextlib.suppress(InterruptedChangeError):
            case.check(reader.sample(16), case.n_added - 60, case.n_added)
        sharing.begin()
        assert not can_be_read(reader)
        sharing.end()
        case.add()
        assert_reads_like(reader, case.buffer)
    assert n_lines > 15


@pytest.mark.parametrize("method", ["delta", "palette", "zstd"])
def test_a_step_is_kept_if_publishing_what_it_moved_is_interrupted(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        case = Case(method=method, n_steps=60)
    except MissingExtraError as problem:
        pytest.skip(str(problem))
    case.add(3)
    reader = SharedReader.open(case.buffer.share())

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    n_interrupts = 0
    for _ in range(100):
        monkeypatch.setattr(Heap, "use_tables", interrupt)
        try:
            case.add()
        except KeyboardInterrupt:
            n_interrupts += 1
            monkeypatch.undo()
            n_added, case.n_added = case.n_added, case.buffer.n_added
            assert case.n_added == n_added + 1
            steps = np.arange(case.buffer.size())
            case.check(case.buffer._samples_at(steps, np.zeros_like(steps), None))
            case.add()
            assert_reads_like(reader, case.buffer)
    assert n_interrupts > 0


def test_a_full_disk_is_a_named_error_and_every_step_before_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(noisy=True, n_steps=3000)
    case.add(20)
    case.buffer._sharing = BufferSharing(case.buffer, in_files=True)
    reader = SharedReader.open(case.buffer.share())
    reserve = os.posix_fallocate

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OutOfMemoryError, match="No space left"):
        case.add(1000)
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    n_added = case.n_added = case.buffer.n_added
    case.add(50)
    assert case.buffer.n_added == n_added + 50
    assert_reads_like(reader, case.buffer)
    case.buffer.stop_sharing()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors")
@pytest.mark.parametrize("kind", ["image", "vector", "dict"])
def test_a_buffer_that_could_not_be_shared_is_as_before(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of open files may be reached anywhere."""

    def n_descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    create, calls = SharedPlace.create, iter(range(0))

    def fail(place: SharedPlace, size: int) -> tuple[int, int]:
        if next(calls, None) is None:
            raise SharingError("on purpose")
        return create(place, size)

    before = n_descriptors()
    for n_calls in range(100):
        case = Case(kind=kind)
        case.add(45)
        calls = iter(range(n_calls))
        with monkeypatch.context() as patch:
            patch.setattr(SharedPlace, "create", fail)
            try:
                case.buffer.share()
                break
            except SharingError:
                pass
        case.check(case.buffer.sample(16))
        reader = SharedReader.open(case.buffer.share())
        case.add(3)
        assert_reads_like(reader, case.buffer)
        del case, reader
        assert n_descriptors() == before
    assert n_calls > 5


@pytest.mark.parametrize("kind", ["prioritized", "folder"])
def test_buffers_that_cannot_be_shared_say_so(kind: str, tmp_path: Path) -> None:
    spaces_ = spaces.Box(0, 255, (4, 40, 40), np.uint8), spaces.Discrete(5)
    if kind == "prioritized":
        buffer: Any = CompressedPrioritizedReplayBuffer(20, *spaces_, "cpu")
    else:
        buffer = CompressedReplayBuffer(20, *spaces_, "cpu", storage="mmap", path=tmp_path / "buffer")
    with pytest.raises(SharingError):
        buffer.share()
    # and stay as they were
    obs, info = np.zeros((1, 4, 40, 40), np.uint8), dict[str, Any]()
    buffer.add(obs, obs, np.zeros((1, 1), np.int64), np.zeros(1, np.float32), np.zeros(1, bool), [info])
    assert buffer.sample(1).rewards.shape == (1, 1)


# ---- names ----


def test_only_names_of_shared_buffers_can_be_opened(tmp_path: Path) -> None:
    case = Case()
    name = case.buffer.share().name
    root, number, token = name.rsplit(".", 2)
    for wrong in (
        "",
        "nothing",
        "1.2",
        f"{root}.{number}.{'0' * 32}",
        f"{root}.0.{token}",
        f"999999999.{number}.{token}",
        None,
        case.buffer,
    ):
        with pytest.raises(SharingError):
            SharedReader.open(wrong)  # type: ignore[arg-type]  # on purpose
    # files of others, or that others may read, are not mapped
    (tmp_path / "7").write_bytes(bytes(8192))
    (tmp_path / "7").chmod(0o644)
    with pytest.raises(SharingError, match="others may read"):
        SharedReader.open(f"{tmp_path}.7.{token}")
    (tmp_path / "7").chmod(0o600)
    with pytest.raises(SharingError):
        SharedReader.open(f"{tmp_path}.7.{token}")


def test_other_processes_cannot_open_the_memory_to_write() -> None:
    case = Case()
    reader = SharedReader.open(case.buffer.share())
    for piece in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        if "memfd:sb3-extra-buffers" in os.readlink(piece) if piece.is_symlink() and piece.exists() else False:
            assert piece.stat().st_mode & 0o777 == 0o400
    assert reader.is_live


def test_a_reader_stays_in_its_process_and_a_handle_travels() -> None:
    case = Case()
    handle = case.buffer.share()
    with pytest.raises(SharingError, match="handle"):
        pickle.dumps(handle.open())
    assert pickle.loads(pickle.dumps(handle)).name == handle.name
    assert handle.name in repr(handle)


# ---- processes ----


@needs_fork
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"n_steps": 100},
        {"method": "auto", "noisy": True, "n_steps": 100},
        {"kind": "dict", "method": "zstd", "n_steps": 100},
        {"max_bytes": 150_000, "noisy": True, "n_steps": 400},
    ],
)
def test_processes_read_while_the_owner_adds_and_wraps(case: dict[str, Any]) -> None:
    if case.get("method") == "zstd":
        pytest.importorskip("zstandard")
    counts = json.loads(run("write", "fork", case, 300).replace("'", '"'))
    assert all(isinstance(count, int) and count > 0 for count in counts), counts


@pytest.mark.slow
def test_spawned_processes_can_read() -> None:
    counts = json.loads(run("write", "spawn", {"n_steps": 100}, 2000).replace("'", '"'))
    assert all(isinstance(count, int) for count in counts), counts


@needs_fork
@pytest.mark.slow
def test_readers_of_a_killed_owner_get_a_named_error_and_never_garbage() -> None:
    assert set(run("kill-writers", {}, 8).split()) <= {"OwnerEndedError", "InterruptedChangeError"}


@needs_fork
@pytest.mark.slow
def test_an_owner_that_is_killed_in_a_step_leaves_a_mark() -> None:
    assert "in the middle of a change" in run("kill-in-a-change")


@needs_fork
@pytest.mark.slow
def test_a_killed_reader_does_not_block_the_owner() -> None:
    assert int(run("kill-readers", {}, 5)) > 100


@needs_fork
@pytest.mark.slow
def test_forked_children_can_read_whatever_threads_of_the_parent_do() -> None:
    assert run("fork-while-drawing").split() == ["0"] * 25


@needs_fork
@pytest.mark.slow
def test_a_forked_child_cannot_use_the_shared_buffer_of_its_parent_but_can_read_it() -> None:
    assert run("inherit").split() == ["SharingError"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 3), ("error", 1), ("drop", 0)])
def test_no_files_are_left_when_the_owner_ends(how: str, code: int) -> None:
    folder = run(how, code=code)
    assert re.fullmatch(r"/.*sb3-extra-buffers-\w+", folder)
    assert not Path(folder).exists()
