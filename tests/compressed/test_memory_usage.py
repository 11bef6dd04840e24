"""What `memory_usage()` says, against bytes that are counted here: the arrays of real SB3 buffers, the resident set."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import stable_baselines3.common.buffers as sb3
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv

import sb3_extra_buffers.compressed as compressed
from sb3_extra_buffers.compressed import CompressedArray, CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.kernels import has_numba
from sb3_extra_buffers.recording import FramelessRecordBuffer, RecordBuffer
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_frames import DeviceFrameStore
from sb3_extra_buffers.stores.usage import MemoryUsage, format_bytes, format_percent
from tests.contracts.buffer import ACTIONS, SPACES, play
from tests.contracts.store import RESIDENT, needs_proc, run_fresh

ACTION = ACTIONS["box"]
DISCRETE = ACTIONS["discrete"]
IMAGE = SPACES["frames first"]
N_ENVS = 3

REPLAYS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ReplayBuffer": (compressed.CompressedReplayBuffer, sb3.ReplayBuffer, {}),
    "NStepReplayBuffer": (compressed.CompressedNStepReplayBuffer, sb3.NStepReplayBuffer, {"n_steps": 3}),
    "prioritised": (compressed.CompressedPrioritizedReplayBuffer, sb3.ReplayBuffer, {}),
    "GPU": (GpuReplayBuffer, sb3.ReplayBuffer, {}),
}


def dense_bytes(buffer: Any, n_written: int, only: str = "") -> int:
    """Bytes of the first ``n_written`` rows of every array of an SB3 buffer whose name contains ``only``."""
    total = 0
    for name, column in vars(buffer).items():
        for array in column.values() if isinstance(column, dict) else [column]:
            if isinstance(array, np.ndarray) and len(array) == buffer.buffer_size and only in name:
                total += array[:n_written].nbytes
    return total


def printed_percents(usage: MemoryUsage) -> list[float]:
    """The percentages in the report: of everything, and of observations."""
    return [float(number.replace(",", "")) for number in re.findall(r"([\d.,]+) %", str(usage))]


def assert_true(ours: Any, theirs: Any, n_steps: int, baseline: str) -> None:
    """Compare the report of ``ours`` with the arrays of ``theirs``, where ``n_steps`` steps are held."""
    usage, dense = ours.memory_usage(), dense_bytes(theirs, n_steps)
    assert (usage.transitions, usage.baseline) == (n_steps * theirs.n_envs, baseline)
    assert len(ours) == usage.transitions
    assert usage.dense == dense
    assert usage.dense_observations == dense_bytes(theirs, n_steps, "observations")
    if usage.decided:
        everything, observations = printed_percents(usage)
        assert everything == pytest.approx(100 * usage.total / dense, rel=0.02)
        assert observations == pytest.approx(100 * usage.observations / usage.dense_observations, rel=0.02)
    assert f"in {baseline}" in str(usage) or f"{baseline} would hold" in str(usage)


def pair(name: str, space: Any, size: int, **options: Any) -> tuple[Any, Any]:
    ours, theirs, both = REPLAYS[name]
    arguments = (size * N_ENVS, space, ACTION, "cpu")
    return ours(*arguments, n_envs=N_ENVS, **both, **options), theirs(*arguments, n_envs=N_ENVS, **both)


@pytest.mark.parametrize("n_steps", [30, 70, 130])
@pytest.mark.parametrize("name", REPLAYS)
def test_replay_buffers(name: str, n_steps: int) -> None:
    """Partly filled, and wrapped."""
    ours, theirs = pair(name, IMAGE, 100, compression_method="delta")
    for step in play(IMAGE, N_ENVS, n_steps, actions=ACTION):
        ours.add(*step)
        theirs.add(*step)
    baseline = type(theirs).__name__
    assert_true(ours, theirs, min(n_steps, 100), f"SB3's {baseline}")
    assert ours.memory_usage().decided == (n_steps >= 70)


@pytest.mark.parametrize("n_steps", [30, 130])
def test_stores_of_a_gpu(n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores that a GPU has, with reference kernels in main memory."""
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
    ours, theirs = pair("GPU", IMAGE, 100, compression_method="delta")
    for step in play(IMAGE, N_ENVS, n_steps, actions=ACTION):
        ours.add(*step)
        theirs.add(*step)
    assert_true(ours, theirs, min(n_steps, 100), "SB3's ReplayBuffer")
    inner, usage = ours.obs_stores[""].inner, ours.memory_usage()
    columns = usage.dense - usage.dense_observations
    if n_steps == 30:
        assert inner is None
        assert usage.ratio is None
        assert usage.total == usage.dense_observations + columns
    else:
        assert type(inner) is DeviceFrameStore
        tables = sum(table.nbytes for table in inner.state.tables) + inner.memory_usage().other
        assert usage.total == pytest.approx(tables + columns, rel=0.02)


