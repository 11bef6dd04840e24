"""Prioritised replay: what is drawn, what it weighs, and SB3's algorithms trained with it."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch.nn import functional as F  # noqa: N812  # as everyone has it

from sb3_extra_buffers.compressed import (
    CompressedDictPrioritizedReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    prioritized,
)
from sb3_extra_buffers.errors import (
    AlgorithmMismatchError,
    EmptyBufferError,
    IndexOutOfRangeError,
    NotSaveableError,
    PriorityError,
    StaleIndexError,
)
from sb3_extra_buffers.files import load, save
from sb3_extra_buffers.gpu_buffers import GpuPrioritizedReplayBuffer
from tests.torture.interrupts import Injector

IMAGES = spaces.Box(0, 255, (4, 36, 36), np.uint8)
MIXED = spaces.Dict({"image": IMAGES, "speed": spaces.Box(-1, 1, (3,), np.float32)})


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    # small networks are faster on one, and sums have one order
    before = th.get_num_threads()
    th.set_num_threads(1)
    yield
    th.set_num_threads(before)


class Feed:
    """Steps of ``n_envs`` environments with stacked images; rewards count the transitions."""

    def __init__(self, n_envs: int, *, seed: int = 0, mixed: bool = False) -> None:
        self.random, self.n_envs, self.mixed, self.count = np.random.default_rng(seed), n_envs, mixed, 0
        self.stack = np.zeros((n_envs, *IMAGES.shape), np.uint8)

    def _observe(self) -> Any:
        frame = self.stack[:, -1:].copy()
        frame[:, :, self.random.integers(36), self.random.integers(36)] = self.random.integers(1, 255)
        self.stack = np.concatenate([self.stack[:, 1:], frame], axis=1)
        if not self.mixed:
            return self.stack
        return {"image": self.stack, "speed": self.random.uniform(-1, 1, (self.n_envs, 3)).astype(np.float32)}

    def fill(self, *buffers: Any, n_steps: int) -> None:
        for _ in range(n_steps):
            obs, next_obs = self._observe(), self._observe()
            rewards = np.arange(self.count, self.count + self.n_envs, dtype=np.float32)
            self.count += self.n_envs
            dones = self.random.random(self.n_envs) < 0.1
            infos = [{"TimeLimit.truncated": bool(done and self.random.random() < 0.5)} for done in dones]
            for buffer in buffers:
                buffer.add(obs, next_obs, np.zeros((self.n_envs, 1)), rewards, dones, infos)


def make(size: int = 40, n_envs: int = 2, **options: Any) -> Any:
    space = options.pop("space", IMAGES)
    kind = CompressedDictPrioritizedReplayBuffer if space is MIXED else CompressedPrioritizedReplayBuffer
    return kind(size, space, spaces.Discrete(3), device="cpu", n_envs=n_envs, **options)


def drawn(buffer: Any, n_batches: int = 50, batch_size: int = 64) -> Any:
    """Which transitions, by their rewards, in many batches."""
    return np.concatenate([buffer.sample(batch_size).rewards.numpy().ravel() for _ in range(n_batches)]).astype(int)


# ---- the buffer ----


def test_samples_are_sb3s_with_weights_and_indices() -> None:
    buffer = make(n_envs=2)
    Feed(2).fill(buffer, n_steps=15)
    batch = buffer.sample(8)
    assert batch._fields == (
        "observations", "actions", "next_observations", "dones", "rewards", "discounts", "weights", "indices",
    )  # fmt: skip
    assert batch.observations.shape == (8, *IMAGES.shape)
    assert batch.observations.dtype == th.uint8
    assert batch.discounts is None
    assert batch.weights.shape == batch.rewards.shape == (8, 1)
    assert batch.weights.dtype == th.float32
    assert np.array_equal(batch.indices, batch.rewards.numpy().ravel())
    # new transitions are alike
    assert (batch.weights == 1).all()


@pytest.mark.parametrize("space", [IMAGES, MIXED], ids=["box", "dict"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_batch_holds_the_transitions_that_it_names(space: Any, n_steps: int) -> None:
    buffer = make(space=space, n_envs=2, n_steps=n_steps)
    dense = ReplayBuffer(60, IMAGES, spaces.Discrete(3), device="cpu", n_envs=2)
    feed = Feed(2, mixed=space is MIXED)
    # the dense buffer is long enough to keep them all
    for _ in range(30):
        feed.fill(buffer, n_steps=1)
        image = feed.stack
        dense.add(image, image, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
    batch = buffer.sample(64)
    steps, envs = np.divmod(batch.indices, 2)
    assert steps.min() >= 10
    at = steps % buffer.buffer_size
    for key in MIXED.spaces if space is MIXED else [None]:
        leaves = (batch.observations, buffer.observations), (batch.next_observations, buffer.next_observations)
        for given, held in leaves[: 2 if n_steps == 1 else 1]:
            assert np.array_equal(given[key] if key else given, (held[key] if key else held)[at, envs])
    if n_steps == 1:
        image = batch.next_observations["image"] if space is MIXED else batch.next_observations
        assert np.array_equal(image, dense.observations[steps, envs])
    assert np.array_equal(batch.actions, buffer.actions[at, envs])


@pytest.mark.parametrize("n_added", [2, 17, 20, 33])
def test_n_step_transitions_are_sb3s(n_added: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"device": "cpu", "n_envs": 2, "n_steps": 4, "gamma": 0.9}
    ours = CompressedPrioritizedReplayBuffer(40, IMAGES, spaces.Discrete(3), **options)
    theirs = NStepReplayBuffer(40, IMAGES, spaces.Discrete(3), **options)
    Feed(2).fill(ours, theirs, n_steps=n_added)
    batch = ours.sample(200)
    steps, envs = np.divmod(batch.indices, 2)
    # SB3 draws environments itself
    monkeypatch.setattr(np.random, "randint", lambda *args, **kwargs: envs)
    wanted = theirs._get_samples(steps % ours.buffer_size)
    assert batch.discounts.min() < batch.discounts.max()
    for name in wanted._fields:
        assert th.equal(getattr(batch, name), getattr(wanted, name)), name


def test_normalised_as_by_sb3() -> None:
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    env.reset()
    for _ in range(30):
        env.step(np.array([1]))
    for n_steps in (1, 2):
        buffer = CompressedPrioritizedReplayBuffer(
            50, env.observation_space, env.action_space, device="cpu", n_steps=n_steps
        )
        for number in range(20):
            obs = np.full((1, 4), number, np.float32)
            buffer.add(obs, obs + 1, np.array([0]), np.array([float(number)]), np.array([False]), [{}])
        batch = buffer.sample(16, env=env)
        raw: Any = batch.indices[:, None] + np.zeros(4, np.float32)
        assert np.allclose(batch.observations, np.asarray(env.normalize_obs(raw)))
        if n_steps == 1:
            assert np.allclose(batch.rewards.ravel(), env.normalize_reward(batch.indices.astype(np.float32)))


def test_draws_follow_the_errors() -> None:
    buffer = make(40, n_envs=2, alpha=0.5, epsilon=1e-9)
    Feed(2).fill(buffer, n_steps=20)
    errors = np.linspace(0.1, 4.0, 40)
    buffer.update_priorities(np.arange(40), errors)
    set_random_seed(0)
    counts = np.bincount(drawn(buffer, 500), minlength=40)
    expected = errors**0.5 / (errors**0.5).sum() * counts.sum()
    # strata make counts steadier than independent draws would be
    assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert counts[-1] > 4 * counts[0]


def test_alpha_0_is_uniform() -> None:
    buffer = make(40, n_envs=2, alpha=0.0)
    Feed(2).fill(buffer, n_steps=33)
    buffer.update_priorities(buffer.sample(30).indices, np.linspace(0, 1e6, 30))
    set_random_seed(0)
    batch = buffer.sample(64)
    assert (batch.weights == 1).all()
    counts = np.bincount(drawn(buffer, 500) - 26, minlength=40)
    assert len(counts) == 40
    assert (abs(counts - 800) < 5 * np.sqrt(800)).all()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_those_of_the_paper(beta: float) -> None:
    buffer = make(40, n_envs=2, alpha=0.7, beta=beta, epsilon=0.01)
    Feed(2).fill(buffer, n_steps=20)
    errors = np.random.default_rng(0).exponential(1.0, 40)
    buffer.update_priorities(np.arange(40), errors)
    chances = (errors + 0.01) ** 0.7
    chances /= chances.sum()
    weights = (40 * chances) ** -beta
    batch = buffer.sample(64)
    assert np.allclose(batch.weights.ravel(), (weights / weights.max())[batch.indices], rtol=1e-6)


def test_beta_follows_its_schedule() -> None:
    def beta_at(beta: Any, progress_remaining: float) -> float:
        buffer = make(beta=beta)
        buffer.progress_remaining = progress_remaining
        return float(buffer.beta_now())

    assert [beta_at((0.4, 1.0), left) for left in (1.0, 0.5, 0.0)] == pytest.approx([0.4, 0.7, 1.0])
    assert beta_at(lambda left: 1 - left / 4, 0.5) == pytest.approx(0.875)
    assert beta_at(0.3, 0.0) == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"beta must be 0 or more, got -1"):
        make(beta=lambda left: -left)


def test_new_transitions_have_the_greatest_priority() -> None:
    buffer = make(40, n_envs=2, alpha=1.0, epsilon=1e-9)
    feed = Feed(2)
    feed.fill(buffer, n_steps=10)
    buffer.update_priorities(np.arange(20), np.full(20, 0.01))
    buffer.update_priorities([3], [7.0])
    buffer.update_priorities([3], [0.01])
    feed.fill(buffer, n_steps=1)
    assert buffer.priorities[10] == pytest.approx([7.0, 7.0])
    assert np.isin(drawn(buffer), [20, 21]).mean() > 0.95


def test_repeated_indices_take_the_last_error() -> None:
    buffer = make(40, n_envs=2, alpha=1.0, epsilon=1e-9)
    Feed(2).fill(buffer, n_steps=5)
    buffer.update_priorities(th.tensor([4, 4, 4]), th.tensor([[1.0], [2.0], [0.5]]))
    assert buffer.priorities[2, 0] == pytest.approx(0.5)
    assert buffer.max_priority == pytest.approx(2.0)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_overwritten_transitions_are_never_drawn(n_envs: int) -> None:
    buffer = make(10 * n_envs, n_envs=n_envs, alpha=1.0)
    feed = Feed(n_envs)
    for _ in range(27):
        feed.fill(buffer, n_steps=1)
        batch = buffer.sample(32)
        assert batch.indices.min() >= feed.count - 10 * n_envs
        assert np.array_equal(batch.indices, batch.rewards.numpy().ravel())
        # the oldest would be drawn again and again
        buffer.update_priorities(batch.indices, 1000.0 / (1 + batch.indices))
        buffer.check()


@pytest.mark.parametrize("n_steps", [1, 3])
def test_evicted_transitions_are_never_drawn(n_steps: int) -> None:
    probe = make(2000, n_envs=2, compression_method="delta")
    Feed(2).fill(probe, n_steps=500)
    buffer = make(2000, n_envs=2, compression_method="delta", max_bytes=probe.held_bytes() * 2 // 3, n_steps=n_steps)
    feed = Feed(2)
    n_evicted = []
    for _ in range(150):
        feed.fill(buffer, n_steps=10)
        batch = buffer.sample(64)
        assert batch.indices.min() >= feed.count - 2 * buffer.size()
        # what was erased reads as zeros
        assert batch.observations.numpy().any(axis=(1, 2, 3)).all()
        buffer.update_priorities(batch.indices, 1000.0 / (1 + batch.indices))
        n_evicted.append(buffer.n_evicted)
        assert buffer.held_bytes() <= buffer.storage_options.max_bytes
    buffer.check()
    assert max(n_evicted) > 10
    with pytest.raises(StaleIndexError):
        buffer.update_priorities([feed.count - 2 * buffer.size() - 1], [1.0])


def test_max_bytes_counts_the_priorities() -> None:
    columns = CompressedReplayBuffer(10**6, spaces.Box(-1, 1, (4,)), spaces.Discrete(2), device="cpu", max_bytes=10**6)
    ours = CompressedPrioritizedReplayBuffer(
        10**6, spaces.Box(-1, 1, (4,)), spaces.Discrete(2), device="cpu", max_bytes=10**6
    )
    # eight bytes each, and a few for the sums
    per_step = 10**6 / columns.buffer_size
    assert ours.buffer_size == pytest.approx(10**6 / (per_step + 8), rel=0.02)
    assert ours.held_bytes() > columns.held_bytes() * 0.9
    assert ours._tree.nbytes > 8 * ours.buffer_size


def test_wrong_updates_are_refused_and_change_nothing() -> None:
    buffer = make(20, n_envs=2)
    feed = Feed(2)
    feed.fill(buffer, n_steps=13)
    before = buffer.priorities
    for errors in ([0.5, np.nan], [0.5, -0.1], [0.5, np.inf], [0.5, 1e300]):
        with pytest.raises(PriorityError, match="1 of 2 TD errors are negative, NaN or infinite"):
            buffer.update_priorities([24, 25], errors)
    with pytest.raises(PriorityError, match=r"2 indices .* and 3 TD errors"):
        buffer.update_priorities([24, 25], [1.0, 1.0, 1.0])
    with pytest.raises(PriorityError, match="float64"):
        buffer.update_priorities([24.0], [1.0])
    for index in (-1, 5, 26, 10**9):
        with pytest.raises(StaleIndexError, match=rf"1 of 2 indices \(the first is {index}\).* holds 6 to 25"):
            buffer.update_priorities([24, index], [9.0, 9.0])
    assert np.array_equal(buffer.priorities, before)
    assert buffer.max_priority == 1.0
    assert buffer.holds([5, 6, 25, 26]).tolist() == [False, True, True, False]


def test_indices_from_before_a_reset_are_stale() -> None:
    buffer = make(20, n_envs=2)
    feed = Feed(2)
    feed.fill(buffer, n_steps=7)
    indices = buffer.sample(5).indices
    buffer.reset()
    with pytest.raises(EmptyBufferError):
        buffer.sample(1)
    feed.fill(buffer, n_steps=7)
    buffer.check()
    with pytest.raises(StaleIndexError):
        buffer.update_priorities(indices, np.ones(5))
    buffer.update_priorities(buffer.sample(5).indices, np.ones(5))
    assert drawn(buffer).min() >= 14


def test_an_interrupted_reset_is_complete_or_has_not_begun() -> None:
    sizes = set()
    for at in range(1, 2000, 5):
        buffer = make(20, n_envs=2)
        Feed(2).fill(buffer, n_steps=17)
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()) as injector:
            buffer.reset()
        buffer.recover()
        buffer.check()
        sizes.add(buffer.size())
        Feed(2).fill(buffer, n_steps=3)
        buffer.check()
        if injector.count < at:
            break
    assert sizes == {0, 10}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha"),
        ({"alpha": -0.1}, "alpha"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"beta": -0.5}, "beta"),
        ({"beta": (0.4, -1.0)}, "beta"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} must be"):
        make(**options)


def test_an_empty_buffer_has_nothing_to_draw() -> None:
    with pytest.raises(EmptyBufferError, match="learning_starts"):
        make().sample(4)


@pytest.mark.parametrize("kind", [CompressedPrioritizedReplayBuffer, GpuPrioritizedReplayBuffer])
@pytest.mark.parametrize("assigned", [{"pos": 0, "full": False}, {"pos": 7}])
def test_a_position_that_was_assigned_is_named(assigned: dict[str, Any], kind: Any) -> None:
    buffer, feed = kind(40, IMAGES, spaces.Discrete(3), device="cpu", n_envs=2), Feed(2)
    feed.fill(buffer, n_steps=50)
    vars(buffer).update(assigned)
    for _ in range(2):
        # priorities belong to the removed transitions
        with pytest.raises(IndexOutOfRangeError, match="were assigned"):
            buffer.sample(16)
        feed.fill(buffer, n_steps=5)
    buffer.reset()
    feed.fill(buffer, n_steps=5)
    assert set(drawn(buffer)) == set(range(feed.count - 10, feed.count))
    buffer.check()


def test_a_buffer_that_was_emptied_by_hand_has_nothing_to_draw() -> None:
    buffer = make()
    Feed(2).fill(buffer, n_steps=20)
    assert buffer.full
    buffer.full = False
    with pytest.raises(EmptyBufferError, match="learning_starts"):
        buffer.sample(4)


@pytest.mark.parametrize("space", [IMAGES, MIXED], ids=["box", "dict"])
def test_copies_continue_with_the_same_draws(space: Any, tmp_path: Path) -> None:
    buffer = make(space=space, beta=lambda left: 1 - left / 2)
    feed = Feed(2, mixed=space is MIXED)
    feed.fill(buffer, n_steps=27)
    buffer.update_priorities(buffer.sample(16).indices, np.linspace(0, 3, 16))
    buffer.progress_remaining = 0.25
    copies = [buffer, copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))]
    with pytest.raises(NotSaveableError):  # a function, without pickle
        save(buffer, tmp_path)
    buffer.beta = (0.5, 1.0)
    save(buffer, tmp_path)
    copies.append(load(tmp_path))
    for _ in range(3):
        feed.fill(*copies, n_steps=1)
        batches = []
        for each in copies:
            each.check()
            set_random_seed(5)
            batches.append(each.sample(32))
            each.update_priorities(batches[-1].indices, np.arange(32))
        for batch in batches[1:]:
            assert np.array_equal(batch.indices, batches[0].indices)
            assert th.equal(batch.weights, batches[0].weights)
            assert th.equal(batch.rewards, batches[0].rewards)


# ---- training ----


class Guess(gym.Env[Any, Any]):
    """One step: the observation names what to do, and doing it is rewarded."""

    def __init__(self, *, box: bool = False) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(2)
        self.box = box

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.wanted = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.wanted], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 1 - abs(float(action[0]) - (self.wanted - 0.5)) if self.box else float(action == self.wanted)
        return np.zeros(2, np.float32), reward, True, False, {}


def contrib(name: str) -> Any:
    return getattr(pytest.importorskip("sb3_contrib"), name)


# few, for speed
QUANTILES = {"QRDQN": {"n_quantiles": 10}, "TQC": {"n_quantiles": 10}}


def model_of(algorithm: Any, *, n_envs: int = 1, kind: Any = prioritized, **options: Any) -> Any:
    name = algorithm.__name__
    box = name not in ("DQN", "QRDQN")
    env = DummyVecEnv([lambda: Guess(box=box)] * n_envs)
    settings: dict[str, Any] = {
        "learning_rate": 0.005, "learning_starts": 50, "batch_size": 32, "buffer_size": 256, "train_freq": 1,
        "gradient_steps": 1, "policy_kwargs": {"net_arch": [16]} | QUANTILES.get(name, {}), "seed": 3,
        "device": "cpu", "gamma": 0.9,
    }  # fmt: skip
    return kind(algorithm)("MlpPolicy", env, **settings | options)


def parameters(model: Any) -> list[th.Tensor]:
    return [parameter.detach().clone() for parameter in model.policy.parameters()]


@pytest.mark.same_without_extras
@pytest.mark.parametrize("name", ["DQN", "SAC", "TD3", "DDPG", "QRDQN", "TQC"])
def test_algorithms_learn(name: str) -> None:
    algorithm = {"DQN": DQN, "SAC": SAC, "TD3": TD3, "DDPG": DDPG}.get(name) or contrib(name)
    model = model_of(algorithm, n_envs=2)
    model.learn(600)
    model.replay_buffer.check()
    assert type(model.replay_buffer) is CompressedPrioritizedReplayBuffer
    actions, _ = model.predict(np.eye(2, dtype=np.float32), deterministic=True)
    if name in ("DQN", "QRDQN"):
        assert actions.tolist() == [0, 1]
    else:
        assert actions[0, 0] < -0.2 < 0.2 < actions[1, 0]
    # nearly all have been seen, and differ
    assert len(np.unique(model.replay_buffer.priorities)) > 50
    assert 0 < model.logger.name_to_value["train/td_error"] < 1
    assert model.logger.name_to_value["train/beta"] == pytest.approx(1.0, abs=0.01)


def test_large_td_errors_are_drawn_more_often_after_training() -> None:
    model = model_of(DQN)
    model.learn(400)
    buffer = model.replay_buffer
    obs = np.array([[1.0, 0.0]], np.float32)
    # nothing before was worth this
    buffer.add(obs, obs * 0, np.array([0]), np.array([50.0]), np.array([True]), [{}])
    index = buffer.n_added - 1
    for _ in range(20):
        obs = np.array([[0.0, 1.0]], np.float32)
        buffer.add(obs, obs * 0, np.array([1]), np.array([1.0]), np.array([True]), [{}])
    model.train(gradient_steps=20, batch_size=32)
    batch = buffer.sample(256)
    found = batch.indices == index
    # 1 of 256 transitions, many times its share of the batch, and weighed down for it
    assert found.sum() > 10
    assert batch.weights[found].max() < batch.weights[~found].min()


class SameDraws(ReplayBuffer):
    """SB3's buffer, drawing as a tree of equal priorities does."""

    def sample(self, batch_size: int, env: Any = None) -> Any:
        count = self.size() * self.n_envs
        points = (np.arange(batch_size) + np.random.random_sample(batch_size)) * (count / batch_size)  # noqa: NPY002  # SB3's generator
        steps, self.envs = np.divmod(points.astype(int), self.n_envs)
        return self._get_samples(steps, env)

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        envs = self.envs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np.random, "randint", lambda *args, **kwargs: envs)
            return super()._get_samples(batch_inds, env)


