"""GPU buffers return SB3's batches, bit for bit, at the same seed."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.utils import set_random_seed

from sb3_extra_buffers.errors import (
    CodecOptionError,
    EmptyBufferError,
    HeapFullError,
    SpecMismatchError,
    UnknownCodecError,
)
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer, find_gpu_buffer_dtypes
from sb3_extra_buffers.stores import device_base

IMAGE = spaces.Box(0, 255, (4, 36, 36), np.uint8)
SPACES: dict[str, spaces.Space[Any]] = {
    "image": IMAGE,
    "channels last": spaces.Box(0, 255, (20, 20, 3), np.uint8),
    "vector": spaces.Box(-1, 1, (7,), np.float32),
    "discrete": spaces.Discrete(9),
    "dict": spaces.Dict({"image": IMAGE, "speed": spaces.Box(-1, 1, (3,), np.float32)}),
}
N_ENVS = 3
DEVICES = [
    "cpu",
    # the GPU store with reference kernels, in main memory
    "reference",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")]),
    pytest.param(
        "pinned", marks=[pytest.mark.gpu, pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A buffer_device; ``reference`` stores observations as on a GPU, in main memory."""
    if request.param != "reference":
        return str(request.param)
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
    return "cpu"


def sample_of(space: spaces.Space[Any], random: np.random.Generator, before: Any = None) -> Any:
    """One observation of each environment; images are stacks that advance."""
    if isinstance(space, spaces.Dict):
        return {key: sample_of(part, random, None if before is None else before[key]) for key, part in space.items()}
    if isinstance(space, spaces.Discrete):
        return random.integers(0, int(space.n), N_ENVS)
    assert isinstance(space, spaces.Box)
    if space.dtype == np.float32:
        return random.standard_normal((N_ENVS, *space.shape)).astype(np.float32)
    axis = 1 if space.shape[0] < space.shape[-1] else -1
    if before is None:
        return np.repeat(random.integers(0, 4, (N_ENVS, *space.shape[:-1], 1)), space.shape[-1], -1).astype(np.uint8)
    moved = np.roll(before, -1, axis)
    newest = np.moveaxis(moved, axis, 0)[-1]
    where = random.integers(0, newest[0].size, 6)
    newest.reshape(N_ENVS, -1)[:, where] = random.integers(0, 255, 6)
    return moved


def transitions(space: spaces.Space[Any], count: int, seed: int = 0) -> Iterator[tuple[Any, ...]]:
    random = np.random.default_rng(seed)
    obs = sample_of(space, random)
    for _ in range(count):
        next_obs = sample_of(space, random, obs)
        done = random.random(N_ENVS) < 0.1
        infos = [{"TimeLimit.truncated": bool(random.random() < 0.5)} for _ in range(N_ENVS)]
        action = random.integers(0, 4, N_ENVS)
        reward = random.standard_normal(N_ENVS).astype(np.float32)
        yield obs, next_obs, action, reward, done.astype(np.float32), infos
        obs = sample_of(space, random) if done.any() else next_obs


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, dict):
            assert a.keys() == b.keys()
            for key in b:
                assert a[key].dtype == b[key].dtype
                assert th.equal(a[key].cpu(), b[key].cpu())
        elif b is None:
            assert a is None
        else:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert th.equal(a.cpu(), b.cpu())


