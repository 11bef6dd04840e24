"""Hindsight replay: same batches as SB3's `HerReplayBuffer`, and budgets that never mix up episodes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers.compressed import CompressedHerReplayBuffer
from sb3_extra_buffers.errors import EmptyBufferError, NoEpisodeError, SpecMismatchError
from tests.contracts.buffer import assert_same_contents, assert_same_samples, contents, is_same, sample
from tests.contracts.store import method_params

KINDS: dict[str, dict[str, Any]] = {
    "bits": {},
    "image": {"image_obs_space": True},
    "discrete": {"discrete_obs_space": True},
}


def bits(n_envs: int, **options: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: BitFlippingEnv(n_bits=6, max_steps=7, **options) for _ in range(n_envs)])


def walk(env: Any, n_steps: int, seed: int = 0) -> Any:
    """Steps of ``env`` as an off-policy algorithm would add them."""
    env.action_space.seed(seed)
    env.seed(seed)
    obs = env.reset()
    for _ in range(n_steps):
        action = np.stack([env.action_space.sample() for _ in range(env.num_envs)])
        after, reward, done, infos = env.step(action)
        next_obs = {key: value.copy() for key, value in after.items()}
        for index in np.flatnonzero(done):
            for key in next_obs:
                next_obs[key][index] = infos[index]["terminal_observation"][key]
        yield obs, next_obs, action, reward, done, infos
        obs = {key: value.copy() for key, value in after.items()}


def make(cls: Any, env: Any, size: int = 40, **options: Any) -> Any:
    places = (size * env.num_envs, env.observation_space, env.action_space)
    return cls(*places, env=env, device="cpu", n_envs=env.num_envs, **options)


def pair(env: Any, **options: Any) -> list[Any]:
    return [make(CompressedHerReplayBuffer, env, **options), make(HerReplayBuffer, env, **options)]


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_same_batches(kind: str, n_envs: int, strategy: str) -> None:
    env = bits(n_envs, **KINDS[kind])
    buffers = pair(env, goal_selection_strategy=strategy, n_sampled_goal=3)
    for number, step in enumerate(walk(env, 92)):  # 2.3 times round
        for buffer in buffers:
            buffer.add(*step)
        if number >= 10 and number % 4 == 0:
            assert_same_samples(*buffers, seed=number, batch_size=20)
    assert_same_contents(contents(buffers[1]), contents(buffers[0]))


@pytest.mark.parametrize("method", method_params("delta", "zstd-5", "igzip1", "none"))
def test_every_method(method: str) -> None:
    env = bits(2, image_obs_space=True)
    ours = make(CompressedHerReplayBuffer, env, compression_method=method)
    theirs = make(HerReplayBuffer, env)
    for step in walk(env, 60):
        ours.add(*step)
        theirs.add(*step)
    assert_same_samples(ours, theirs, batch_size=40)


def test_copied_infos_and_normalized_batches() -> None:
    env = VecNormalize(bits(2, image_obs_space=True), norm_obs_keys=["observation"])
    buffers = pair(env, copy_info_dict=True)
    for step in walk(env.venv, 30):
        for buffer in buffers:
            buffer.add(*step)
    assert_same_samples(*buffers, env=env)


def test_unwritten_infos_take_no_memory() -> None:
    tracemalloc.start()
    ours = make(CompressedHerReplayBuffer, bits(1), size=10_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    columns = sum(column.nbytes for column in ours._columns().values())
    dense = 2 * sum(column.nbytes for column in ours.observations.values())
    assert held < columns + dense + 10_000 * 32


def test_truncating_the_last_trajectory_ends_its_episode() -> None:
    env = bits(2)
    buffers = pair(env)
    for step in walk(env, 25):
        for buffer in buffers:
            buffer.add(*step)
    for buffer in buffers:
        with pytest.warns(UserWarning, match="last trajectory in the replay buffer will be truncated"):
            buffer.truncate_last_trajectory()
    assert_same_contents(contents(buffers[1]), contents(buffers[0]))
    assert_same_samples(*buffers)


def test_output_dtype_float() -> None:
    env = bits(2, image_obs_space=True)
    raw, floats = make(CompressedHerReplayBuffer, env), make(CompressedHerReplayBuffer, env, output_dtype="float")
    for step in walk(env, 30):
        raw.add(*step)
        floats.add(*step)
    want, got = (sample(buffer, 16, 0)[0] for buffer in (raw, floats))
    for name in ("observations", "next_observations"):
        is_same(getattr(got, name), {key: part.float() for key, part in getattr(want, name).items()})


def test_sampling_before_an_episode_has_ended() -> None:
    env = bits(1)
    ours, theirs = pair(env)
    for step in walk(env, 3):
        ours.add(*step)
        theirs.add(*step)
    with pytest.raises(NoEpisodeError, match="learning_starts") as caught:
        ours.sample(4)
    # what people catch: ours, and what SB3 raises
    assert isinstance(caught.value, EmptyBufferError)
    with pytest.raises(RuntimeError, match="learning_starts"):
        theirs.sample(4)


def test_a_refused_step_does_not_change_episodes() -> None:
    env = bits(2)
    ours, theirs = pair(env)
    for number, step in enumerate(walk(env, 92)):
        if number > 40:
            before = contents(ours)
            obs = {**step[0], "observation": step[0]["observation"][:, :3]}
            for bad in ((obs, *step[1:]), (*step[:2], step[2][:1], *step[3:]), (*step[:4], np.zeros(3), step[5])):
                with pytest.raises(SpecMismatchError):
                    ours.add(*bad)
            assert_same_contents(before, contents(ours))
        ours.add(*step)
        theirs.add(*step)
    assert_same_samples(ours, theirs)


@pytest.mark.parametrize("max_steps", [7, 40])
def test_goals_come_from_steps_that_were_not_evicted(max_steps: int) -> None:
    """Every goal and every observation of a batch is of a step that is still there, and of the same episode."""

    class Numbered(BitFlippingEnv):
        """Shows which step this is, in an image that does not compress."""

        def __init__(self, number: int) -> None:
            super().__init__(n_bits=6, max_steps=max_steps)
            self.rng = np.random.default_rng(number)
            self.total = 0
            goal = spaces.Box(0, 1e9, (2,))
            image = spaces.Box(0, 255, (1, 24, 24), np.uint8)
            self.observation_space = spaces.Dict({"image": image, "achieved_goal": goal, "desired_goal": goal})
            self.n_episode = 0

        def _get_obs(self) -> Any:
            image = self.rng.integers(0, 256, (1, 24, 24), dtype=np.uint8)
            here = np.array([self.n_episode, self.total], np.float32)
            image[0, 0, :8] = here.view(np.uint8)
            return {"image": image, "achieved_goal": here, "desired_goal": here}

        def step(self, action: Any) -> Any:
            self.total += 1
            return super().step(action)

        def reset(self, **options: Any) -> Any:
            self.n_episode += 1
            return super().reset(**options)

        def compute_reward(self, achieved: Any, desired: Any, _: Any) -> Any:
            # never zero, which would be success
            return np.full(np.shape(achieved)[:-1], -1, np.float32)

    env = DummyVecEnv([lambda number=number: Numbered(number) for number in range(2)])  # type: ignore[misc]
    ours = make(CompressedHerReplayBuffer, env, size=300, max_bytes=100_000)
    for step in walk(env, 450):
        ours.add(*step)
        if not ours.ep_length.any() or ours.pos % 3:
            continue
        batch = ours.sample(16)
        for obs in (batch.observations, batch.next_observations):
            shown = obs["image"][:, 0, 0, :8].contiguous().numpy().view(np.float32)
            np.testing.assert_array_equal(shown, obs["achieved_goal"].numpy())
            np.testing.assert_array_equal(shown[:, 0], obs["desired_goal"][:, 0].numpy())
        oldest = float(ours.next_observations["achieved_goal"][(ours.pos + ours.n_evicted) % ours.buffer_size, 0, 1])
        if ours.full:
            assert (batch.next_observations["desired_goal"][:, 1] >= oldest).all()
    assert ours.full
    assert ours.size() < 35


def test_reset_removes_all_episodes(tmp_path: Path) -> None:
    env = bits(2)
    ours = make(CompressedHerReplayBuffer, env)
    for step in walk(env, 60):
        ours.add(*step)
    ours.reset()
    with pytest.raises(NoEpisodeError):
        ours.sample(8)

    new = make(HerReplayBuffer, env)
    for number, step in enumerate(walk(env, 55, seed=1)):
        for buffer in (ours, new):
            buffer.add(*step)
        if number > 20:
            assert_same_samples(ours, new, seed=number)
    ours.save(tmp_path / "buffer")
    loaded = CompressedHerReplayBuffer.load(tmp_path / "buffer")
    loaded.set_env(env)
    assert_same_samples(loaded, new)
