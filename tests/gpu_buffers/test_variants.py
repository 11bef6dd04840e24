"""n-step, prioritised and hindsight GPU buffers return the batches of SB3's buffers, or of ours on the CPU."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.compressed import (
    CompressedDictNStepReplayBuffer,
    CompressedDictPrioritizedReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    prioritized,
)
from sb3_extra_buffers.errors import (
    AlgorithmMismatchError,
    ArgumentError,
    EmptyBufferError,
    NoEpisodeError,
    PriorityError,
    SpecMismatchError,
    StaleIndexError,
)
from sb3_extra_buffers.files import load, save
from sb3_extra_buffers.gpu_buffers import GpuHerReplayBuffer, GpuNStepReplayBuffer, GpuPrioritizedReplayBuffer
from sb3_extra_buffers.stores import device_base
from tests.compressed.test_buffers_her import bits, walk
from tests.gpu_buffers.test_buffers import DEVICES, IMAGE, N_ENVS, SPACES, same, transitions
from tests.torture.interrupts import Injector

ACTIONS = spaces.Discrete(4)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A buffer_device; ``reference`` stores observations as on a GPU, in main memory."""
    if request.param != "reference":
        return str(request.param)
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
    return "cpu"


def on(place: str) -> dict[str, Any]:
    return {"device": "cuda" if place in ("cuda", "pinned") else "cpu", "n_envs": N_ENVS, "buffer_device": place}


def same_samples(ours: Any, theirs: Any, seed: int, size: int = 32, env: Any = None) -> None:
    batches = []
    for buffer in (ours, theirs):
        set_random_seed(seed)
        batches.append(buffer.sample(size, env))
    same(*batches)


# ---- n-step returns ----


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("name", ["image", "vector", "dict"])
@pytest.mark.parametrize("n_steps", [1, 3, 11, 19])
def test_n_step_batches_equal_sb3(place: str, method: str, name: str, n_steps: int) -> None:
    space = SPACES[name]
    options: dict[str, Any] = {"n_steps": n_steps, "gamma": 0.97}
    kind: Any = CompressedDictNStepReplayBuffer if name == "dict" else NStepReplayBuffer
    if name == "dict" and n_steps == 1:
        pytest.skip("SB3 has no such class, and ours samples no discounts then")
    theirs = kind(20 * N_ENVS, space, ACTIONS, "cpu", n_envs=N_ENVS, **options)
    ours = GpuNStepReplayBuffer(20 * N_ENVS, space, ACTIONS, compression_method=method, **options, **on(place))
    for step, transition in enumerate(transitions(space, 47)):
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(transition))
        if step % 5 == 4:
            same_samples(ours, theirs, step)
    again = pickle.loads(pickle.dumps(ours))
    same_samples(again, theirs, 7)


def test_n_step_rewards_are_normalised_one_by_one() -> None:
    from stable_baselines3.common.envs import IdentityEnvBox
    from stable_baselines3.common.vec_env import DummyVecEnv

    env: Any = VecNormalize(DummyVecEnv([lambda: IdentityEnvBox()] * N_ENVS))
    env.ret_rms.var = np.array(3.0)
    env.obs_rms.mean, env.obs_rms.var = np.full(1, 0.3), np.full(1, 2.0)
    space, actions = env.observation_space, env.action_space
    both: list[Any] = [
        kind(60, space, actions, "cpu", n_envs=N_ENVS) for kind in (GpuNStepReplayBuffer, NStepReplayBuffer)
    ]
    random = np.random.default_rng(0)
    for _ in range(30):
        obs, next_obs, action = (random.standard_normal((N_ENVS, 1)).astype(np.float32) for _ in range(3))
        step: Any = obs, next_obs, action, random.standard_normal(N_ENVS), random.random(N_ENVS) < 0.2, [{}] * N_ENVS
        for buffer in both:
            buffer.add(*copy.deepcopy(step))
    same_samples(both[0], both[1], 3, env=env)


@pytest.mark.parametrize("sampling", ["numpy", "device"])
def test_n_step_returns_by_hand(sampling: Any) -> None:
    buffer = GpuNStepReplayBuffer(8, SPACES["vector"], ACTIONS, "cpu", n_steps=3, gamma=0.5, sampling=sampling)
    for step in range(11):
        obs = np.full((1, 7), step, np.float32)
        buffer.add(obs, obs + 1, np.array([[step % 4]]), np.array([step]), np.array([step == 6]), [{}])
    batch = buffer.sample(200)
    expected = {3: (3 + 4 / 2 + 5 / 4, 6, 0), 4: (4 + 5 / 2 + 6 / 4, 7, 1), 5: (5 + 6 / 2, 7, 1), 6: (6, 7, 1)}
    expected |= {7: (7 + 8 / 2 + 9 / 4, 10, 0), 8: (8 + 9 / 2 + 10 / 4, 11, 0), 9: (9 + 10 / 2, 11, 0), 10: (10, 11, 0)}
    first = batch.observations[:, 0].int().tolist()
    assert set(first) == set(expected)
    for row, step in enumerate(first):
        found = batch.rewards[row].item(), batch.next_observations[row, 0].item(), batch.dones[row].item()
        assert found == expected[step]
        assert batch.actions[row] == step % 4
        assert batch.discounts[row] == 0.5 ** (found[1] - step)