@pytest.mark.same_without_extras
@pytest.mark.parametrize("name", ["DQN", "SAC", "TD3", "QRDQN", "TQC", "CrossQ"])
def test_alpha_0_trains_like_the_stock_algorithm_bit_for_bit(name: str) -> None:
    algorithm = {"DQN": DQN, "SAC": SAC, "TD3": TD3}.get(name) or contrib(name)
    # 30: a mean that is no power of two
    options: dict[str, Any] = {"n_envs": 2, "batch_size": 30, "gradient_steps": 2}
    ours = model_of(algorithm, replay_buffer_kwargs={"alpha": 0.0}, **options)
    theirs = model_of(algorithm, kind=lambda algorithm: algorithm, replay_buffer_class=SameDraws, **options)
    before = parameters(ours)
    for model in (ours, theirs):
        set_random_seed(0)
        model.learn(300)
    assert not all(th.equal(*pair) for pair in zip(before, parameters(ours), strict=True))
    for pair in zip(parameters(ours), parameters(theirs), strict=True):
        assert th.equal(*pair)


def test_gradients_are_those_of_the_weighted_loss() -> None:
    model = model_of(DQN, max_grad_norm=1e9, policy_kwargs={"net_arch": [16], "optimizer_class": th.optim.SGD})
    model.learn(100)
    buffer = model.replay_buffer
    buffer.beta = 1.0
    buffer.update_priorities(np.arange(buffer.n_added), np.linspace(0.01, 5, buffer.n_added))
    before = copy.deepcopy(model.policy)
    set_random_seed(9)
    batch = copy.deepcopy(buffer).sample(32)
    assert batch.weights.min() < 0.1

    set_random_seed(9)
    model.train(gradient_steps=1, batch_size=32)

    with th.no_grad():
        values = before.q_net_target(batch.next_observations).max(dim=1, keepdim=True).values
        target = batch.rewards + (1 - batch.dones) * model.gamma * values
    current = before.q_net(batch.observations).gather(1, batch.actions.long())
    (batch.weights * F.smooth_l1_loss(current, target, reduction="none")).mean().backward()
    pairs = zip(before.q_net.parameters(), model.q_net.parameters(), strict=True)
    for parameter, trained in pairs:
        assert th.allclose(parameter - model.learning_rate * parameter.grad, trained, atol=1e-7)
    errors = (target - current).detach().abs().numpy().ravel()
    assert np.allclose(
        buffer.priorities.ravel()[batch.indices], (errors.astype(np.float64) + buffer.epsilon) ** buffer.alpha
    )


