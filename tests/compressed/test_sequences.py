"""Windows of consecutive steps, compared with a plain list of transitions."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers._sb3.sequence_windows import check_request, plan_windows
from sb3_extra_buffers.compressed import CompressedDictSequenceReplayBuffer, CompressedSequenceReplayBuffer
from sb3_extra_buffers.errors import (
    ArgumentError,
    EmptyBufferError,
    FileFormatError,
    IndexOutOfRangeError,
    OutOfMemoryError,
    PriorityError,
    ReadOnlyBufferError,
    SpecMismatchError,
)
from sb3_extra_buffers.files import load, open_saved, save
from sb3_extra_buffers.files.parts import flatten, unflatten
from sb3_extra_buffers.files.registry import from_parts
from sb3_extra_buffers.gpu_buffers import GpuSequenceReplayBuffer
from tests.contracts.sequences import IMAGES, MIXED, SPACES, STATES, VECTORS, Model, drawn_steps
from tests.torture.interrupts import Injector

ACTIONS = spaces.Discrete(5)


def make(space: Any = IMAGES, size: int = 40, n_envs: int = 2, gpu: bool = False, **options: Any) -> Any:
    kind: Any = CompressedDictSequenceReplayBuffer if space is MIXED else CompressedSequenceReplayBuffer
    if gpu:
        kind = GpuSequenceReplayBuffer
    return kind(size * n_envs, space, ACTIONS, device="cpu", n_envs=n_envs, **options)


# ---- contents ----


@st.composite
def requests(draw: Any) -> dict[str, Any]:
    return {
        "length": draw(st.integers(1, 9)),
        "burn_in": draw(st.integers(0, 4)),
        "n_steps": draw(st.integers(1, 4)),
        "episode_end": draw(st.sampled_from(["stop", "pad", "continue"])),
    }


@pytest.mark.parametrize("kind", ["cpu", "gpu", "evicting", "optimized"])
@pytest.mark.parametrize("name", SPACES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_windows_equal_a_list_of_transitions(name: str, kind: str, data: Any) -> None:
    n_envs, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 25))
    options: dict[str, Any] = {"recurrent_states": STATES, "prioritized": data.draw(st.booleans())}
    if kind == "evicting":
        options |= {"max_bytes": data.draw(st.integers(4, 12)) * 6_000 * n_envs, "compression_method": "none"}
    elif kind == "optimized":
        options["optimize_memory_usage"] = True
    buffer = make(SPACES[name], size, n_envs, gpu=kind == "gpu", **options)
    model = Model(SPACES[name], n_envs, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1.5, 4.0, 30.0])))
    for count in data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)):
        model.add_to(buffer, count=count)
        request = data.draw(requests())
        how: dict[str, Any] = {"sample": data.draw(st.sampled_from([None, "steps", "episodes"]))}
        how["online"] = data.draw(st.booleans())
        batch = buffer.sample_sequences(7, **request, **how)
        model.check(batch, model.n_added - buffer.size(), **request)
        if data.draw(st.booleans()):
            buffer = pickle.loads(pickle.dumps(buffer))
    buffer.check()


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(0,), (4, 0, 7)])
def test_windows_of_observations_without_elements(shape: tuple[int, ...], gpu: bool) -> None:
    buffer = make(spaces.Box(0, 255, shape, np.uint8), size=20, gpu=gpu)
    obs = np.zeros((2, *shape), np.uint8)
    for step in range(30):
        buffer.add(obs, obs, np.zeros(2), np.full(2, step), np.full(2, step % 7 == 0), [{}, {}])
    for frames in ("stacked", "newest"):
        batch = buffer.sample_sequences(4, 5, frames=frames, n_steps=2, episode_end="continue")
        assert batch.observations.shape == batch.next_observations.shape == (4, 5, *shape)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(3,), (16, 20)])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_windows_of_wide_unsigned_integers(dtype: Any, shape: tuple[int, ...], gpu: bool) -> None:
    """torch lacks most operations in these dtypes, which depth cameras use."""
    kind: Any = GpuSequenceReplayBuffer if gpu else CompressedSequenceReplayBuffer
    rng, stored = np.random.default_rng(0), (dtype, np.int64)
    boxes = [(spaces.Box(0, 60_000, shape, each), spaces.Box(0, 60_000, (2,), each)) for each in stored]
    buffers = [kind(60, *both, device="cpu", n_envs=2) for both in boxes]
    obs = rng.integers(0, 60_000, (2, *shape))
    for _ in range(50):
        following, action = rng.integers(0, 60_000, (2, *shape)), rng.integers(0, 60_000, (2, 2))
        done = rng.random(2) < 0.2
        for buffer, each in zip(buffers, stored, strict=True):
            arrays = obs.astype(each), following.astype(each), action.astype(each)
            buffer.add(*arrays, np.zeros(2), done, [{}, {}])
        obs = np.where(done.reshape(2, *[1] * len(shape)), rng.integers(0, 60_000, following.shape), following)
    for episode_end, n_steps in itertools.product(("stop", "pad", "continue"), (1, 3)):
        batches = []
        for buffer in buffers:
            np.random.seed(n_steps)  # noqa: NPY002  # the generator that SB3 draws from
            batches.append(buffer.sample_sequences(20, 6, n_steps=n_steps, episode_end=episode_end))
        unsigned, signed = batches
        for name in ("observations", "next_observations", "actions"):
            assert getattr(unsigned, name).dtype == getattr(th, np.dtype(dtype).name)
            np.testing.assert_array_equal(getattr(unsigned, name).numpy(), getattr(signed, name).numpy())


@pytest.mark.parametrize("name", SPACES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_compiled_windows_are_those_of_the_plan(name: str, data: Any) -> None:
    pytest.importorskip("numba")
    n_envs, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 25))
    buffer = make(SPACES[name], size, n_envs)
    model = Model(SPACES[name], n_envs, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1.5, 4.0, 30.0])))
    model.add_to(buffer, count=data.draw(st.integers(1, 40)))
    asked, held = data.draw(requests()), buffer._held()
    length, burn_in, n_steps, episode_end = (asked[key] for key in ("length", "burn_in", "n_steps", "episode_end"))
    request = check_request(7, length, burn_in, n_steps, episode_end, False, "steps", "stacked", False, 0.9)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    numbers, envs = random.integers(held.oldest, held.n_added, 7), random.integers(0, n_envs, 7)
    planned = plan_windows(request, numbers, envs, buffer._index, held)
    read = buffer._plan_windows(request, numbers, envs, held)
    assert read.is_whole == planned.is_whole
    for field in ("mask", "learn_mask", "is_first", "discounts", "steps"):
        np.testing.assert_array_equal(getattr(read, field), getattr(planned, field), err_msg=field)
    if n_steps > 1 and not planned.is_whole:
        np.testing.assert_array_equal(read.n_ahead, planned.n_ahead)
    resets = [sorted(zip(*map(np.ndarray.tolist, each.resets or ()), strict=True)) for each in (read, planned)]
    assert resets[0] == resets[1]
    for key in buffer._views.by_key:
        if key in read.gathered.observations:
            expected = buffer._read_key(key, planned.rows, newest_only=False)
            np.testing.assert_array_equal(read.gathered.observations[key], expected)
        else:
            np.testing.assert_array_equal(read.rows, planned.rows)
    is_padding = ~planned.mask if n_steps == 1 else np.zeros(planned.columns.shape, np.bool_)
    expected_columns = [column.numpy() for column in buffer._read_columns(planned.columns, None)]
    for found, column in zip(read.gathered[1:], expected_columns, strict=True):
        column[is_padding] = 0
        np.testing.assert_array_equal(found, column)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("episode_end", ["stop", "pad", "continue"])
def test_windows_are_drawn_as_with_numpy(episode_end: Any, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    randint = np.random.randint
    drawn = []
    for is_replaced in (False, True):
        buffer, model = make(VECTORS, 40), Model(VECTORS, 2, episode=6.0)
        set_random_seed(5)
        if is_replaced:  # then no compiled code draws
            monkeypatch.setattr(np.random, "randint", lambda *args, **kwargs: randint(*args, **kwargs))
        for count in (3, 20, 30, 50):
            model.add_to(buffer, count=count)
            for length in (1, 2, 3):
                batch = buffer.sample_sequences(50, length, episode_end=episode_end, strict_length=strict)
                drawn.append((is_replaced, batch.steps.tolist(), batch.envs.tolist(), np.random.randint(1 << 30)))  # noqa: NPY002  # the generator of SB3
    half = len(drawn) // 2
    assert [each[1:] for each in drawn[:half]] == [each[1:] for each in drawn[half:]]


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("method", ["auto", "delta", "none", "rle"])
def test_the_newest_frames_of_stacks(method: str, gpu: bool) -> None:
    buffer, model = make(MIXED, 60, gpu=gpu, compression_method=method), Model(MIXED, 2)
    model.add_to(buffer, count=80)
    batch = buffer.sample_sequences(9, 7, 2, 2, frames="newest")
    assert batch.observations["image"].shape == (9, 9, 1, 12, 10)
    model.check(batch, model.n_added - buffer.size(), 7, 2, burn_in=2, newest=True)


def test_the_newest_frames_before_a_method_is_chosen() -> None:
    for gpu in (False, True):
        buffer, model = make(MIXED, 4000, gpu=gpu), Model(MIXED, 2)
        model.add_to(buffer, count=6)
        batch = buffer.sample_sequences(3, 4, frames="newest")
        assert batch.observations["image"].shape == (3, 4, 1, 12, 10)
        model.check(batch, 0, 4, newest=True)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(1, 12, 20), (12, 12), (20, 12, 3)])
def test_an_image_that_scrolls_is_not_a_stack(shape: tuple[int, ...], gpu: bool) -> None:
    """Columns, or rows, move on as the frames of a stack do."""
    axis = 0 if shape[-1] == 3 else len(shape) - 1
    width = shape[axis]
    panorama = np.random.default_rng(0).integers(0, 256, (*shape[:axis], 400, *shape[axis + 1 :]), np.uint8)
    buffer = make(spaces.Box(0, 255, shape, np.uint8), 80, 1, gpu, compression_method="delta")
    images = [panorama.take(range(2 * t, 2 * t + width), axis)[None] for t in range(81)]
    for obs, next_obs in itertools.pairwise(images):
        buffer.add(obs, next_obs, np.array([0]), np.ones(1), np.zeros(1), [{}])
    batch = buffer.sample_sequences(5, 4, frames="newest")
    for row, steps in zip(batch.observations.numpy(), batch.steps, strict=True):
        np.testing.assert_array_equal(row, np.concatenate([images[step] for step in steps]))


def test_next_observations_share_the_memory_of_observations() -> None:
    buffer, model = make(), Model(IMAGES, 2)
    model.add_to(buffer, count=60)
    for how in ({}, {"episode_end": "pad"}, {"n_steps": 3}):
        batch = buffer.sample_sequences(8, 6, **how)
        assert batch.next_observations.untyped_storage().data_ptr() == batch.observations.untyped_storage().data_ptr()


def test_n_step_returns_are_those_of_sb3(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make(VECTORS, gamma=0.9)
    theirs = NStepReplayBuffer(80, VECTORS, ACTIONS, device="cpu", n_envs=2, n_steps=4, gamma=0.9)
    Model(VECTORS, 2).add_to(ours, theirs, count=70)
    batch = ours.sample_sequences(50, 1, n_steps=4, episode_end="pad")
    # SB3 draws environments itself
    monkeypatch.setattr(np.random, "randint", lambda *args, **kwargs: batch.envs)
    wanted = theirs._get_samples(batch.steps[:, 0] % 40)
    for name in wanted._fields:
        given_part = getattr(batch, name)[:, 0]
        assert th.equal(given_part.reshape(getattr(wanted, name).shape), getattr(wanted, name)), name


@pytest.mark.parametrize("name", SPACES)
def test_plain_samples_stay_sb3s(name: str) -> None:
    ours = make(SPACES[name], recurrent_states=STATES, prioritized=True)
    kind: Any = DictReplayBuffer if name == "dict" else ReplayBuffer
    theirs = kind(80, SPACES[name], ACTIONS, device="cpu", n_envs=2)
    Model(SPACES[name], 2).add_to(ours, theirs, count=55)
    for seed in range(3):
        batches = []
        for buffer in (ours, theirs):
            np.random.seed(seed)  # noqa: NPY002  # SB3 draws from this generator
            batches.append(buffer.sample(16))
        for mine, other in zip(*batches, strict=True):
            for key in other if isinstance(other, dict) else [None]:
                assert other is None or th.equal(mine[key] if key else mine, other[key] if key else other)


def test_observations_are_normalised_and_converted() -> None:
    buffer = make(IMAGES, normalize_images=True)
    model = Model(IMAGES, 2)
    model.add_to(buffer, count=50)
    batch = buffer.sample_sequences(4, 5)
    assert batch.observations.dtype == th.float32
    assert 0.9 < batch.observations.max() <= 1
    env = VecNormalize(DummyVecEnv([lambda: _VectorEnv()]))
    env.reset()
    for _ in range(20):
        env.step(np.zeros((1,), np.int64))
    buffer = make(VECTORS, n_envs=1)
    Model(VECTORS, 1).add_to(buffer, count=50)
    for seed in range(2):
        np.random.seed(seed)  # noqa: NPY002  # windows are drawn from this generator
        plain = buffer.sample_sequences(4, 5, n_steps=1)
        np.random.seed(seed)  # noqa: NPY002  # windows are drawn from this generator
        batch = buffer.sample_sequences(4, 5, n_steps=1, env=env)
        wanted: Any = env.normalize_obs(plain.observations.numpy().reshape(-1, 3))
        np.testing.assert_allclose(batch.observations, wanted.reshape(4, 5, 3), rtol=1e-6)
        rewards = np.where(plain.mask, env.normalize_reward(plain.rewards.numpy()), 0)
        np.testing.assert_allclose(batch.rewards, rewards, rtol=1e-6)


class _VectorEnv(gym.Env[Any, Any]):
    observation_space, action_space = VECTORS, ACTIONS

    def reset(self, **_: Any) -> Any:
        return np.ones(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.random.default_rng(0).normal(size=3).astype(np.float32), 1.0, False, False, {}


# ---- which windows ----


@pytest.mark.same_without_extras
@pytest.mark.parametrize("options", [{}, {"prioritized": True}], ids=["", "prioritized"])
@pytest.mark.parametrize("sample", [None, "episodes"])
@pytest.mark.parametrize("episode_end", ["stop", "pad", "continue"])
@pytest.mark.parametrize("count", [3, 25, 90])
def test_every_stored_step_is_reachable(episode_end: Any, sample: Any, options: Any, count: int) -> None:
    buffer, model = make(VECTORS, 30, **options), Model(VECTORS, 2, seed=count)
    model.add_to(buffer, count=count)
    found = set()
    np.random.seed(0)  # noqa: NPY002  # windows are drawn from this generator
    for _ in range(8):
        batch = buffer.sample_sequences(300, 5, episode_end=episode_end, sample=sample)
        found |= drawn_steps(batch)
    assert found == set(model.held(buffer))


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("episode_end", ["stop", "pad", "continue"])
def test_evicted_steps_are_never_drawn(episode_end: Any, prioritized: bool, tmp_path: Path) -> None:
    buffer = make(size=200, max_bytes=60_000, compression_method="delta", prioritized=prioritized)
    model = Model(IMAGES, 2, noise=True)
    np.random.seed(0)  # noqa: NPY002  # windows are drawn from this generator
    for _ in range(4):
        model.add_to(buffer, count=60)
        found = set()
        for _ in range(4):
            batch = buffer.sample_sequences(300, 5, episode_end=episode_end)
            found |= drawn_steps(batch)
        assert buffer.n_evicted > 0
        assert found == set(model.held(buffer))
        model.check(batch, model.n_added - buffer.size(), 5, episode_end=episode_end)
        buffer.check()
        save(buffer, tmp_path / "saved")
        buffer = load(tmp_path / "saved")


def test_the_newest_step_is_in_the_next_batches() -> None:
    buffer, model = make(VECTORS, 30), Model(VECTORS, 2, episode=1e9)
    for _ in range(50):
        model.add_to(buffer)
        batch = buffer.sample_sequences(200, 4)
        assert (batch.steps.max(axis=1) == model.n_added - 1).any()


@pytest.mark.same_without_extras
def test_a_step_that_sb3_marks_as_done_ends_its_episode() -> None:
    # `learn` does so before it resets the environments, if optimize_memory_usage is set
    buffer, obs = make(VECTORS, 10, 1, optimize_memory_usage=True), np.zeros((1, 3), np.float32)
    for step in range(23):
        buffer.add(obs, obs, np.array([0]), np.ones(1), np.zeros(1, bool), [{}])
        if step in (15, 19):
            buffer.dones[buffer.pos - 1] = True
    steps = {tuple(row) for row in buffer.sample_sequences(200, 4, sample="episodes").steps.tolist()}
    assert steps == {(13, 14, 15, -1), (16, 17, 18, 19), (20, 21, 22, -1)}


def test_strict_length_leaves_short_episodes_out() -> None:
    buffer, model = make(VECTORS, 60), Model(VECTORS, 2, episode=5.0)
    model.add_to(buffer, count=90)
    for episode_end in ("stop", "pad", "continue"):
        batch = buffer.sample_sequences(300, 7, episode_end=episode_end, strict_length=True)
        assert batch.mask.all()
        model.check(batch, 30, 7, episode_end=episode_end)
    with pytest.raises(EmptyBufferError, match="none of the episodes in the 60 steps of the buffer has 61 steps"):
        buffer.sample_sequences(1, 61, strict_length=True)


def test_stop_pads_only_what_is_shorter_than_a_window() -> None:
    buffer, model = make(VECTORS, 60), Model(VECTORS, 2, episode=5.0)
    model.add_to(buffer, count=50)
    batch = buffer.sample_sequences(300, 6)
    for row in np.flatnonzero(~batch.mask.all(axis=1).numpy()):
        # the whole episode, as far as it is held
        assert batch.is_first[row, 0]
    padded = buffer.sample_sequences(300, 6, episode_end="pad")
    assert (~padded.is_first[:, 0] & ~padded.mask[:, -1]).any()


@pytest.mark.same_without_extras
def test_all_windows_or_all_episodes_are_equally_likely() -> None:
    buffer = make(VECTORS, 100, n_envs=1)
    obs = np.zeros((1, 3), np.float32)
    ends = {9, 14, 54}  # episodes of 10, 5 and 40 steps
    for step in range(55):
        buffer.add(obs, obs, np.zeros(1), np.zeros(1), np.array([step in ends]), [{}])
    np.random.seed(0)  # noqa: NPY002  # windows are drawn from this generator
    firsts = np.concatenate([buffer.sample_sequences(1000, 4).steps[:, 0] for _ in range(20)])
    counts = np.bincount(firsts, minlength=55)
    windows = {*range(7), 10, 11, *range(15, 52)}
    assert set(np.flatnonzero(counts)) == windows
    expected = len(firsts) / len(windows)
    assert np.abs(counts[sorted(windows)] - expected).max() < 5 * np.sqrt(expected)
    firsts = np.concatenate([buffer.sample_sequences(1000, 4, sample="episodes").steps[:, 0] for _ in range(20)])
    per_episode = np.array([(firsts < 10).sum(), ((firsts >= 10) & (firsts < 15)).sum(), (firsts >= 15).sum()])
    assert np.abs(per_episode - len(firsts) / 3).max() < 5 * np.sqrt(len(firsts) / 3)


@pytest.mark.same_without_extras
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    length=st.integers(1, 6),
    episode_end=st.sampled_from(["stop", "pad", "continue"]),
)
def test_online_windows_contain_each_new_step_once_it_is_complete(
    seed: int, counts: list[int], length: int, episode_end: Any
) -> None:
    buffer, model = make(VECTORS, 200), Model(VECTORS, 2, seed, episode=6.0)
    found: set[tuple[int, int]] = set()
    for count in counts:
        model.add_to(buffer, count=count)
        # more than there can be
        batch = buffer.sample_sequences(200, length, episode_end=episode_end, online=True)
        model.check(batch, 0, length, episode_end=episode_end)
        for env, steps in enumerate(model.lists):
            last_end = max((n for n, step in enumerate(steps) if step.done), default=-1)
            n_complete = last_end + 1 if episode_end != "continue" else 0
            n_complete += (len(steps) - n_complete) // length * length
            firsts = drawn_steps(batch)
            assert {(n, env) for n in range(n_complete)} - found <= firsts
        found |= drawn_steps(batch)


def test_online_windows_come_first_and_once() -> None:
    buffer, model = make(VECTORS, 60, n_envs=1), Model(VECTORS, 1, episode=1e9)
    model.add_to(buffer, count=12)
    batch = buffer.sample_sequences(2, 4, online=True)
    assert batch.steps[:, 0].tolist() == [0, 4]
    model.add_to(buffer, count=5)
    batch = buffer.sample_sequences(4, 4, online=True)
    assert batch.steps[:2, 0].tolist() == [8, 12]
    again = copy.deepcopy(buffer)
    for each in (buffer, again):
        model.add_to(each, count=3)
    assert again.sample_sequences(3, 4, online=True).steps[0, 0] == 16


# ---- recurrent states ----


def test_states_come_from_infos_too() -> None:
    buffer = make(VECTORS, recurrent_states={"h": 2}, recurrent_dtype=np.float16)
    obs = np.zeros((2, 3), np.float32)
    for step in range(9):
        infos = [{"recurrent_state": {"h": th.tensor([step, env])}} for env in range(2)]
        buffer.add(obs, obs, np.zeros(2), np.zeros(2), np.zeros(2), infos)
    batch = buffer.sample_sequences(30, 3)
    assert batch.recurrent_states["h"].dtype == th.float16
    assert batch.recurrent_states["h"].tolist() == [
        [n, env] for n, env in zip(batch.steps[:, 0], batch.envs, strict=True)
    ]


def test_wrong_states_change_nothing() -> None:
    buffer, model = make(VECTORS, recurrent_states=STATES), Model(VECTORS, 2)
    model.add_to(buffer, count=5)
    obs = np.zeros((2, 3), np.float32)
    good = {name: np.zeros((2, *shape)) for name, shape in STATES.items()}
    step: Any = obs, obs, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}]
    for bad, message in (
        (None, "stores the recurrent states h, c"),
        ({"h": good["h"]}, "the states of this buffer are 'h', 'c'"),
        (good | {"x": 1}, "the states of this buffer are 'h', 'c'"),
        (good | {"h": np.zeros((2, 4))}, r"has shape \(2, 4\), expected \(2, 3\)"),
        (good | {"h": np.full((2, 3), "a")}, "dtype"),
        (good | {"h": np.full((2, 3), 1e300)}, "cannot hold"),
    ):
        with pytest.raises(SpecMismatchError, match=message):
            buffer.add(*step, recurrent_state=bad)
    with pytest.raises(SpecMismatchError, match="pass recurrent_state= to add"):
        buffer.add(*step[:5], [{"recurrent_state": np.zeros(3)}] * 2)
    assert buffer.size() == 5
    model.check(buffer.sample_sequences(9, 3), 0, 3)
    with pytest.raises(SpecMismatchError, match="pass recurrent_states to the constructor"):
        make(VECTORS).add(*step, recurrent_state=good)


def test_states_are_written_back_unless_the_step_is_gone() -> None:
    buffer, model = make(VECTORS, 20, recurrent_states={"h": 2}), Numbers()
    model.add_to(buffer, 20)
    batch = buffer.sample_sequences(30, 4, burn_in=2, episode_end="pad")
    model.add_to(buffer, 7)
    states = th.from_numpy(np.stack([batch.steps, batch.steps + 0.5], axis=-1).astype(np.float32)) + 1000
    written = buffer.update_recurrent_states(batch, {"h": states})
    np.testing.assert_array_equal(written, batch.steps >= 7)
    assert not written.all()
    assert written.any()
    seen = buffer.sample_sequences(500, 1)
    expected = {(n, env): n + 1000 for n, env in drawn_steps(batch) if n >= 7}
    for n, env, state in zip(seen.steps[:, 0], seen.envs, seen.recurrent_states["h"].tolist(), strict=True):
        first = expected.get((n, env), n)
        assert state == [first, first + 0.5 if (n, env) in expected else n]
    # one state for each window
    batch = buffer.sample_sequences(5, 4, burn_in=2, episode_end="continue")
    assert buffer.update_recurrent_states(batch, {"h": th.full((5, 2), -1.0)}, offset=2).tolist() == [True] * 5
    seen = buffer.sample_sequences(500, 1)
    changed = {(int(n), int(env)) for n, env in zip(batch.steps[:, 2], batch.envs, strict=True)}
    for n, env, state in zip(seen.steps[:, 0], seen.envs, seen.recurrent_states["h"].tolist(), strict=True):
        assert (state == [-1, -1]) == ((n, env) in changed)


class Numbers:
    """Steps whose states are their number."""

    def __init__(self, states: dict[str, int] | None = None) -> None:
        self.count, self.states = 0, states or {"h": 2}

    def add_to(self, buffer: Any, count: int) -> None:
        obs = np.zeros((2, 3), np.float32)
        for _ in range(count):
            state = {name: np.full((2, size), self.count, np.float32) for name, size in self.states.items()}
            done = np.full(2, self.count % 9 == 8)
            buffer.add(obs, obs, np.zeros(2), np.zeros(2), done, [{}, {}], recurrent_state=state)
            self.count += 1


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_an_interrupt_leaves_the_old_states_or_the_new_ones(gpu: bool) -> None:
    buffer = make(VECTORS, 20, recurrent_states={"h": 2, "c": 3}, gpu=gpu)
    Numbers({"h": 2, "c": 3}).add_to(buffer, 20)
    batch = buffer.sample_sequences(9, 4, strict_length=True)
    outcomes = set()
    with Injector() as counter:
        buffer.update_recurrent_states(batch, {"h": np.zeros((9, 4, 2)), "c": np.zeros((9, 4, 3))})
    # the states are written at the end
    interrupts = [*range(1, counter.count, 41), *range(counter.count - 40, counter.count)]
    for turn, at in enumerate(interrupts, 1):
        value = turn * 100.0
        before = {name: part.copy() for name, part in buffer.sequence_columns().items()}
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()):
            buffer.update_recurrent_states(batch, {"h": np.full((9, 4, 2), value), "c": np.full((9, 4, 3), value)})
        buffer.sample(1)  # any use recovers
        changed = [
            (buffer.sequence_columns()[f"states/{name}"] != before[f"states/{name}"]).any(axis=2) for name in "hc"
        ]
        np.testing.assert_array_equal(*changed)
        expected = np.zeros((20, 2), np.bool_)
        expected[batch.steps % 20, batch.envs[:, None]] = changed[0].any()
        np.testing.assert_array_equal(changed[0], expected)
        outcomes.add(bool(changed[0].any()))
    assert outcomes == {False, True}


def test_mistakes_in_states_that_are_written_back() -> None:
    buffer = make(VECTORS, 20, recurrent_states={"h": 2})
    Numbers().add_to(buffer, 20)
    batch = buffer.sample_sequences(3, 4)
    for states, offset in (
        ({"h": np.zeros((3, 5, 2))}, 0),
        ({"h": np.zeros((3, 4, 2))}, 1),
        ({"h": np.zeros((3, 2))}, 4),
    ):
        with pytest.raises(SpecMismatchError, match="the windows have 4 steps"):
            buffer.update_recurrent_states(batch, states, offset)
    with pytest.raises(SpecMismatchError, match="expected"):
        buffer.update_recurrent_states(batch, {"h": np.zeros((2, 2))})
    with pytest.raises(SpecMismatchError, match="the states of this buffer"):
        buffer.update_recurrent_states(batch, {"x": np.zeros((3, 2))})
    with pytest.raises(SpecMismatchError, match="pass recurrent_states"):
        make(VECTORS).update_recurrent_states(batch, {"h": np.zeros((3, 2))})


# ---- priorities ----


def test_windows_are_drawn_by_the_mix_of_their_td_errors() -> None:
    buffer = make(VECTORS, 40, n_envs=1, prioritized=True, alpha=1.0, beta=0.5, eta=0.75, epsilon=1e-9)
    model = Model(VECTORS, 1, episode=1e9)
    model.add_to(buffer, count=40)
    batch = buffer.sample_sequences(400, 4, burn_in=2, strict_length=True)
    assert set(batch.steps[:, 0]) == set(range(35))
    assert (batch.weights == 1).all()
    errors = np.zeros((400, 4))
    errors[batch.steps[:, 0] == 7] = [4, 0, 0, 0]  # 0.75 * 4 + 0.25 * 1
    errors[batch.steps[:, 0] == 20] = 1
    assert buffer.update_priorities(batch, errors).all()
    batch = buffer.sample_sequences(4000, 4, burn_in=2)
    firsts = batch.steps[:, 0]
    share = (firsts == 7).sum() / ((firsts == 7) | (firsts == 20)).sum()
    assert set(firsts) <= {7, 20}
    assert abs(share - 3.25 / 4.25) < 0.05
    weights = {first: float(batch.weights[firsts == first][0]) for first in (7, 20)}
    assert weights[20] / weights[7] == pytest.approx(3.25**0.5)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_td_errors_of_burn_in_and_padding_do_not_count(burn_in: int) -> None:
    buffer, model = make(VECTORS, 60, prioritized=True), Model(VECTORS, 2, episode=4.0)
    model.add_to(buffer, count=60)
    batch = buffer.sample_sequences(20, 6, burn_in=burn_in, episode_end="pad")
    errors = th.where(batch.learn_mask, 1.0, th.nan)
    for first in (0, burn_in):
        written = buffer.update_priorities(batch, errors[:, first:])
        np.testing.assert_array_equal(written, batch.learn_mask[:, first:].any(dim=1).numpy())
    buffer.check()


def test_overwritten_windows_keep_no_priority() -> None:
    buffer, model = make(VECTORS, 20, prioritized=True), Model(VECTORS, 2)
    model.add_to(buffer, count=20)
    batch = buffer.sample_sequences(50, 3, episode_end="pad")
    model.add_to(buffer, count=9)
    np.testing.assert_array_equal(buffer.update_priorities(batch, np.ones((50, 3))), batch.steps[:, 0] >= 9)
    np.testing.assert_array_equal(buffer.holds(batch), batch.steps >= 9)
    buffer.check()
    for bad in (np.ones(50), np.ones((50, 4)), np.ones((49, 3)), -np.ones((50, 3)), np.full((50, 3), np.nan), "x"):
        with pytest.raises(PriorityError):
            buffer.update_priorities(batch, bad)
    with pytest.raises(PriorityError, match="prioritized=True"):
        make(VECTORS).update_priorities(batch, np.ones((50, 3)))


def test_priorities_where_few_windows_fit() -> None:
    buffer = make(VECTORS, 200, n_envs=1, prioritized=True)
    obs = np.zeros((1, 3), np.float32)
    for step in range(200):
        # one long episode among short ones
        buffer.add(obs, obs, np.zeros(1), np.zeros(1), np.array([step % 2 == 0 and not 100 < step < 120]), [{}])
    batch = buffer.sample_sequences(64, 18, strict_length=True)
    assert set(batch.steps[:, 0]) <= {101, 102, 103, 104}


# ---- threads ----


@pytest.mark.parametrize(
    "options", [{}, {"prioritized": True}, {"max_bytes": 40_000}], ids=["", "prioritized", "evict"]
)
def test_windows_beside_a_writer_are_whole(options: dict[str, Any]) -> None:
    # a short ring: drawn steps are often overwritten while they are read
    buffer, model = make(IMAGES, 12, recurrent_states=STATES, **options), Model(IMAGES, 2)
    model.add_to(buffer, count=20)
    stop, errors, batches = threading.Event(), [], []

    def sample() -> None:
        try:
            while not stop.is_set():
                batches.append(buffer.sample_sequences(4, 3, 1, online=True))
        except BaseException as error:
            errors.append(error)
            stop.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        readers = [threading.Thread(target=sample) for _ in range(2)]
        for reader in readers:
            reader.start()
        for _ in range(60):
            model.add_to(buffer)
        while not stop.is_set() and len(batches) < 20:
            model.add_to(buffer)
        stop.set()
        for reader in readers:
            reader.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    for batch in batches:
        for row, env in enumerate(batch.envs):
            for t in np.flatnonzero(batch.mask[row]):
                here = model.lists[env][batch.steps[row, t]]
                np.testing.assert_array_equal(batch.observations[row, t], here.obs["image"])
                np.testing.assert_array_equal(batch.next_observations[row, t], here.next_obs["image"])
                assert float(batch.rewards[row, t]) == here.reward
            np.testing.assert_array_equal(
                batch.recurrent_states["h"][row], model.lists[env][batch.steps[row, 0]].state["h"]
            )


# ---- files ----


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize(
    "options", [{}, {"prioritized": True}, {"max_bytes": 70_000}], ids=["", "prioritized", "evict"]
)
def test_saved_buffers_sample_the_same_windows(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    buffer, model = make(SPACES[name], recurrent_states=STATES, **options), Model(SPACES[name], 2)
    model.add_to(buffer, count=60)
    buffer.sample_sequences(3, 5, online=True)
    if options.get("prioritized"):
        batch = buffer.sample_sequences(9, 5)
        buffer.update_priorities(batch, np.random.default_rng(0).random((9, 5)))
    save(buffer, tmp_path / "saved")
    opened = open_saved(tmp_path / "saved")
    for each in (load(tmp_path / "saved"), opened):
        hows: list[dict[str, Any]] = [{}, {"online": True}, {"sample": "episodes", "episode_end": "continue"}]
        for how in hows:
            batches = []
            for other in (copy.deepcopy(buffer), copy.deepcopy(each)):
                np.random.seed(3)  # noqa: NPY002  # windows are drawn from this generator
                batches.append(other.sample_sequences(6, 4, 1, 2, **how))
            model.check(batches[1], model.n_added - buffer.size(), 4, 2, how.get("episode_end", "stop"), burn_in=1)
            np.testing.assert_array_equal(batches[0].steps, batches[1].steps)
            np.testing.assert_array_equal(batches[0].weights, batches[1].weights)
    with pytest.raises(ReadOnlyBufferError):
        opened.update_recurrent_states(batches[0], batches[0].recurrent_states)
    loaded = load(tmp_path / "saved")
    model.add_to(loaded, count=15)
    loaded.check()
    model.check(loaded.sample_sequences(9, 5), model.n_added - loaded.size(), 5)
    save(loaded, tmp_path / "saved")
    model.check(load(tmp_path / "saved").sample_sequences(9, 5), model.n_added - loaded.size(), 5)


@pytest.mark.parametrize("name", SPACES)
def test_every_step_of_a_live_folder_has_its_state(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"recurrent_states": STATES, "storage": "mmap", "path": tmp_path / "live"}
    buffer, model = make(SPACES[name], **options), Model(SPACES[name], 2)
    model.add_to(buffer, count=50)
    # as after a kill: the journal is replayed
    model.check(load(tmp_path / "live").sample_sequences(20, 5), 10, 5)
    model.add_to(buffer, count=3)
    model.check(load(tmp_path / "live").sample_sequences(20, 5), 13, 5)


def test_steps_from_before_a_reset_are_gone() -> None:
    buffer, model = make(VECTORS, 20, prioritized=True, recurrent_states=STATES), Model(VECTORS, 2)
    model.add_to(buffer, count=33)
    batch = buffer.sample_sequences(5, 3)
    buffer.reset()
    assert not buffer.holds(batch).any()
    with pytest.raises(EmptyBufferError):
        buffer.sample_sequences(1, 1)
    model.add_to(buffer, count=4)
    assert not buffer.holds(batch).any()
    assert not buffer.update_priorities(batch, np.ones((5, 3))).any()
    buffer.check()
    after = buffer.sample_sequences(9, 2, online=True)
    assert (after.steps[after.steps >= 0] >= 33).all()


@pytest.mark.parametrize("name", ["vectors", "images"])
def test_a_reset_of_a_live_folder_survives_the_process(name: str, tmp_path: Path) -> None:
    buffer = make(SPACES[name], 20, storage="mmap", path=tmp_path / "live")
    Model(SPACES[name], 2).add_to(buffer, count=27)
    buffer.reset()
    assert load(shutil.copytree(tmp_path / "live", tmp_path / "killed at once")).size() == 0
    model = Model(SPACES[name], 2, seed=1)
    model.add_to(buffer, count=7)
    found = load(shutil.copytree(tmp_path / "live", tmp_path / "killed later"))
    assert (found.size(), found.n_added) == (7, buffer.n_added)
    batch = found.sample_sequences(20, 3, episode_end="pad")
    model.check(batch._replace(steps=np.where(batch.steps >= 0, batch.steps - (buffer.n_added - 7), -1)), 0, 3)


def test_forged_priorities_are_refused() -> None:
    buffer = make(VECTORS, 20, prioritized=True)
    Model(VECTORS, 2).add_to(buffer, count=27)
    described, arrays = flatten(buffer.to_parts())
    name = "columns/priorities"
    for value in (np.nan, -1.0, 1e308):
        priorities = arrays[name].copy()
        priorities[3, 1] = value
        with pytest.raises(FileFormatError, match="priority"):
            from_parts(unflatten(described, arrays | {name: priorities}))
    description = described["description"]
    for value in (0, -1, 1e308):
        state = description["state"] | {"max_priority": value}
        with pytest.raises(FileFormatError, match="max_priority"):
            from_parts(unflatten(described | {"description": description | {"state": state}}, arrays))
    from_parts(unflatten(described, arrays)).check()


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_an_interrupted_reset_is_complete_or_has_not_begun(gpu: bool) -> None:
    outcomes = set()
    for at in range(1, 3000, 7):
        buffer = make(VECTORS, 20, gpu=gpu, prioritized=True)
        Model(VECTORS, 2).add_to(buffer, count=27)
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()) as injector:
            buffer.reset()
        buffer.check()  # recovers first, as any use does
        n_held = buffer.size()
        outcomes.add(n_held)
        assert n_held in (0, 20)
        model = Model(VECTORS, 2, seed=1)
        model.add_to(buffer, count=5)
        assert buffer.size() == (20 if n_held else 5)
        if not n_held:
            batch = buffer.sample_sequences(8, 3)
            model.check(batch._replace(steps=np.where(batch.steps >= 0, batch.steps - (buffer.n_added - 5), -1)), 0, 3)
        if injector.count < at:
            break
    assert outcomes == {0, 20}


def test_an_empty_buffer_and_wrong_arguments() -> None:
    buffer = make(VECTORS)
    with pytest.raises(EmptyBufferError, match="the buffer is empty"):
        buffer.sample_sequences(1, 1)
    Model(VECTORS, 2).add_to(buffer, count=9)
    wrong: dict[str, Any]
    for wrong in (
        {"batch_size": 0}, {"length": 0}, {"burn_in": -1}, {"n_steps": 0}, {"episode_end": "wrap"}, {"sample": "x"},
        {"sample": "priority"}, {"frames": "all"}, {"length": 2.5}, {"gamma": "high"}, {"gamma": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            buffer.sample_sequences(**({"batch_size": 2, "length": 2} | wrong))
    for wrong in (
        {"recurrent_states": [3]}, {"recurrent_states": {"h": 0}}, {"recurrent_states": {"h": 1 << 40}},
        {"recurrent_dtype": "int8"}, {"recurrent_dtype": {"h": 2}}, {"eta": 2}, {"eta": None},
        {"alpha": 2}, {"alpha": "x"}, {"epsilon": 0}, {"beta": -1}, {"beta": "x"}, {"beta": (0, 1, 2)},
        {"beta": (0, "x")}, {"output_dtype": "x"}, {"on_max_bytes": "x"}, {"storage": "disk"},
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            make(VECTORS, **wrong)


@pytest.mark.parametrize("size", [(1 << 17, 1 << 47), (1 << 20, 1 << 30, 0, 1 << 40), (1 << 47, 1)])
def test_windows_for_which_there_is_no_memory(size: tuple[int, ...]) -> None:
    buffer = make(VECTORS)
    Model(VECTORS, 2).add_to(buffer, count=9)
    with pytest.raises(OutOfMemoryError, match=f"not enough memory for {size[0]} windows"):
        buffer.sample_sequences(*size)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("assigned", [{"pos": 3}, {"full": True}])
def test_a_position_that_was_assigned_is_named(assigned: dict[str, Any], gpu: bool) -> None:
    """SB3's buffers allow it, but steps after it would be mixed with those before."""
    buffer, model = make(VECTORS, 20, gpu=gpu), Model(VECTORS, 2)
    model.add_to(buffer, count=9)
    for name, value in assigned.items():
        setattr(buffer, name, value)
    buffer.sample(4)
    with pytest.raises(IndexOutOfRangeError, match="were assigned"):
        buffer.sample_sequences(4, 2)
    buffer.reset()
    model.add_to(buffer, count=5)
    assert buffer.sample_sequences(4, 2).mask[:, 0].all()