@pytest.mark.filterwarnings("ignore:`n_steps=5` is ignored because")
def test_an_algorithm_with_other_n_steps_is_refused() -> None:
    with pytest.raises(AlgorithmMismatchError, match="n_steps"):
        DQN("MlpPolicy", "CartPole-v1", n_steps=5, replay_buffer_class=GpuNStepReplayBuffer, device="cpu")
    options = {"n_steps": 5, "gamma": 0.99}
    model = DQN(
        "MlpPolicy", "CartPole-v1", n_steps=5, replay_buffer_class=GpuNStepReplayBuffer, device="cpu",
        replay_buffer_kwargs=options, learning_starts=20,
    )  # fmt: skip
    model.learn(40)


# ---- priorities ----


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("name", ["image", "dict"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_prioritised_batches_equal_those_of_the_cpu_buffer(place: str, method: str, name: str, n_steps: int) -> None:
    space: Any = SPACES[name]
    options: dict[str, Any] = {"alpha": 0.7, "beta": 0.5, "n_steps": n_steps, "gamma": 0.95}
    kind: Any = CompressedDictPrioritizedReplayBuffer if name == "dict" else CompressedPrioritizedReplayBuffer
    theirs = kind(20 * N_ENVS, space, ACTIONS, "cpu", N_ENVS, **options)
    ours: Any = GpuPrioritizedReplayBuffer(
        20 * N_ENVS, space, ACTIONS, compression_method=method, **options, **on(place)
    )
    for step, transition in enumerate(transitions(space, 47)):
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(transition))
        if step % 5 == 4:
            batches = []
            for buffer in (ours, theirs):
                set_random_seed(step)
                batches.append(buffer.sample(16))
            a, b = batches
            np.testing.assert_array_equal(a.indices, b.indices)
            same(tuple(a[:5]), tuple(b[:5]))
            assert th.equal(a.weights.cpu(), b.weights)
            assert (a.discounts is None) == (n_steps == 1)
            assert n_steps == 1 or th.equal(a.discounts.cpu(), b.discounts)
            errors = th.rand(16)
            ours.update_priorities(a.indices, errors.to(ours.device))
            theirs.update_priorities(b.indices, errors)
            np.testing.assert_array_equal(ours.priorities, theirs.priorities)
            ours.check()
            assert ours.holds(a.indices).all()


def filled_with_priorities() -> GpuPrioritizedReplayBuffer:
    buffer = GpuPrioritizedReplayBuffer(20 * N_ENVS, IMAGE, ACTIONS, "cpu", N_ENVS, compression_method="delta")
    for transition in transitions(IMAGE, 33):
        buffer.add(*transition)
    buffer.update_priorities(buffer.sample(30).indices, np.linspace(0, 3, 30))
    return buffer


def test_priorities_are_copied_and_reset(tmp_path: Path) -> None:
    buffer = filled_with_priorities()
    save(buffer, tmp_path / "buffer")
    copies = pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer), load(tmp_path / "buffer")
    set_random_seed(5)
    expected = buffer.sample(40)
    for copied in copies:
        assert type(copied) is GpuPrioritizedReplayBuffer
        copied.check()
        np.testing.assert_array_equal(copied.priorities, buffer.priorities)
        set_random_seed(5)
        found = copied.sample(40)
        np.testing.assert_array_equal(found.indices, expected.indices)
        assert th.equal(found.observations, expected.observations)
        copied.reset()
        copied.check()
        assert not copied.holds(expected.indices).any()
        with pytest.raises(EmptyBufferError):
            copied.sample(1)
    assert buffer.priorities.any()


def test_bad_priorities_are_reported() -> None:
    buffer = filled_with_priorities()
    indices = buffer.sample(4).indices
    before = buffer.priorities
    with pytest.raises(PriorityError):
        buffer.update_priorities(indices, np.array([1, 2, 3, -1]))
    with pytest.raises(StaleIndexError):
        buffer.update_priorities(indices * 0, np.ones(4))
    with pytest.raises(ArgumentError, match="sampling"):
        GpuPrioritizedReplayBuffer(10, IMAGE, ACTIONS, "cpu", sampling="device")
    with pytest.raises(AlgorithmMismatchError, match="prioritized"):
        DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=GpuPrioritizedReplayBuffer, device="cpu")
    np.testing.assert_array_equal(buffer.priorities, before)