@pytest.mark.parametrize("n_steps", [40, 130])
@pytest.mark.parametrize("name", REPLAYS)
@pytest.mark.parametrize("space", ["vector", "discrete", "double"])
def test_uncompressed_observations_are_stored_once(name: str, space: str, n_steps: int) -> None:
    ours, theirs = pair(name, SPACES[space], 100)
    for step in play(SPACES[space], N_ENVS, n_steps, actions=ACTION):
        ours.add(*step)
        theirs.add(*step)
    usage, n_held = ours.memory_usage(), min(n_steps, 100)
    assert_true(ours, theirs, n_held, f"SB3's {type(theirs).__name__}")
    if name != "GPU" and not has_numba():
        assert usage.observation_ratio == 1
    elif name == "prioritised":
        # a sum for each transition, and a few more
        assert usage.observation_ratio < (0.85 if space == "discrete" else 0.65)
        assert usage.total <= usage.dense - 0.15 * usage.dense_observations + 30 * usage.transitions
    elif name == "GPU":
        # allocated in pieces of 64 KiB: one for observations, one for next observations that do not follow
        assert usage.total < usage.dense + 2 * 65536 + 4096
    else:
        # episodes are short here, and tables take a few hundred bytes, which shows if observations have 8
        assert usage.ratio < 1
        assert 0.5 < usage.observation_ratio < (0.85 if space == "discrete" else 0.65)


@pytest.mark.parametrize("cls", [CompressedReplayBuffer, GpuReplayBuffer])
def test_a_smaller_dtype_counts_as_compression(cls: Any) -> None:
    space = spaces.Box(0, 255, IMAGE.shape, np.float32)
    arguments: Any = (100, space, ACTION, "cpu")
    ours, theirs = cls(*arguments, dtypes={"elem_type": np.uint8}), sb3.ReplayBuffer(*arguments)
    for step in play(IMAGE, 1, 70, actions=ACTION):
        floats = step._replace(obs=step.obs.astype(np.float32), next_obs=step.next_obs.astype(np.float32))
        ours.add(*floats)
        theirs.add(*floats)
    assert_true(ours, theirs, 70, "SB3's ReplayBuffer")
    assert "(4, 20, 16) float32" in repr(ours)


@pytest.mark.parametrize("n_steps", [40, 130])
def test_dict_observations(n_steps: int) -> None:
    space: Any = SPACES["dict"]
    for ours in (
        compressed.CompressedDictReplayBuffer(100 * N_ENVS, space, ACTION, "cpu", n_envs=N_ENVS),
        compressed.CompressedDictNStepReplayBuffer(100 * N_ENVS, space, ACTION, "cpu", n_envs=N_ENVS),
        GpuReplayBuffer(100 * N_ENVS, space, ACTION, "cpu", n_envs=N_ENVS, compression_method="delta"),
    ):
        theirs = sb3.DictReplayBuffer(100 * N_ENVS, space, ACTION, "cpu", n_envs=N_ENVS)
        for step in play(space, N_ENVS, n_steps, actions=ACTION):
            ours.add(*step)
            theirs.add(*step)
        assert_true(ours, theirs, min(n_steps, 100), "SB3's DictReplayBuffer")
        assert set(ours.memory_usage().codecs) == set(space)
        # one key is not compressed yet, so there is no ratio
        assert (ours.memory_usage().ratio is None) == (n_steps == 40)


@pytest.mark.parametrize("n_steps", [4, 60])
def test_hindsight_replay(n_steps: int) -> None:
    env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=6, max_steps=7)] * 2)
    arguments: Any = (80, env.observation_space, env.action_space)
    options: Any = {"env": env, "device": "cpu", "n_envs": 2}
    ours, theirs = compressed.CompressedHerReplayBuffer(*arguments, **options), HerReplayBuffer(*arguments, **options)
    for step in play(env.observation_space, 2, n_steps, actions=env.action_space):
        for buffer in (ours, theirs):
            buffer.add(*step)
    assert_true(ours, theirs, min(n_steps, 40), "SB3's HerReplayBuffer")
    # each key has tables of a few hundred bytes, and observations have 6
    assert ours.memory_usage().total <= ours.memory_usage().dense + (3 * 350 if n_steps == 4 else 0)


def add_to_rollout(buffers: Any, space: Any, n_steps: int, **more: Any) -> None:
    rng = np.random.default_rng(0)
    for step in play(space, N_ENVS, n_steps):
        numbers = rng.normal(size=(2, N_ENVS)).astype(np.float32)
        columns = (step.action, step.reward, step.done, th.from_numpy(numbers[0]), th.from_numpy(numbers[1]))
        for buffer in buffers:
            obs = {key: value.copy() for key, value in step.obs.items()} if isinstance(step.obs, dict) else step.obs
            buffer.add(obs, *columns, **more)


@pytest.mark.parametrize("n_steps", [60, 100])
@pytest.mark.parametrize("name", ["frames first", "vector", "dict"])
@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_rollouts(where: str, name: str, n_steps: int) -> None:
    space, is_dict = SPACES[name], name == "dict"
    arguments: Any = (100, space, DISCRETE, "cpu", 0.9, 0.99, N_ENVS)
    theirs = (sb3.DictRolloutBuffer if is_dict else sb3.RolloutBuffer)(*arguments)
    cls = compressed.CompressedDictRolloutBuffer if is_dict else CompressedRolloutBuffer
    gpu: Any = GpuRolloutBuffer
    ours: Any = gpu(*arguments, compression_method="delta") if where == "gpu" else cls(*arguments)
    add_to_rollout((ours, theirs), space, n_steps)
    assert_true(ours, theirs, n_steps, f"SB3's {type(theirs).__name__}")
    if n_steps == 100:
        before = ours.memory_usage()
        ours.compute_returns_and_advantage(th.zeros(N_ENVS), np.zeros(N_ENVS))
        list(ours.get(50))
        # flattening the columns changes nothing
        assert ours.memory_usage() == before
        ours.reset()
        empty = ours.memory_usage()
        assert (empty.transitions, empty.dense, empty.ratio) == (0, 0, None)


@pytest.mark.parametrize("kind", ["Maskable", "Recurrent"])
@pytest.mark.parametrize("n_steps", [60, 100])
def test_columns_of_sb3_contrib_count(kind: str, n_steps: int) -> None:
    contrib = pytest.importorskip(f"sb3_contrib.common.{kind.lower()}.buffers")
    name, more = f"{kind}RolloutBuffer", {}
    arguments: Any = (100, IMAGE, DISCRETE)
    if kind == "Recurrent":
        from sb3_contrib.common.recurrent.type_aliases import RNNStates

        arguments = (*arguments, (100, 1, N_ENVS, 64))
        state = (th.ones(1, N_ENVS, 64), th.ones(1, N_ENVS, 64))
        more = {"lstm_states": RNNStates(state, state)}
    ours = getattr(compressed, f"Compressed{name}")(*arguments, device="cpu", n_envs=N_ENVS)
    theirs = getattr(contrib, name)(*arguments, device="cpu", n_envs=N_ENVS)
    add_to_rollout((ours, theirs), IMAGE, n_steps, **more)
    assert_true(ours, theirs, n_steps, f"sb3-contrib's {name}")


def test_your_own_class_is_named_and_its_columns_count() -> None:
    class Noted(sb3.ReplayBuffer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.notes = np.zeros((self.buffer_size, self.n_envs, 50))

    ours: Any = compressed.compressed(Noted)(100, IMAGE, ACTION, "cpu")
    theirs = Noted(100, IMAGE, ACTION, "cpu")
    for step in play(IMAGE, 1, 60, actions=ACTION):
        ours.add(*step)
        theirs.add(*step)
    assert_true(ours, theirs, 60, "Noted")


def test_evicted_transitions_do_not_count() -> None:
    ours = CompressedReplayBuffer(2000, IMAGE, ACTION, "cpu", compression_method="gzip1", max_bytes="250 kB")
    theirs = sb3.ReplayBuffer(2000, IMAGE, ACTION, "cpu")
    for step in play(IMAGE, 1, 1000, actions=ACTION):
        ours.add(*step)
        theirs.add(*step)
    assert ours.n_evicted > 0
    assert_true(ours, theirs, ours.size(), "SB3's ReplayBuffer")


# ---- what a reader sees ----


def test_a_large_buffer_with_a_few_frames_of_noise_takes_what_one_copy_of_them_does() -> None:
    """Divided by the capacity, this was 0.10 %."""
    space = spaces.Box(0, 255, (40, 40), np.uint8)
    buffer = CompressedReplayBuffer(1_000_000, space, DISCRETE, "cpu")
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 256, (1, 40, 40), np.uint8)
    for _ in range(500):
        after = rng.integers(0, 256, (1, 40, 40), np.uint8)
        buffer.add(obs, after, np.zeros((1, 1), np.int64), np.zeros(1), np.zeros(1), [{}])
        obs = after
    usage = buffer.memory_usage()
    assert usage.decided
    assert printed_percents(usage)[0] == pytest.approx(50, rel=0.03)


def test_nothing_has_no_ratio() -> None:
    for buffer in (
        CompressedReplayBuffer(100, IMAGE, DISCRETE, "cpu"),
        CompressedReplayBuffer(100, SPACES["vector"], DISCRETE, "cpu"),
        CompressedRolloutBuffer(100, IMAGE, DISCRETE, "cpu"),
        GpuReplayBuffer(100, IMAGE, DISCRETE, "cpu", compression_method="delta"),
        CompressedArray(100, (40, 40), np.uint8),
        RecordBuffer(size=100),
    ):
        usage = buffer.memory_usage()
        assert usage.ratio is usage.observation_ratio is None
        assert "%" not in str(usage) + repr(usage)
        assert usage.transitions == usage.dense == 0


@pytest.mark.parametrize(("method", "event"), [("auto", "the method is chosen"), ("delta", "compression starts")])
@pytest.mark.parametrize("cls", [CompressedReplayBuffer, GpuReplayBuffer])
def test_before_anything_is_compressed_it_says_so(cls: Any, method: str, event: str) -> None:
    buffer = cls(1000, IMAGE, ACTION, "cpu", compression_method=method)
    for step in play(IMAGE, 1, 20, actions=ACTION):
        buffer.add(*step)
    usage = buffer.memory_usage()
    assert not usage.decided
    assert usage.ratio is usage.observation_ratio is None
    dense = 20 * (2 * 4 * 20 * 16 + 3 * 4 + 3 * 4)
    assert str(usage).splitlines() == [
        f"{format_bytes(usage.total)} for 20 transitions, not compressed yet; "
        f"SB3's ReplayBuffer would hold {format_bytes(dense)}",
        f"{method} (not compressed yet: {event} after 256 observations, 40 so far)",
    ]


def test_the_report_in_words_as_a_dict_and_as_html() -> None:
    usage = MemoryUsage(
        1_100_000, 90_000, 10_000, 40_000, 2000, 112_936_000, 112_896_000, "SB3's ReplayBuffer", {"": "delta (<auto>)"}
    )
    assert str(usage).splitlines() == [
        "1.24 MB for 2,000 transitions: 1.10 % of the 112.9 MB in SB3's ReplayBuffer",
        "observations alone: 1.20 MB, 1.06 % of 112.9 MB",
        "delta (<auto>)",
    ]
    figures = json.loads(json.dumps(usage.as_dict()))
    assert figures["total"] == usage.total == 1_240_000
    assert figures["ratio"] == usage.ratio == 1_240_000 / 112_936_000
    assert figures["observation_ratio"] == 1_200_000 / 112_896_000
    assert figures["codecs"] == {"": "delta (<auto>)"}
    page = usage._repr_html_()
    assert "1.10 %" in page
    assert "delta (&lt;auto&gt;)" in page


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_996, "10.0 kB"), (999_960, "1.00 MB"), (5e15, "5000.0 TB")],
)
def test_bytes_in_words(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.00012, "0.0120 %"), (0.011, "1.10 %"), (0.9996, "100 %"), (1, "100 %"), (30, "3,000 %")]
)
def test_ratios_in_words(ratio: float, text: str) -> None:
    assert format_percent(ratio) == text