def test_an_interrupted_sample_loses_no_online_window() -> None:
    buffer = make(VECTORS, 100, n_envs=1)
    Model(VECTORS, 1).add_to(buffer, count=100)
    with Injector() as counter:
        buffer.sample_sequences(2, 5, online=True)
    n_interrupted = 0
    for at in range(1, counter.count, 67):
        buffer = make(VECTORS, 100, n_envs=1)
        Model(VECTORS, 1).add_to(buffer, count=100)
        try:
            with Injector(at, KeyboardInterrupt()):
                buffer.sample_sequences(2, 5, online=True)
        except KeyboardInterrupt:
            n_interrupted += 1
            assert buffer.sample_sequences(2, 5, online=True).steps[0, 0] == 0
    assert n_interrupted > 10


def test_windows_after_an_interrupt_are_those_that_are_asked_for() -> None:
    buffer = make(VECTORS, 100, n_envs=1)
    Model(VECTORS, 1).add_to(buffer, count=100)
    set_random_seed(0)
    expected = buffer.sample_sequences(50, 5).observations
    with Injector() as counter:
        buffer.sample_sequences(2, 5)
    for at in range(1, counter.count):
        # windows of another kind
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()):
            buffer.sample_sequences(2, 5)
        set_random_seed(0)
        assert th.equal(buffer.sample_sequences(50, 5).observations, expected)