def test_td_errors_are_averaged_over_critics() -> None:
    model = model_of(TD3, gradient_steps=1)
    model.learn(80)
    buffer, policy = model.replay_buffer, copy.deepcopy(model.policy)
    set_random_seed(9)
    batch = copy.deepcopy(buffer).sample(32)
    set_random_seed(9)
    model.train(gradient_steps=1, batch_size=32)
    # every transition ends its episode: the target is the reward
    with th.no_grad():
        errors = [(values - batch.rewards).abs() for values in policy.critic(batch.observations, batch.actions)]
    wanted = (sum(errors) / 2 + buffer.epsilon).double() ** buffer.alpha
    assert np.allclose(buffer.priorities.ravel()[batch.indices], wanted.ravel(), rtol=1e-5)


@pytest.mark.parametrize("space", ["box", "dict"])
def test_n_steps_reach_the_buffer(space: str) -> None:
    env: Any = Guess()
    if space == "dict":
        env = gym.wrappers.TransformObservation(
            env, lambda obs: {"obs": obs}, spaces.Dict({"obs": env.observation_space})
        )
    options = {"alpha": 0.5}
    model = prioritized(DQN)(
        "MultiInputPolicy" if space == "dict" else "MlpPolicy",
        env, n_steps=3, gamma=0.8, learning_starts=20, device="cpu", replay_buffer_kwargs=options, buffer_size=100,
    )  # fmt: skip
    model.learn(60)
    assert isinstance(model.replay_buffer, CompressedDictPrioritizedReplayBuffer) == (space == "dict")
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma, model.replay_buffer.alpha) == (3, 0.8, 0.5)
    assert model.replay_buffer.sample(4).discounts is not None
    assert options == model.replay_buffer_kwargs == {"alpha": 0.5}
    with pytest.raises(AlgorithmMismatchError, match="n_steps=2"):
        model_of(DQN, n_steps=3, replay_buffer_kwargs={"n_steps": 2})