# ---- buffers in words ----


def test_a_buffer_introduces_itself() -> None:
    buffer = CompressedReplayBuffer(1000, IMAGE, ACTION, "cpu", n_envs=2, compression_method="delta")
    assert repr(buffer) == "CompressedReplayBuffer(0 of 1,000 transitions of 2 envs, (4, 20, 16) uint8 delta, 0 B)"
    for step in play(IMAGE, 2, 150, actions=ACTION):
        buffer.add(*step)
    held = format_bytes(buffer.memory_usage().total)
    assert repr(buffer) == (
        f"CompressedReplayBuffer(300 of 1,000 transitions of 2 envs, (4, 20, 16) uint8 delta, {held})"
    )
    assert "300 of 1,000 transitions" in buffer._repr_html_()
    assert "SB3&#x27;s ReplayBuffer" in buffer._repr_html_()


def test_every_buffer_has_a_length_and_a_representation() -> None:
    rollout = CompressedRolloutBuffer(100, IMAGE, DISCRETE, "cpu", n_envs=N_ENVS)
    gpu = GpuRolloutBuffer(100, SPACES["dict"], DISCRETE, "cpu", n_envs=N_ENVS)
    for buffer, space in ((rollout, IMAGE), (gpu, SPACES["dict"])):
        assert len(buffer) == 0
        # code that asks "if model.replay_buffer:" means whether there is one
        assert buffer
        add_to_rollout([buffer], space, 7)
        assert len(buffer) == 7 * N_ENVS == 7 * buffer.n_envs
        assert repr(buffer).startswith(f"{type(buffer).__name__}(21 of 300 transitions of 3 envs, ")
    assert "vector: (17,) float32 none" in repr(gpu)


def test_a_buffer_whose_constructor_failed_can_be_shown() -> None:
    for cls in (CompressedReplayBuffer, CompressedRolloutBuffer, GpuReplayBuffer):
        assert repr(object.__new__(cls)) == f"{cls.__name__}(not initialized)"
        assert "not initialized" in object.__new__(cls)._repr_html_()


# ---- arrays, recordings, TorchRL ----


@pytest.mark.parametrize("method", ["delta", "none", "auto"])
@pytest.mark.parametrize("n_written", [100, 400])
def test_arrays(method: str, n_written: int) -> None:
    array = CompressedArray((200, 2), (4, 20, 16), np.uint8, compression_method=method)
    for number, step in enumerate(play(IMAGE, 2, n_written)):
        # an observation of zeros takes no memory, and cannot be told from one that was not written
        array[number % 200] = np.maximum(step.obs, 1)
    usage, dense = array.memory_usage(), min(n_written, 200) * 2 * 4 * 20 * 16
    assert usage.transitions == min(n_written, 200) * 2
    assert usage.dense == usage.dense_observations == dense
    assert usage.baseline == "a NumPy array"
    assert printed_percents(usage) == [pytest.approx(100 * usage.total / dense, rel=0.02)]
    if method == "none":
        # stacks of four share frames
        assert dense / 4 < usage.total < dense / 2.5
    assert f"for {usage.transitions:,} observations: " in str(usage)


@pytest.mark.parametrize("n_written", [150, 250])
def test_recordings(n_written: int) -> None:
    buffer = RecordBuffer(res=(20, 16), ch_num=4, size=200)
    frameless = FramelessRecordBuffer(size=200)
    for step in play(IMAGE, 1, n_written):
        buffer.add(step.obs[0], step.reward[0], int(step.action[0]), {"health": 1.0})
        frameless.add(step.obs[0], step.reward[0], int(step.action[0]), {"health": 1.0})
    n_held = min(n_written, 200)
    columns = sum(array.nbytes for array in (buffer.rewards, buffer.actions, buffer.dones, buffer.features["health"]))
    usage = buffer.memory_usage()
    assert (usage.transitions, usage.baseline) == (n_held, "NumPy arrays")
    assert usage.dense_observations == n_held * 4 * 20 * 16
    # one byte more says whether a record is the first of its episode
    assert usage.dense == usage.dense_observations + columns + n_held
    assert printed_percents(usage)[0] == pytest.approx(100 * usage.total / usage.dense, rel=0.02)
    usage = frameless.memory_usage()
    assert (usage.total, usage.ratio, usage.observation_ratio) == (columns + n_held, 1, None)


