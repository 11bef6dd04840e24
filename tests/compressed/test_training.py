"""Training with compressed buffers ends with the weights that SB3's own buffers lead to, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_extra_buffers._sb3.report import ReportingBuffer
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    compressed,
    has_numba,
)
from sb3_extra_buffers.errors import AlgorithmMismatchError
from sb3_extra_buffers.stores.view import StoreView
from tests.contracts.buffer import SPACES
from tests.contracts.vec_env import make_envs

IMAGE = spaces.Box(0, 255, (4, 36, 36), np.uint8)
VECTOR = SPACES["vector"]
DISCRETE, BOX = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)
STEPS = 520
# filled, and overwritten more than once
RING: dict[str, Any] = {"buffer_size": 200, "learning_starts": 60, "batch_size": 16}


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    if not has_numba() and not {"DQN-image-1", "PPO-image-4"} & {request.node.name.partition("[")[2].rstrip("]")}:
        pytest.skip("without numba, one replay and one rollout buffer will do")
    # nets as small as these only get slower by more
    before = th.get_num_threads()
    th.set_num_threads(1)
    yield
    th.set_num_threads(before)


class Glance(BaseFeaturesExtractor):
    """The smallest thing that looks at every pixel."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__(space, 8)
        self.look = th.nn.Linear(int(np.prod(space.shape or ())), 8)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        features: th.Tensor = self.look(observations.flatten(1)).tanh()
        return features


def tiny(space: spaces.Space[Any]) -> dict[str, Any]:
    small: dict[str, Any] = {"net_arch": [8]}
    return small | ({"features_extractor_class": Glance} if space is IMAGE else {})


def weights(model: Any) -> dict[str, th.Tensor]:
    found: dict[str, th.Tensor] = model.policy.state_dict()
    return found


def assert_same_weights(ours: Any, theirs: Any) -> None:
    mine, other = weights(ours), weights(theirs)
    assert mine.keys() == other.keys()
    for name in other:
        assert th.equal(mine[name], other[name]), f"{name} differs"


def train(algorithm: Any, envs: VecEnv, policy: str = "MlpPolicy", **arguments: Any) -> Any:
    with warnings.catch_warnings():
        # SB3 says this whenever n_steps and a buffer class are given, whether or not they agree
        warnings.filterwarnings("ignore", "`n_steps=")
        model = algorithm(policy, envs, seed=3, device="cpu", **arguments)
    before = {name: tensor.clone() for name, tensor in weights(model).items()}
    model.learn(STEPS)
    assert any(not th.equal(before[name], tensor) for name, tensor in weights(model).items()), "nothing was learnt"
    return model