@pytest.mark.same_without_extras
@pytest.mark.parametrize("name", ["DQN", "SAC", "QRDQN"])
def test_a_saved_model_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    algorithm = {"DQN": DQN, "SAC": SAC}.get(name) or contrib(name)
    beta: Any = (0.5, 1.0) if name == "SAC" else lambda left: 1 - left / 2
    model = model_of(algorithm, replay_buffer_kwargs={"beta": beta}, n_steps=2)
    model.learn(150)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    again = prioritized(algorithm).load(tmp_path / "model", env=model_of(algorithm).env)
    again.load_replay_buffer(tmp_path / "buffer")
    assert type(again) is type(model)
    finished = []
    for each in (model, again):
        each.set_random_seed(1)
        each.learn(120)
        each.replay_buffer.check()
        finished.append((parameters(each), each.replay_buffer.priorities))
    for pair in zip(finished[0][0], finished[1][0], strict=True):
        assert th.equal(*pair)
    assert np.array_equal(finished[0][1], finished[1][1])


def test_models_can_be_pickled() -> None:
    model = prioritized(DQN)("MlpPolicy", "CartPole-v1", learning_starts=20, device="cpu", buffer_size=100)
    model.learn(40)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is prioritized(DQN)
    again.learn(40)
    again.replay_buffer.check()