def test_a_step_interrupted_anywhere_keeps_priorities_and_transitions_together() -> None:
    saved = pickle.dumps(filled_with_priorities())
    (step,) = transitions(IMAGE, 1, seed=5)
    whole = pickle.loads(saved)
    with Injector() as counter:
        whole.add(*copy.deepcopy(step))
    for point in range(1, counter.count + 1, max(counter.count // 50, 1)):
        buffer = pickle.loads(saved)
        before = buffer.n_added
        injector = Injector(point, KeyboardInterrupt())
        try:
            with injector:
                buffer.add(*copy.deepcopy(step))
        except KeyboardInterrupt:
            pass
        buffer.check()
        if buffer.n_added == before:
            buffer.add(*copy.deepcopy(step))
        np.testing.assert_array_equal(buffer.priorities, whole.priorities)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_prioritized_dqn_trains_as_with_the_cpu_buffer(n_steps: int) -> None:
    weights = []
    for kind in (GpuPrioritizedReplayBuffer, CompressedPrioritizedReplayBuffer):
        model = prioritized(DQN)(
            "MlpPolicy", "CartPole-v1", buffer_size=200, learning_starts=30, device="cpu", seed=1, n_steps=n_steps,
            replay_buffer_class=kind,
        )  # fmt: skip
        model.learn(120)
        assert type(model.replay_buffer) is kind
        weights.append(th.cat([part.flatten() for part in model.policy.parameters()]))
    assert th.equal(*weights)


# ---- hindsight ----


def her(kind: Any, env: Any, **options: Any) -> Any:
    spaces_ = env.observation_space, env.action_space
    return kind(40 * env.num_envs, *spaces_, env=env, n_envs=env.num_envs, **options)


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize("kind", [{}, {"image_obs_space": True}, {"discrete_obs_space": True}])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_batches_equal_sb3(place: str, kind: Any, strategy: str) -> None:
    env = bits(2, **kind)
    options = {"goal_selection_strategy": strategy, "n_sampled_goal": 3, "copy_info_dict": strategy == "final"}
    where = {key: value for key, value in on(place).items() if key != "n_envs"}
    ours, theirs = her(GpuHerReplayBuffer, env, **options, **where), her(HerReplayBuffer, env, device="cpu", **options)
    for number, step in enumerate(walk(env, 92)):
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(step))
        if number >= 10 and number % 4 == 0:
            same_samples(ours, theirs, number, 20)
    for name in ("ep_start", "ep_length", "_current_ep_start"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_a_hindsight_buffer_is_copied_saved_and_reset(tmp_path: Path) -> None:
    env = bits(2)
    kinds = (GpuHerReplayBuffer, HerReplayBuffer)
    ours, theirs = (her(kind, env, device="cpu", copy_info_dict=True) for kind in kinds)
    with pytest.raises(NoEpisodeError):
        ours.sample(3)
    *steps, last = walk(env, 62)
    for step in steps:
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(step))
    with pytest.raises(SpecMismatchError):
        ours.add(*last[:5], [{}])
    save(ours, tmp_path / "buffer")
    for copied in (pickle.loads(pickle.dumps(ours)), load(tmp_path / "buffer")):
        assert type(copied) is GpuHerReplayBuffer
        copied.set_env(env)
        other = copy.deepcopy(theirs)
        other.set_env(env)
        same_samples(copied, theirs, 3)
        for buffer in (copied, other):
            with pytest.warns(UserWarning, match="truncated"):
                buffer.truncate_last_trajectory()
        same_samples(copied, other, 4)
        copied.reset()
        with pytest.raises(NoEpisodeError):
            copied.sample(3)


def test_hindsight_batches_are_normalised_as_by_sb3() -> None:
    env = bits(2, continuous=True)
    normalizing = VecNormalize(env, norm_obs=False)
    normalizing.ret_rms.var = np.array(3.0)
    ours, theirs = (her(kind, env, device="cpu") for kind in (GpuHerReplayBuffer, HerReplayBuffer))
    for step in walk(env, 30):
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(step))
    same_samples(ours, theirs, 5, env=normalizing)


def test_hindsight_dqn_trains_as_with_sb3() -> None:
    from stable_baselines3.common.envs import BitFlippingEnv

    weights = []
    for kind in (GpuHerReplayBuffer, HerReplayBuffer):
        env = BitFlippingEnv(n_bits=4, continuous=False)
        model = DQN(
            "MultiInputPolicy", env, replay_buffer_class=kind, learning_starts=20, buffer_size=200, seed=0, device="cpu"
        )
        model.learn(100)
        weights.append(th.cat([part.flatten() for part in model.policy.parameters()]))
    assert th.equal(*weights)