@pytest.mark.parametrize("limit", range(150_000, 250_000, 9_999))
def test_a_budget_leaves_space_for_states_and_priorities(limit: int) -> None:
    buffer = make(VECTORS, 20_000, prioritized=True, recurrent_states={"h": 256}, max_bytes=limit)
    obs, state = np.zeros((2, 3), np.float32), {"h": np.zeros((2, 256), np.float32)}
    for _ in range(200):
        buffer.add(obs, obs, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}], recurrent_state=state)
    assert buffer.memory_usage().total <= limit
    assert buffer.size() > 0.9 * min(buffer.buffer_size, 200)


def test_states_count_towards_the_memory() -> None:
    small, large = make(VECTORS), make(VECTORS, recurrent_states={"h": 1000})
    assert large.memory_usage().total == small.memory_usage().total
    small, large = make(VECTORS, recurrent_states={"h": 2}), make(VECTORS, recurrent_states={"h": 2, "c": (3, 4)})
    for buffer in (small, large):
        obs = np.zeros((2, 3), np.float32)
        for _ in range(40):
            state = {name: np.zeros((2, *shape)) for name, shape in buffer.recurrent_states.items()}
            buffer.add(obs, obs, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}], recurrent_state=state)
    assert large.memory_usage().total - small.memory_usage().total == 40 * 2 * 12 * 4
    limited = make(VECTORS, 4000, recurrent_states={"h": 1000}, max_bytes=1_000_000)
    assert limited.buffer_size < 130


def test_sb3_trains_with_it() -> None:
    model = DQN(
        "MlpPolicy", "CartPole-v1", replay_buffer_class=CompressedSequenceReplayBuffer, learning_starts=20, device="cpu"
    )
    model.learn(120)
    batch = model.replay_buffer.sample_sequences(8, 10)  # type: ignore[union-attr]  # there is one
    assert batch.observations.shape == (8, 10, 4)