def replay_pair(space: spaces.Space[Any], **kwargs: Any) -> tuple[Any, Any]:
    actions = spaces.Discrete(4)
    theirs: Any = DictReplayBuffer if isinstance(space, spaces.Dict) else ReplayBuffer
    device = "cuda" if kwargs.get("buffer_device") in ("cuda", "pinned") else "cpu"
    ours = GpuReplayBuffer(20 * N_ENVS, space, actions, device, n_envs=N_ENVS, **kwargs)
    return ours, theirs(20 * N_ENVS, space, actions, "cpu", n_envs=N_ENVS)


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta", "rle", "camera", "gzip1", "auto"])
@pytest.mark.parametrize("name", SPACES)
def test_replay_samples_equal_sb3_at_the_same_seed(place: str, method: str, name: str) -> None:
    ours, theirs = replay_pair(SPACES[name], compression_method=method, buffer_device=place)
    for step, transition in enumerate(transitions(SPACES[name], 47)):  # 2.3 times round
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(transition))
        if step % 5 == 4:
            batches = []
            for buffer in (ours, theirs):
                set_random_seed(step)
                batches.append(buffer.sample(32))
            same(*batches)
            ours.check()
            assert ours.size() == theirs.size()


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta", "rle"])
@pytest.mark.parametrize("name", SPACES)
def test_rollouts_equal_sb3_at_the_same_seed(place: str, method: str, name: str) -> None:
    space, actions = SPACES[name], spaces.Discrete(4)
    device = "cuda" if place in ("cuda", "pinned") else "cpu"
    ours = GpuRolloutBuffer(
        16, space, actions, device, 0.9, 0.99, N_ENVS, compression_method=method, buffer_device=place
    )
    kind: Any = DictRolloutBuffer if isinstance(space, spaces.Dict) else RolloutBuffer
    theirs = kind(16, space, actions, "cpu", 0.9, 0.99, N_ENVS)
    for rollout in range(3):
        for buffer in (ours, theirs):
            buffer.reset()
        random = th.Generator().manual_seed(rollout)
        for obs, _, action, reward, done, _ in transitions(space, 16, rollout):
            value, log_prob = th.randn(N_ENVS, 1, generator=random), th.randn(N_ENVS, generator=random)
            for buffer in (ours, theirs):
                buffer.add(copy.deepcopy(obs), action, reward, done, value, log_prob)
        for buffer in (ours, theirs):
            buffer.compute_returns_and_advantage(value, done)
        for batch_size in (None, 10, 48):
            batches = []
            for buffer in (ours, theirs):
                set_random_seed(rollout)
                batches.append(list(buffer.get(batch_size)))
            for a, b in zip(*batches, strict=True):
                same(a, b)
        np.testing.assert_array_equal(ours.values, theirs.values)
        np.testing.assert_array_equal(ours.returns, theirs.returns)
        found = ours.reconstruct_obs(17)
        assert found.ndim == 1
    ours.reset()
    with pytest.raises(EmptyBufferError, match="complete"):
        next(ours.get(4))


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta", "rle"])
def test_a_pickled_buffer_continues_where_it_was(place: str, method: str) -> None:
    ours, theirs = replay_pair(IMAGE, compression_method=method, buffer_device=place)
    steps = list(transitions(IMAGE, 60))
    for transition in steps[:33]:
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(transition))
    file = io.BytesIO()
    pickle.dump(ours, file)
    again = pickle.loads(file.getvalue())
    assert isinstance(again, ReplayBuffer)
    copied = copy.deepcopy(again)
    for transition in steps[33:]:
        for buffer in (again, theirs):
            buffer.add(*copy.deepcopy(transition))
    batches = []
    for buffer in (again, theirs):
        set_random_seed(1)
        batches.append(buffer.sample(50))
    same(*batches)
    for buffer in (copied, ours):
        set_random_seed(2)
        batches.append(buffer.sample(50))
    same(*batches[2:])


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta"])
def test_vec_normalize(place: str, method: str) -> None:
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(make_vec_env("CartPole-v1", N_ENVS))
    env.reset()
    for _ in range(20):
        env.step(np.zeros(N_ENVS, np.int64))
    ours, theirs = replay_pair(env.observation_space, compression_method=method, buffer_device=place)
    obs = env.get_original_obs()
    for _ in range(30):
        action = np.arange(N_ENVS) % 2
        _, _, done, infos = env.step(action)
        for buffer in (ours, theirs):
            buffer.add(obs, env.get_original_obs(), action, env.get_original_reward(), done, infos)
        obs = env.get_original_obs()
    batches = []
    for buffer in (ours, theirs):
        set_random_seed(3)
        batches.append(buffer.sample(16, env=env))
    same(*batches)


@pytest.mark.parametrize("place", DEVICES, indirect=True)
def test_reconstructed_observations_equal_those_added(place: str) -> None:
    ours, _ = replay_pair(IMAGE, compression_method="delta", buffer_device=place)
    steps = list(transitions(IMAGE, 26))
    for transition in steps:
        ours.add(*transition)
    assert not ours.full or ours.pos == 6
    for idx, step in ((3, 23), (19, 19)):
        for env in range(N_ENVS):
            np.testing.assert_array_equal(ours.reconstruct_obs(idx, env).cpu(), steps[step][0][env].reshape(-1))
            np.testing.assert_array_equal(ours.reconstruct_nextobs(idx, env).cpu(), steps[step][1][env].reshape(-1))


def test_output_dtype_and_normalize_images() -> None:
    for kwargs, factor in (({"output_dtype": "float"}, 1.0), ({"normalize_images": True}, 255.0)):
        ours, _ = replay_pair(IMAGE, compression_method="delta", **kwargs)
        for transition in transitions(IMAGE, 5):
            ours.add(*transition)
        found = ours.sample(4).observations
        assert found.dtype == th.float32
        assert th.equal((found * factor).round(), found * factor)
        assert found.max() > (1 if factor == 1.0 else 0)


def test_a_step_that_does_not_fit_raises_and_changes_nothing() -> None:
    random = np.random.default_rng(0)

    def noise() -> Any:
        return random.integers(0, 256, (N_ENVS, *IMAGE.shape)).astype(np.uint8)

    ours, _ = replay_pair(IMAGE, compression_method="rle", heap_bytes=100_000)
    kept: list[Any] = []

    def fill() -> None:
        for _ in range(20):
            obs, following = noise(), noise()
            ours.add(obs, following, np.zeros(N_ENVS), np.zeros(N_ENVS), np.zeros(N_ENVS), [{}] * N_ENVS)
            kept.append(obs)

    with pytest.raises(HeapFullError, match="heap_bytes>="):
        fill()
    assert ours.pos == len(kept)
    for step, obs in enumerate(kept):
        np.testing.assert_array_equal(ours.reconstruct_obs(step, 1), obs[1].reshape(-1))