@pytest.mark.parametrize("n_items", [150, 700])
def test_torchrl(n_items: int) -> None:
    torchrl = pytest.importorskip("torchrl.data")
    from sb3_extra_buffers.replay_buffers import CompressedStorage
    from tests.replay_buffers.trajectories import trajectory

    items = trajectory(n_items)
    ours = torchrl.ReplayBuffer(storage=CompressedStorage(500), batch_size=8)
    ours.extend(items)
    n_held = min(n_items, 500)
    usage = ours.storage.memory_usage()
    leaves = {key: items[:n_held].get(key) for key in items.keys(True, True)}
    assert (usage.transitions, usage.baseline) == (n_held, "TorchRL's LazyTensorStorage")
    assert usage.dense == sum(leaf.nbytes for leaf in leaves.values())
    large = [leaves["observation"], leaves["next", "observation"]]
    assert usage.dense_observations == sum(leaf.nbytes for leaf in large)
    everything, observations = printed_percents(usage)
    assert everything == pytest.approx(100 * usage.total / usage.dense, rel=0.02)
    assert observations == pytest.approx(100 * usage.observations / usage.dense_observations, rel=0.02)


# ---- against the resident set ----

GROWTH = (
    # pages of 4 KiB, rather than 2 MiB at a time
    "import os; os.environ['NUMPY_MADVISE_HUGEPAGE'] = '0'\n"
    + RESIDENT
    + """
import numpy as np
from gymnasium import spaces
from sb3_extra_buffers.compressed import CompressedReplayBuffer

rng = np.random.default_rng(0)

def observe(kind, obs):
    if kind == "vector":
        return rng.normal(size=(1, 2000)).astype(np.float32)
    new = obs[:, -1:].copy()
    if kind == "noise":
        return np.frombuffer(rng.bytes(4 * 84 * 84), np.uint8).reshape(1, 4, 84, 84)
    y, x = rng.integers(0, 64, 2)
    new[:, :, y : y + 20, x : x + 20] = rng.integers(0, 256, (20, 20))
    return np.concatenate([obs[:, 1:], new], axis=1)

def fill(kind, size, n_steps):
    space = spaces.Box(-1, 1, (2000,)) if kind == "vector" else spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = CompressedReplayBuffer(size, space, spaces.Discrete(4), "cpu")
    obs = observe(kind, np.zeros((1, *space.shape), space.dtype))
    for _ in range(n_steps):
        after = observe(kind, obs)
        buffer.add(obs, after, np.zeros((1, 1), np.int64), np.zeros(1), np.zeros(1), [{}])
        obs = after
    return buffer

for kind, n_steps in (("noise", 700), ("vector", 2000), ("game", 6000)):
    # everything once, so that kernels are loaded and contexts of codecs are allocated
    fill(kind, 20_000, n_steps)
    before = resident()
    buffer = fill(kind, 20_000, n_steps)
    print(resident() - before, buffer.memory_usage().total, buffer.memory_usage().ratio)
    del buffer
"""
)


@needs_proc
def test_a_partly_filled_buffer_agrees_with_the_resident_set() -> None:
    """Within 2 %, and half a megabyte for what Python itself took meanwhile."""
    lines = [[float(number) for number in line.split()] for line in run_fresh(GROWTH).splitlines()]
    assert all(abs(grown - total) < 0.02 * total + (1 << 19) for grown, total, _ in lines), lines
    # noise is kept as it is, but once, and so are vectors
    vectors = pytest.approx(0.5 if has_numba() else 1, rel=0.02)
    expected = [pytest.approx(0.5, rel=0.02), vectors, pytest.approx(0.02, abs=0.01)]
    assert [ratio for _, _, ratio in lines] == expected