def both(**arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for ours, and none for SB3's."""
    return arguments, {}


OFF_POLICY: dict[str, tuple[Any, spaces.Space[Any], dict[str, Any]]] = {
    "DQN": (DQN, DISCRETE, {"target_update_interval": 50, "train_freq": 8}),
    "SAC": (SAC, BOX, {"train_freq": 16}),
    "TD3": (TD3, BOX, {"train_freq": 16}),
}
ON_POLICY: dict[str, tuple[Any, dict[str, Any]]] = {
    "PPO": (PPO, {"n_steps": 32, "batch_size": 32, "n_epochs": 2}),
    "A2C": (A2C, {"n_steps": 8}),
}


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("space", [IMAGE, VECTOR], ids=["image", "vector"])
@pytest.mark.parametrize("name", [*OFF_POLICY, "QRDQN"])
def test_off_policy(name: str, space: spaces.Space[Any], n_envs: int) -> None:
    if name == "QRDQN":
        algorithm: Any = pytest.importorskip("sb3_contrib").QRDQN
        actions, arguments = OFF_POLICY["DQN"][1:]
    else:
        algorithm, actions, arguments = OFF_POLICY[name]
    arguments = {**arguments, **RING, "policy_kwargs": tiny(space)}
    ours, theirs = (
        train(algorithm, make_envs(space, actions, n_envs), **arguments, **more)
        for more in both(replay_buffer_class=CompressedReplayBuffer)
    )
    assert isinstance(ours.replay_buffer.observations, StoreView) == (space is IMAGE or has_numba())
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("space", [IMAGE, VECTOR], ids=["image", "vector"])
@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy(name: str, space: spaces.Space[Any], n_envs: int) -> None:
    algorithm, arguments = ON_POLICY[name]
    arguments = {**arguments, "policy_kwargs": tiny(space)}
    ours, theirs = (
        train(algorithm, make_envs(space, DISCRETE, n_envs), **arguments, **more)
        for more in both(rollout_buffer_class=CompressedRolloutBuffer)
    )
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_dict_observations(algorithm: Any) -> None:
    space = spaces.Dict({"image": IMAGE, "vector": VECTOR, "number": spaces.Discrete(5)})
    arguments: dict[str, Any] = {"policy_kwargs": {"net_arch": [8], "features_extractor_kwargs": {"cnn_output_dim": 8}}}
    arguments |= ON_POLICY["PPO"][1] if algorithm is PPO else {**RING, "train_freq": 8}
    name, cls = (
        ("rollout_buffer_class", CompressedDictRolloutBuffer)
        if algorithm is PPO
        else ("replay_buffer_class", CompressedDictReplayBuffer)
    )
    ours, theirs = (
        train(algorithm, make_envs(space, DISCRETE, 2), "MultiInputPolicy", **arguments, **more)
        for more in both(**{name: cls})
    )
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("n_envs", [1, 4])
def test_her(n_envs: int) -> None:
    def envs() -> DummyVecEnv:
        return DummyVecEnv([lambda: BitFlippingEnv(n_bits=5, continuous=True) for _ in range(n_envs)])

    arguments: dict[str, Any] = {**RING, "train_freq": 16, "policy_kwargs": {"net_arch": [8]}}
    ours, theirs = (
        train(SAC, envs(), "MultiInputPolicy", replay_buffer_class=cls, **arguments)
        for cls in (CompressedHerReplayBuffer, HerReplayBuffer)
    )
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("space", [IMAGE, VECTOR], ids=["image", "vector"])
def test_masks(space: spaces.Space[Any]) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    from sb3_extra_buffers.compressed import CompressedMaskableRolloutBuffer

    arguments: dict[str, Any] = {**ON_POLICY["PPO"][1], "policy_kwargs": tiny(space)}
    ours, theirs = (
        train(contrib.MaskablePPO, make_envs(space, DISCRETE, 4), **arguments, **more)
        for more in both(rollout_buffer_class=CompressedMaskableRolloutBuffer)
    )
    assert type(ours.rollout_buffer) is CompressedMaskableRolloutBuffer
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("kind", ["image", "vector", "dict"])
def test_recurrent_policies(kind: str) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    from sb3_extra_buffers.compressed import (
        CompressedRecurrentDictRolloutBuffer,
        CompressedRecurrentRolloutBuffer,
        use_rollout_buffer,
    )

    space = {"image": IMAGE, "vector": VECTOR, "dict": spaces.Dict({"image": IMAGE, "vector": VECTOR})}[kind]
    ours_class = CompressedRecurrentDictRolloutBuffer if kind == "dict" else CompressedRecurrentRolloutBuffer
    policy = "MultiInputLstmPolicy" if kind == "dict" else "MlpLstmPolicy"
    small = {**tiny(space), "lstm_hidden_size": 4}
    if kind == "dict":
        small["features_extractor_kwargs"] = {"cnn_output_dim": 8}
    arguments: dict[str, Any] = {
        "n_steps": 32,
        "batch_size": 64,
        "n_epochs": 1,
        "policy_kwargs": small,
        "seed": 3,
        "device": "cpu",
    }
    models = [contrib.RecurrentPPO(policy, make_envs(space, DISCRETE, 4), **arguments) for _ in range(2)]
    use_rollout_buffer(models[0], ours_class, compression_method="delta")
    for model in models:
        model.set_random_seed(3)
        model.learn(STEPS)
    assert type(models[0].rollout_buffer) is ours_class
    assert models[0].rollout_buffer.memory_usage().total > 0
    assert_same_weights(*models)


@pytest.mark.parametrize("kind", ["image", "dict"])
def test_a_recurrent_model_keeps_its_compressed_buffer_when_it_is_loaded(kind: str, tmp_path: Path) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    space = {"image": IMAGE, "dict": spaces.Dict({"image": IMAGE, "vector": VECTOR})}[kind]
    policy = "MultiInputLstmPolicy" if kind == "dict" else "MlpLstmPolicy"
    arguments: dict[str, Any] = {"n_steps": 32, "batch_size": 64, "n_epochs": 1, "seed": 3, "device": "cpu"}
    arguments["policy_kwargs"] = {"net_arch": [4], "lstm_hidden_size": 4}
    plain = contrib.RecurrentPPO
    ours_class = compressed(plain)
    assert ours_class is compressed(plain) is compressed(ours_class)
    options = {"compression_method": "delta"}
    ours = ours_class(policy, make_envs(space, DISCRETE, 4), **arguments, rollout_buffer_kwargs=options)
    theirs = plain(policy, make_envs(space, DISCRETE, 4), **arguments)
    for model in (ours, theirs):
        model.set_random_seed(3)
        model.learn(128)
    assert_same_weights(ours, theirs)
    ours.save(tmp_path / "model")
    loaded = ours_class.load(tmp_path / "model", env=make_envs(space, DISCRETE, 4))
    assert type(loaded.rollout_buffer) is type(ours.rollout_buffer)
    assert issubclass(type(loaded.rollout_buffer), ReportingBuffer)
    loaded.learn(128)
    assert loaded.rollout_buffer.memory_usage().codecs["image" if kind == "dict" else ""] == "delta"


def test_normalized_observations() -> None:
    arguments: dict[str, Any] = {**RING, "policy_kwargs": tiny(IMAGE)}
    ours, theirs = (
        train(DQN, VecNormalize(make_envs(IMAGE, DISCRETE, 2)), **arguments, **more)
        for more in both(replay_buffer_class=CompressedReplayBuffer)
    )
    # what the environment gave is stored, not what the statistics of that moment made of it
    np.testing.assert_array_equal(ours.replay_buffer.observations, theirs.replay_buffer.observations)
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("how", ["argument", "class"])
def test_n_steps(how: str) -> None:
    arguments: dict[str, Any] = {**RING, "n_steps": 3, "gamma": 0.9, "policy_kwargs": tiny(IMAGE)}
    cls = CompressedReplayBuffer if how == "argument" else CompressedNStepReplayBuffer
    more: dict[str, Any] = {"replay_buffer_class": cls, "replay_buffer_kwargs": {"n_steps": 3, "gamma": 0.9}}
    ours, theirs = (train(DQN, make_envs(IMAGE, DISCRETE, 2), **arguments, **each) for each in (more, {}))
    assert type(theirs.replay_buffer) is NStepReplayBuffer
    assert_same_weights(ours, theirs)


@pytest.mark.filterwarnings("ignore:`n_steps=")
@pytest.mark.parametrize("cls", [CompressedReplayBuffer, CompressedNStepReplayBuffer])
@pytest.mark.parametrize("kwargs", [None, {"n_steps": 2, "gamma": 0.99}, {"n_steps": 3, "gamma": 0.5}])
def test_n_steps_of_the_algorithm_must_reach_the_buffer(cls: Any, kwargs: dict[str, Any] | None) -> None:
    if cls is CompressedNStepReplayBuffer and kwargs is None:
        kwargs = {"n_steps": 4}
    more: dict[str, Any] = {"replay_buffer_class": cls, "replay_buffer_kwargs": kwargs}
    with pytest.raises(AlgorithmMismatchError, match=r"replay_buffer_kwargs=dict\(n_steps=3, gamma=0.99\)"):
        DQN("MlpPolicy", make_envs(VECTOR, DISCRETE, 1), n_steps=3, **more)


def test_optimized_memory_trains_as_the_dense_buffer_does_until_it_is_full() -> None:
    arguments: dict[str, Any] = {
        "buffer_size": 1000,
        "learning_starts": 60,
        "batch_size": 16,
        "policy_kwargs": tiny(IMAGE),
    }
    more: dict[str, Any] = {"replay_buffer_class": CompressedReplayBuffer, "optimize_memory_usage": True}
    ours, theirs = (train(DQN, make_envs(IMAGE, DISCRETE, 2), **arguments, **each) for each in (more, {}))
    assert ours.replay_buffer.optimize_memory_usage
    assert_same_weights(ours, theirs)
    # a second run ends the trajectory that the first one left
    with pytest.warns(UserWarning, match="last trajectory in the replay buffer will be truncated"):
        ours.learn(20)


def test_arguments_of_the_user_are_not_changed() -> None:
    kwargs = {"compression_method": "delta"}
    DQN(
        "MlpPolicy",
        make_envs(VECTOR, DISCRETE, 1),
        buffer_size=50,
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs=kwargs,
    )
    assert kwargs == {"compression_method": "delta"}