def test_a_failed_training_step_restores_the_buffer() -> None:
    model = model_of(SAC)
    model.learn(60)
    buffer, stock = model.replay_buffer, (SAC.train.__globals__["F"], F.mse_loss, F.smooth_l1_loss)
    before = buffer.priorities
    broken = model.critic.optimizer.step
    model.critic.optimizer.step = None
    with pytest.raises(TypeError):
        model.train(gradient_steps=1, batch_size=8)
    assert model.replay_buffer is buffer
    assert (SAC.train.__globals__["F"], F.mse_loss, F.smooth_l1_loss) == stock
    assert np.array_equal(buffer.priorities, before)
    model.critic.optimizer.step = broken
    model.learn(60)


def test_diverged_training_raises_a_named_error() -> None:
    model = model_of(DQN)
    model.learn(60)
    with th.no_grad():
        next(model.q_net.parameters()).fill_(np.nan)
    with pytest.raises(PriorityError, match="diverge"):
        model.train(gradient_steps=1, batch_size=8)
    model.replay_buffer.check()


def test_stock_algorithms_are_refused() -> None:
    options: dict[str, Any] = {"kind": lambda algorithm: algorithm}
    with pytest.raises(AlgorithmMismatchError, match=r"prioritized\(DQN\)"):
        model_of(DQN, replay_buffer_class=CompressedPrioritizedReplayBuffer, **options)
    saved = io.BytesIO()
    model_of(DQN).save_replay_buffer(saved)
    saved.seek(0)
    with pytest.raises(AlgorithmMismatchError, match=r"prioritized\(DQN\)"):
        model_of(DQN, **options).load_replay_buffer(saved)


