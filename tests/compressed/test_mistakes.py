"""The mistakes of a first hour: each error names what to write instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

import sb3_extra_buffers.compressed as module
from sb3_extra_buffers.compressed import (
    CompressedArray,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    compressed,
)
from sb3_extra_buffers.errors import (
    AlgorithmMismatchError,
    ArgumentError,
    CodecOptionError,
    IndexOutOfRangeError,
    LayoutError,
    OutOfMemoryError,
    SpecMismatchError,
)
from sb3_extra_buffers.gpu_buffers import GpuNStepReplayBuffer, GpuReplayBuffer, GpuRolloutBuffer
from tests.contracts.buffer import ACTIONS, SPACES
from tests.contracts.vec_env import make_envs

DISCRETE = ACTIONS["discrete"]
VECTOR = SPACES["vector"]
DICT = spaces.Dict({"speed": VECTOR, "gear": SPACES["discrete"]})
CONTRIB = ("Maskable", "Recurrent")
BUFFERS = [name for name in module.__all__ if name.startswith("Compressed") and name.endswith("Buffer")]


def make(name: str, space: Any) -> Any:
    if any(kind in name for kind in CONTRIB):
        pytest.importorskip("sb3_contrib")
    options: Any = {"env": make_envs(space, DISCRETE, 1)} if "Her" in name else {}
    if "Recurrent" in name:
        options["hidden_state_shape"] = (20, 1, 1, 4)
    return getattr(module, name)(20, space, DISCRETE, device="cpu", **options)


@pytest.mark.parametrize("name", BUFFERS)
def test_the_wrong_kind_of_space_names_the_class_to_use(name: str) -> None:
    if "Dict" in name or "Her" in name:
        with pytest.raises(ArgumentError, match=f"{name} must be used with Dict obs space only, got Box") as caught:
            make(name, VECTOR)
    else:
        with pytest.raises(ArgumentError, match=f"{name} cannot hold Dict observations.* gear, speed") as caught:
            make(name, DICT)
    if "Her" in name:
        return
    other = str(caught.value).partition("; use ")[2]
    assert other in BUFFERS
    assert other.replace("Dict", "") == name.replace("Dict", "")
    make(other, VECTOR if "Dict" in name else DICT)


@pytest.mark.parametrize("name", ["CompressedReplayBuffer", "CompressedRolloutBuffer"])
@pytest.mark.parametrize(
    ("argument", "value"), [("n_envs", 0), ("n_envs", 1.5), ("buffer_size", 1e6), ("buffer_size", -1)]
)
def test_sizes_must_be_counts(name: str, argument: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{argument} must be an integer of at least .*, got {value}"):
        getattr(module, name)(
            **{"buffer_size": 20, "n_envs": 1, argument: value}, observation_space=VECTOR, action_space=DISCRETE
        )


@pytest.mark.parametrize(
    "cls", [module.CompressedReplayBuffer, module.CompressedNStepReplayBuffer, GpuNStepReplayBuffer]
)
@pytest.mark.parametrize("gamma", ["0.99", None, lambda progress_remaining: 0.99])
def test_gamma_must_be_a_number(cls: Any, gamma: Any) -> None:
    with pytest.raises(ArgumentError, match="gamma must be a number, got"):
        cls(20, VECTOR, DISCRETE, device="cpu", n_steps=3, gamma=gamma)


@pytest.mark.parametrize("space", [VECTOR, SPACES["frames first"]], ids=["vector", "images"])
def test_a_buffer_for_which_there_is_no_memory(space: Any) -> None:
    with pytest.raises(OutOfMemoryError, match=f"not enough memory for buffer_size={1 << 47}"):
        module.CompressedReplayBuffer(1 << 47, space, DISCRETE, device="cpu")


@pytest.mark.parametrize(("base", "space"), [(ReplayBuffer, DICT), (DictReplayBuffer, VECTOR)])
def test_no_class_is_made_up_for_your_own(base: Any, space: Any) -> None:
    class Mine(base):  # type: ignore[misc]  # any class
        pass

    for cls in (compressed(Mine), type("Yours", (compressed(base),), {})):
        with pytest.raises(ArgumentError, match="Dict obs") as caught:
            cls(20, space, DISCRETE, "cpu")
        assert "; use " not in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "space", "wrong", "right"),
    [
        (DQN, VECTOR, "CompressedRolloutBuffer", "replay_buffer_class=CompressedReplayBuffer"),
        (DQN, DICT, "CompressedDictRolloutBuffer", "replay_buffer_class=CompressedDictReplayBuffer"),
        (SAC, VECTOR, GpuRolloutBuffer, "replay_buffer_class=GpuReplayBuffer"),
        (SAC, DICT, GpuRolloutBuffer, "replay_buffer_class=GpuReplayBuffer"),
        (PPO, VECTOR, "CompressedReplayBuffer", "rollout_buffer_class=CompressedRolloutBuffer"),
        (PPO, VECTOR, "CompressedNStepReplayBuffer", "rollout_buffer_class=CompressedRolloutBuffer"),
        (A2C, DICT, "CompressedDictReplayBuffer", "rollout_buffer_class=CompressedDictRolloutBuffer"),
        (PPO, VECTOR, GpuReplayBuffer, "rollout_buffer_class=GpuRolloutBuffer"),
        (PPO, VECTOR, "CompressedRecurrentRolloutBuffer", "rollout_buffer_class=CompressedRolloutBuffer"),
    ],
)
def test_the_wrong_kind_of_buffer_names_the_class_to_use(algorithm: Any, space: Any, wrong: Any, right: str) -> None:
    if "Recurrent" in str(wrong):
        pytest.importorskip("sb3_contrib")
    wrong = getattr(module, wrong) if isinstance(wrong, str) else wrong
    argument, _, name = right.partition("=")
    actions = ACTIONS["box"] if algorithm is SAC else DISCRETE
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    env = make_envs(space, actions, 1)
    text = f"{algorithm.__name__} cannot train with a {wrong.__name__}; pass {right}$"
    with pytest.raises(AlgorithmMismatchError, match=text):
        algorithm(policy, env, device="cpu", **{argument: wrong})
    classes = {each.__name__: each for each in (GpuReplayBuffer, GpuRolloutBuffer)}
    found = classes.get(name) or getattr(module, name)
    algorithm(policy, env, device="cpu", **{argument: found}, **({"buffer_size": 50} if "replay" in argument else {}))


@pytest.mark.parametrize("space", [VECTOR, DICT])
def test_masks_need_a_buffer_for_masks(space: Any) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    kind = "Dict" if space is DICT else ""
    policy, env = "MultiInputPolicy" if kind else "MlpPolicy", make_envs(space, DISCRETE, 1)
    right = f"CompressedMaskable{kind}RolloutBuffer"
    for wrong in (getattr(module, f"Compressed{kind}RolloutBuffer"), GpuRolloutBuffer):
        with pytest.raises(AlgorithmMismatchError, match=f"pass rollout_buffer_class={right}$"):
            contrib.MaskablePPO(policy, env, rollout_buffer_class=wrong)
    model = contrib.MaskablePPO(policy, env, rollout_buffer_class=getattr(module, right))
    assert type(model.rollout_buffer).__name__ == right


def test_an_algorithm_is_no_buffer() -> None:
    with pytest.raises(
        LayoutError, match="PPO is an algorithm; pass replay_buffer_class or rollout_buffer_class to it"
    ):
        compressed(PPO)


@pytest.mark.parametrize("pos", [20, 1000, -1])
@pytest.mark.parametrize("space", [VECTOR, DICT, SPACES["frames first"]], ids=["vector", "dict", "images"])
def test_a_position_outside_the_buffer_is_not_written_to(space: Any, pos: int) -> None:
    buffer = make("CompressedDictReplayBuffer" if space is DICT else "CompressedReplayBuffer", space)
    obs = (
        {key: np.asarray(part.sample())[None] for key, part in space.items()} if space is DICT else space.sample()[None]
    )
    step: Any = obs, obs, np.zeros((1, 1), np.int64), np.ones(1, np.float32), np.zeros(1, bool), [{}]
    for _ in range(3):
        buffer.add(*step)

    buffer.pos = pos
    with pytest.raises(IndexOutOfRangeError, match=f"pos is {pos}, but the buffer has steps 0 to 19"):
        buffer.add(*step)

    buffer.pos = 3
    buffer.add(*step)
    assert (buffer.pos, buffer.rewards.sum()) == (4, 4)


@pytest.mark.parametrize("space", [VECTOR, DICT, SPACES["frames first"]], ids=["vector", "dict", "images"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_done_that_is_no_number_is_refused(space: Any, value: float) -> None:
    obs = (
        {key: np.asarray(part.sample())[None] for key, part in space.items()} if space is DICT else space.sample()[None]
    )
    action, reward, done = np.zeros((1, 1), np.int64), np.ones(1, np.float32), np.zeros(1, np.float32)
    kind = "Dict" if space is DICT else ""
    replay, rollout = make(f"Compressed{kind}ReplayBuffer", space), make(f"Compressed{kind}RolloutBuffer", space)
    tensor = th.zeros(1)
    replay.add(obs, obs, action, reward, done, [{}])
    rollout.add(obs, action, reward, done, tensor, tensor)

    with pytest.raises(SpecMismatchError, match=r"done holds .*neither true nor false"):
        replay.add(obs, obs, action, reward, np.array([value]), [{}])
    with pytest.raises(SpecMismatchError, match=r"'TimeLimit\.truncated' holds"):
        replay.add(obs, obs, action, reward, done, [{"TimeLimit.truncated": value}])
    with pytest.raises(SpecMismatchError, match="episode_start holds"):
        rollout.add(obs, action, reward, np.array([value]), tensor, tensor)
    with pytest.raises(SpecMismatchError, match="dones holds"):
        rollout.compute_returns_and_advantage(tensor, np.array([value]))
    assert (replay.pos, replay.dones.sum(), rollout.pos) == (1, 0, 1)


DICT_CLASSES = ["CompressedDictReplayBuffer", "CompressedDictRolloutBuffer"]
IMAGE_AND_VECTOR = spaces.Dict({"image": spaces.Box(0, 255, (24, 24, 3), np.uint8), "speed": spaces.Box(0, 1, (3,))})


@pytest.mark.parametrize("name", DICT_CLASSES)
@pytest.mark.parametrize("method", ["delta", {"image": "delta"}, {"image": "delta", "speed": "none"}])
def test_options_of_a_method_are_not_for_vectors(name: str, method: Any) -> None:
    options = {"compression_method": method, "compression_kwargs": {"frames": 4}}
    getattr(module, name)(10, IMAGE_AND_VECTOR, ACTIONS["discrete"], device="cpu", **options)
    options["compression_kwargs"] = {"farmes": 4}
    with pytest.raises(CodecOptionError, match="farmes"):
        getattr(module, name)(10, IMAGE_AND_VECTOR, ACTIONS["discrete"], device="cpu", **options)


@pytest.mark.parametrize("name", DICT_CLASSES)
@pytest.mark.parametrize(("method", "match"), [({"imgae": "delta"}, "'imgae'.*'image'"), (None, "None")])
def test_methods_are_for_keys_that_exist(name: str, method: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        getattr(module, name)(10, IMAGE_AND_VECTOR, ACTIONS["discrete"], device="cpu", compression_method=method)


@pytest.mark.parametrize("name", DICT_CLASSES)
@pytest.mark.parametrize(
    ("dtypes", "match"),
    [
        (np.uint8, "^dtypes must be a dict"),
        ({"image": np.uint8}, "^dtypes of key 'image' must be a dict"),
        ({"imgae": {"elem_type": np.uint8}}, "dtypes has a dtype for 'imgae', but .* 'image', 'speed'"),
    ],
)
def test_dtypes_are_mappings_for_keys_that_exist(name: str, dtypes: Any, match: str) -> None:
    with pytest.raises((ArgumentError, SpecMismatchError), match=match):
        getattr(module, name)(10, IMAGE_AND_VECTOR, ACTIONS["discrete"], device="cpu", dtypes=dtypes)


@pytest.mark.parametrize("make", [CompressedReplayBuffer, CompressedRolloutBuffer, GpuReplayBuffer, GpuRolloutBuffer])
def test_dtypes_are_a_mapping(make: Any) -> None:
    with pytest.raises(SpecMismatchError, match=r"^dtypes must be a dict"):
        make(10, VECTOR, DISCRETE, device="cpu", dtypes=np.uint8)
    with pytest.raises(SpecMismatchError, match=r"^dtypes must be a dict"):
        CompressedArray(10, (24, 24, 3), dtypes=np.uint8)  # type: ignore[arg-type]  # on purpose