def test_bad_arguments_raise_at_construction() -> None:
    with pytest.raises(UnknownCodecError, match="made-up"):
        replay_pair(IMAGE, compression_method="made-up")
    with pytest.raises(CodecOptionError, match="decompression_kwargs"):
        replay_pair(IMAGE, compression_method="rle", decompression_kwargs={"a": 1})
    with pytest.raises(SpecMismatchError, match="elem_type"):
        replay_pair(IMAGE, compression_method="rle", dtypes=find_gpu_buffer_dtypes((4, 36, 36), th.int8))
    with pytest.warns(DeprecationWarning, match="heap_bytes"):
        ours, _ = replay_pair(IMAGE, compression_method="rle", max_slot_bytes=1000)
    assert ours.heap_bytes == 1000 * 2 * 20 * N_ENVS
    if not th.cuda.is_available():
        with pytest.raises(ValueError, match="pinned"):
            replay_pair(IMAGE, buffer_device="pinned")
    ours, _ = replay_pair(IMAGE)
    with pytest.raises(EmptyBufferError):
        ours.sample(4)
    with pytest.raises(SpecMismatchError, match="shape"):
        ours.add(
            np.zeros((3, 2), np.uint8), np.zeros((3, 2), np.uint8), np.zeros(3), np.zeros(3), np.zeros(3), [{}] * 3
        )
    assert ours.pos == 0


def test_indices_of_optimize_memory_usage_are_drawn_as_sb3_draws_them() -> None:
    ours, _ = replay_pair(IMAGE, compression_method="delta", optimize_memory_usage=True)
    theirs = ReplayBuffer(20 * N_ENVS, IMAGE, spaces.Discrete(4), "cpu", N_ENVS, True, handle_timeout_termination=False)
    for transition in transitions(IMAGE, 33):
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(transition))
    batches = []
    for buffer in (ours, theirs):
        set_random_seed(3)
        batches.append(buffer.sample(16))
    assert th.equal(batches[0].observations, batches[1].observations)
    assert th.equal(batches[0].actions, batches[1].actions)


@pytest.mark.gpu
@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["none", "delta", "rle"])
def test_a_buffer_pickled_on_a_gpu_loads_without_one(method: str, tmp_path: Path) -> None:
    ours, _ = replay_pair(IMAGE, compression_method=method, buffer_device="cuda")
    for transition in transitions(IMAGE, 33):
        ours.add(*transition)
    set_random_seed(4)
    batch = [part.cpu().numpy() for part in ours.sample(50)[:5]]
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(ours))
    np.savez(tmp_path / "batch.npz", *batch)
    code = """
import pickle, sys, numpy as np, torch
from stable_baselines3.common.utils import set_random_seed
assert not torch.cuda.is_available()
buffer = pickle.load(open(sys.argv[1] + "/buffer.pkl", "rb"))
buffer.device = torch.device("cpu")  # as SB3 sets it when it loads a buffer
set_random_seed(4)
wanted = np.load(sys.argv[1] + "/batch.npz")
for part, name in zip(buffer.sample(50)[:5], wanted.files, strict=True):
    np.testing.assert_array_equal(part.numpy(), wanted[name])
buffer.check()
"""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", [1, 7, 256])
@pytest.mark.parametrize("optimize_memory_usage", [False, True])
def test_the_global_generator_is_used_as_by_sb3(size: int, optimize_memory_usage: bool) -> None:
    ours, theirs = replay_pair(
        SPACES["vector"], optimize_memory_usage=optimize_memory_usage, handle_timeout_termination=False
    )
    theirs.optimize_memory_usage = optimize_memory_usage
    for step, transition in enumerate(transitions(SPACES["vector"], 31)):
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(transition))
        if step in (0, 10, 30):
            after = []
            for buffer in (ours, theirs):
                set_random_seed(step)
                buffer.sample(size)
                after.append(np.random.random(3))  # noqa: NPY002  # SB3 draws from this generator
            np.testing.assert_array_equal(after[0], after[1])


def test_a_subclass_may_choose_indices_itself() -> None:
    class Newest(GpuReplayBuffer):
        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            return super()._get_samples(np.full_like(batch_inds, self.pos - 1), env)

    buffer = Newest(60, SPACES["vector"], spaces.Discrete(4), "cpu", N_ENVS)
    for transition in transitions(SPACES["vector"], 12):
        buffer.add(*transition)
    assert set(buffer.sample(50).rewards.flatten().tolist()) == set(transition[3].tolist())