def test_prioritised_algorithms_want_a_prioritised_buffer() -> None:
    with pytest.raises(AlgorithmMismatchError, match="got CompressedReplayBuffer"):
        model_of(DQN, replay_buffer_class=CompressedReplayBuffer)
    model = model_of(DQN)
    model.learn(60)
    model.replay_buffer = CompressedReplayBuffer(100, model.observation_space, model.action_space, device="cpu")
    with pytest.raises(AlgorithmMismatchError, match="a CompressedReplayBuffer was loaded"):
        model.train(gradient_steps=1, batch_size=8)


class Logging(DQN):
    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        super().train(gradient_steps, batch_size)


class Counting(prioritized(DQN)):  # type: ignore[misc]  # made at run time
    n_trained = 0

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        super().train(gradient_steps, batch_size)
        self.n_trained += 1


class Late(DQN):
    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.replay_buffer.sample(batch_size)  # type: ignore[union-attr]  # there by now
        if batch_size < 0:
            F.mse_loss(th.zeros(1), th.zeros(1))


def test_user_defined_algorithms() -> None:
    assert prioritized(prioritized(DQN)) is prioritized(DQN)
    assert prioritized(Counting) is Counting
    with pytest.raises(AlgorithmMismatchError, match=r"Logging a subclass of prioritized\(DQN\)"):
        prioritized(Logging)
    with pytest.raises(AlgorithmMismatchError, match="PPO has no replay buffer"):
        prioritized(PPO)
    model = model_of(DQN, kind=lambda algorithm: Counting)
    model.learn(100)
    assert model.n_trained > 10
    assert len(np.unique(model.replay_buffer.priorities)) > 10
    with pytest.raises(AlgorithmMismatchError, match="called none of"):
        model_of(DQN, kind=lambda algorithm: prioritized(Late)).learn(100)
