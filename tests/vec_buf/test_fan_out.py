"""Fan-out buffers: every buffer receives every step, and training is the same as with the first buffer alone."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import set_random_seed

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.errors import AlgorithmMismatchError, SpecMismatchError
from sb3_extra_buffers.recording import RecordBuffer
from sb3_extra_buffers.vec_buf import FanOutReplayBuffer, FanOutRolloutBuffer

IMAGES = spaces.Box(0, 255, (2, 40, 40), np.uint8)
REPLAYS = {"dense": ReplayBuffer, "rle": (CompressedReplayBuffer, {"compression_method": "rle"})}
ROLLOUTS = {"dense": RolloutBuffer, "rle": (CompressedRolloutBuffer, {"compression_method": "rle"})}


def frames(step: int, n_envs: int = 2) -> Any:
    return np.random.default_rng(step).integers(0, 3, (n_envs, 2, 40, 40), np.uint8)


def fill_replay(buffer: Any, n: int) -> None:
    for step in range(n):
        infos = [{"TimeLimit.truncated": step % 10 == 4} for _ in range(2)]
        buffer.add(
            frames(step), frames(step + 1), np.array([[step % 3], [1]]), np.array([step, -step]),
            np.full(2, step % 5 == 4), infos,
        )  # fmt: skip


def fill_rollout(buffer: Any, n: int) -> None:
    for step in range(n):
        value = th.full((2, 1), float(step))
        buffer.add(
            frames(step), np.array([[step % 3], [1]]), np.array([step, 1.0]), np.full(2, step % 4 == 0), value,
            value[:, 0],
        )  # fmt: skip


def make_replay(n: int = 0, **options: Any) -> FanOutReplayBuffer:
    buffer = FanOutReplayBuffer(
        40, IMAGES, spaces.Discrete(3), device="cpu", n_envs=2, **{"buffers": REPLAYS, **options}
    )
    fill_replay(buffer, n)
    return buffer


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("n", [7, 20, 47])
def test_every_replay_buffer_receives_every_step(n: int, threads: bool) -> None:
    buffer = make_replay(n, threads=threads)
    alone: Any = ReplayBuffer(40, IMAGES, spaces.Discrete(3), device="cpu", n_envs=2)
    fill_replay(alone, n)

    assert (buffer.pos, buffer.full, buffer.size()) == (alone.pos, alone.full, alone.size())
    assert buffer.differences() == {}
    for each in buffer.buffers.values():
        np.testing.assert_array_equal(np.asarray(each.observations), alone.observations)
        np.testing.assert_array_equal(each.timeouts, alone.timeouts)
    set_random_seed(1)
    mine = buffer.sample(16)
    set_random_seed(1)
    for part, other in zip(mine, alone.sample(16), strict=True):
        assert (part is None and other is None) or th.equal(part, other)


@pytest.mark.parametrize("threads", [False, True])
def test_every_rollout_buffer_receives_every_step(threads: bool) -> None:
    options: Any = {"device": "cpu", "gae_lambda": 0.9, "gamma": 0.8, "n_envs": 2}
    buffer = FanOutRolloutBuffer(8, IMAGES, spaces.Discrete(3), **options, buffers=ROLLOUTS, threads=threads)
    alone = RolloutBuffer(8, IMAGES, spaces.Discrete(3), **options)
    for _ in range(2):  # twice, as in training
        for each in (buffer, alone):
            each.reset()
            fill_rollout(each, 8)
            each.compute_returns_and_advantage(th.ones(2), np.zeros(2))
        assert buffer.full
        assert buffer.differences() == {}
        for member in buffer.buffers.values():
            np.testing.assert_array_equal(member.advantages, alone.advantages)
        batches = []
        for each in (buffer, alone):
            set_random_seed(3)
            batches.append(list(each.get(5)))
        for mine, other in zip(*batches, strict=True):
            assert all(th.equal(part, other_part) for part, other_part in zip(mine, other, strict=True))


def test_memory_and_time_are_reported_per_buffer() -> None:
    buffer = make_replay(20)
    usage = buffer.memory_usage()

    assert list(buffer.seconds) == list(usage) == ["dense", "rle"]
    assert all(seconds > 0 for seconds in buffer.seconds.values())
    assert usage["dense"] > 2 * 40 * 2 * 40 * 40
    assert 0 < usage["rle"] < 2 * usage["dense"]
    assert "dense: ReplayBuffer" in repr(buffer)


def test_differences_between_buffers_are_reported() -> None:
    buffer = make_replay(9)
    buffer.buffers["rle"].rewards[3] = 99
    buffer.buffers["rle"].observations[2] = frames(77)

    assert buffer.differences() == {"rle": ["observations", "rewards"]}


def test_nan_is_no_difference() -> None:
    buffer = make_replay(3)
    for member in buffer.buffers.values():
        member.rewards[1] = np.nan
    assert buffer.differences() == {}


def test_dict_observations() -> None:
    space = spaces.Dict({"image": IMAGES, "number": spaces.Discrete(5)})
    kinds = [DictReplayBuffer, CompressedDictReplayBuffer]
    buffer = FanOutReplayBuffer(20, space, spaces.Discrete(3), device="cpu", n_envs=2, buffers=kinds)
    for step in range(6):
        obs = {"image": frames(step), "number": np.array([step % 5, 2])}
        buffer.add(obs, obs, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
        assert obs["number"].shape == (2,)  # the caller's dict is not modified

    assert list(buffer.buffers) == ["0", "1"]
    assert buffer.differences() == {}
    assert buffer.buffers["1"].observations["number"][4, 0, 0] == 4


def ppo(**options: Any) -> Any:
    env = make_vec_env("CartPole-v1", 2, seed=0)
    return PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=2, seed=0, device="cpu", **options).learn(32)


def dqn(**options: Any) -> Any:
    env = make_vec_env("CartPole-v1", 1, seed=0)
    return DQN("MlpPolicy", env, learning_starts=20, buffer_size=50, seed=0, device="cpu", **options).learn(64)


@pytest.mark.parametrize("make", [ppo, dqn])
def test_training_is_the_same_as_with_the_first_buffer_alone(make: Any, tmp_path: Path) -> None:
    if make is ppo:
        options: Any = {"rollout_buffer_class": FanOutRolloutBuffer, "rollout_buffer_kwargs": {"buffers": ROLLOUTS}}
    else:
        replays = {"buffers": REPLAYS, "threads": True}
        options = {"replay_buffer_class": FanOutReplayBuffer, "replay_buffer_kwargs": replays}
    weights = make().policy.state_dict()
    fanned = make(**options)

    assert all(th.equal(value, weights[name]) for name, value in fanned.policy.state_dict().items())
    fanned.save(tmp_path / "model.zip")
    type(fanned).load(tmp_path / "model.zip", env=fanned.get_env()).learn(32)
    if make is dqn:
        fanned.save_replay_buffer(tmp_path / "buffer.pkl")
        fanned.load_replay_buffer(tmp_path / "buffer.pkl")
        assert fanned.replay_buffer.differences() == {}
        assert fanned.replay_buffer.pos == 64 % 50


def test_recording_during_training() -> None:
    record = RecordBuffer((40, 40), 2, size=30)
    make_replay(12, record=record)
    assert record.rewards.tolist() == list(range(12))
    assert [len(episode) for episode in record.episodes] == [5, 5, 2]
    np.testing.assert_array_equal(record[7].frame, frames(7)[0])

    record = RecordBuffer((40, 40), 2, size=30)
    fill_rollout(
        FanOutRolloutBuffer(
            10, IMAGES, spaces.Discrete(3), device="cpu", n_envs=2, buffers=[RolloutBuffer], record=record
        ),
        10,
    )
    assert [len(episode) for episode in record.episodes] == [4, 4, 2]


def test_pickles_and_copies_can_be_written_to() -> None:
    buffer = make_replay(9, threads=True)
    for again in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        fill_replay(again, 3)
        assert again.pos == 12
        assert again.differences() == {}
    assert buffer.pos == 9


def test_attributes_are_set_in_every_buffer() -> None:
    buffer = make_replay(3)
    buffer.device = th.device("meta")
    assert [each.device.type for each in buffer.buffers.values()] == ["meta", "meta"]


@pytest.mark.parametrize("threads", [False, True])
def test_an_error_of_one_buffer_does_not_stop_the_others(threads: bool) -> None:
    buffer = make_replay(0, threads=threads)
    wrong = np.full((2, 2, 40, 40), 300)
    with pytest.raises(SpecMismatchError, match="300"):
        buffer.add(wrong, wrong, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
    assert (buffer.buffers["dense"].pos, buffer.buffers["rle"].pos) == (1, 0)


@pytest.mark.parametrize("members", [None, {}, [], [RolloutBuffer], {"x": "ReplayBuffer"}, [(5, {})]])
def test_invalid_buffers_raise(members: Any) -> None:
    with pytest.raises(AlgorithmMismatchError, match=r"buffers=|must be a ReplayBuffer class"):
        FanOutReplayBuffer(40, IMAGES, spaces.Discrete(3), buffers=members)


def test_arguments_have_the_order_of_sb3() -> None:
    for ours, theirs in ((FanOutReplayBuffer, ReplayBuffer), (FanOutRolloutBuffer, RolloutBuffer)):
        wanted = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted
