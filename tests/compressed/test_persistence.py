"""Compressed buffers survive pickle, copies, SB3's own saving and loading, and processes that fork or spawn."""

from __future__ import annotations

import copy
import io
import pickle
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from sb3_extra_buffers._sb3 import base
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedHerReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    compressed,
)
from sb3_extra_buffers.errors import (
    AlgorithmMismatchError,
    FileFormatError,
    SpecMismatchError,
    UnsupportedVersionError,
)
from sb3_extra_buffers.files import load
from sb3_extra_buffers.gpu_buffers import BaseGpuBuffer, GpuReplayBuffer, GpuRolloutBuffer
from tests.contracts.buffer import (
    ACTIONS,
    SPACES,
    assert_same_contents,
    assert_same_rollout,
    assert_same_samples,
    contents,
    play,
    sample,
)
from tests.contracts.store import method_params, run_fresh
from tests.contracts.vec_env import GameEnv, make_envs

DISCRETE = ACTIONS["discrete"]
IMAGE = SPACES["frames first"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # nets as small as these only get slower by more
    before = th.get_num_threads()
    th.set_num_threads(1)
    yield
    th.set_num_threads(before)


class Noted(ReplayBuffer):
    """A buffer of someone's own, with a column of its own."""

    def __init__(self, *args: Any, note: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = note
        self.notes = np.zeros((self.buffer_size, self.n_envs))

    def add(self, *args: Any, **kwargs: Any) -> None:
        self.notes[self.pos] = self.note
        super().add(*args, **kwargs)


def filled(n_steps: int = 46, n_envs: int = 2, space: Any = IMAGE, cls: Any = None, **options: Any) -> Any:
    made = cls or (CompressedDictReplayBuffer if isinstance(space, spaces.Dict) else CompressedReplayBuffer)
    buffer = made(20 * n_envs, space, DISCRETE, device="cpu", n_envs=n_envs, **options)
    for step in play(space, n_envs, n_steps):
        buffer.add(*step)
    return buffer


def dqn(envs: Any, cls: Any = CompressedReplayBuffer, **options: Any) -> DQN:
    is_dict = isinstance(envs.observation_space, spaces.Dict)
    small = {"net_arch": [8], "features_extractor_kwargs": {"cnn_output_dim": 8} if is_dict else {}}
    return DQN(
        "MultiInputPolicy" if is_dict else "MlpPolicy",
        envs,
        buffer_size=40,
        learning_starts=8,
        batch_size=4,
        seed=0,
        device="cpu",
        policy_kwargs=small,
        replay_buffer_class=cls,
        **options,
    )


def copies(buffer: Any) -> list[Any]:
    return [
        pickle.loads(pickle.dumps(buffer)),
        pickle.loads(pickle.dumps(buffer, protocol=pickle.HIGHEST_PROTOCOL)),
        copy.deepcopy(buffer),
        copy.copy(buffer),
    ]


@pytest.mark.parametrize("n_steps", [0, 3, 46])
@pytest.mark.parametrize("method", method_params("auto", "delta", "zstd-5", "gzip", "none"))
def test_copies_are_equal_and_independent(method: str, n_steps: int) -> None:
    buffer = filled(n_steps, compression_method=method)
    before = contents(buffer)
    for made in copies(buffer):
        assert type(made) is type(buffer)
        assert_same_contents(before, contents(made))
        if n_steps:
            assert_same_samples(made, buffer)
        # both go on as the one would have, and neither is changed by the other
        for step in play(IMAGE, 2, 30, seed=1):
            made.add(*step)
        assert_same_contents(before, contents(buffer))
    again = pickle.loads(pickle.dumps(buffer))
    for step in play(IMAGE, 2, 30, seed=2):
        buffer.add(*step)
        again.add(*step)
    assert_same_samples(again, buffer)
    assert_same_contents(contents(again), contents(buffer))


@pytest.mark.parametrize("name", ["vector", "dict", "discrete"])
def test_copies_of_every_kind(name: str) -> None:
    buffer = filled(space=SPACES[name])
    for made in copies(buffer):
        assert_same_samples(made, buffer)


def test_copies_of_a_rollout() -> None:
    buffer = CompressedRolloutBuffer(17, IMAGE, DISCRETE, "cpu", n_envs=2)
    for step in play(IMAGE, 2, 17):
        buffer.add(step.obs, step.action, step.reward, step.done, th.zeros(2), th.ones(2))
    for made in copies(buffer):
        assert_same_rollout(made, buffer, 8)
        # and once its columns are flat
        assert_same_rollout(pickle.loads(pickle.dumps(made)), buffer, 8)
        made.reset()
        made.add(step.obs, step.action, step.reward, step.done, th.zeros(2), th.ones(2))
        np.testing.assert_array_equal(made.observations[0], step.obs)


def test_a_deep_copy_does_not_decode_observations() -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = CompressedReplayBuffer(600, space, DISCRETE, "cpu", n_envs=2, compression_method="delta")
    frame = np.zeros((2, 4, 84, 84), np.uint8)
    for number in range(300):
        after = np.roll(frame, -1, axis=1)
        after[:, 3] = frame[:, 3]
        after[:, 3, number % 84, :4] = number % 251
        buffer.add(frame, after, np.zeros(2, np.int64), np.zeros(2), np.zeros(2, bool), [{}, {}])
        frame = after
    dense = buffer.memory_usage().dense_observations // 2
    for make in (copy.deepcopy, pickle.dumps):
        tracemalloc.start()
        made = make(buffer)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert made is not None
        assert peak < 0.1 * dense, f"{peak / dense:.1%} of a dense copy on the way"


def test_copies_keep_the_store_shared_by_observations_and_next_observations() -> None:
    made = copy.deepcopy(filled())
    assert made.observations.store is made.next_observations.store


@pytest.mark.parametrize("kind", ["path", "file"])
@pytest.mark.parametrize("name", ["box", "dict"])
def test_sb3_saves_and_loads_buffers(tmp_path: Path, name: str, kind: str) -> None:
    # SB3's network for images takes none that are smaller
    image = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    space = spaces.Dict({"image": image, "vector": SPACES["vector"]}) if name == "dict" else image
    model = dqn(make_envs(space, DISCRETE, 2), CompressedDictReplayBuffer if name == "dict" else CompressedReplayBuffer)
    model.learn(60)
    old = model.replay_buffer
    place: Any = tmp_path / "buffer.pkl" if kind == "path" else io.BytesIO()
    model.save_replay_buffer(place)
    if kind == "file":
        place.seek(0)
    fresh = dqn(make_envs(space, DISCRETE, 2), type(old))
    fresh.load_replay_buffer(place)
    assert fresh.replay_buffer is not None
    assert fresh.replay_buffer.device == fresh.device
    assert_same_samples(fresh.replay_buffer, old)
    fresh.learn(20)


def test_checkpoints(tmp_path: Path) -> None:
    model = dqn(make_envs(IMAGE, DISCRETE, 2))
    model.learn(60, callback=CheckpointCallback(20, str(tmp_path), save_replay_buffer=True))
    (saved,) = tmp_path.glob("*replay_buffer_40_steps.pkl")
    other = dqn(make_envs(IMAGE, DISCRETE, 2))
    other.load_replay_buffer(saved)
    assert other.replay_buffer is not None
    # a callback is asked before the step is added
    assert other.replay_buffer.size() == 19


@pytest.mark.parametrize("include", [None, ["replay_buffer"]])
def test_models_keep_the_arguments_of_their_buffer(tmp_path: Path, include: Any) -> None:
    options = {"compression_method": "gzip2", "output_dtype": "float"}
    model = dqn(make_envs(IMAGE, DISCRETE, 2), replay_buffer_kwargs=options)
    model.learn(60)
    model.save(tmp_path / "model", include=include)
    loaded = DQN.load(tmp_path / "model", env=make_envs(IMAGE, DISCRETE, 2), device="cpu")
    assert type(loaded.replay_buffer) is CompressedReplayBuffer
    assert loaded.replay_buffer_kwargs == options
    if include:
        assert_same_samples(loaded.replay_buffer, model.replay_buffer)
    else:
        assert loaded.replay_buffer.size() == 0
    loaded.learn(20)
    assert loaded.replay_buffer.memory_usage().codecs[""].startswith("gzip2")


def test_rollout_models_are_saved_and_loaded(tmp_path: Path) -> None:
    model = PPO(
        "MlpPolicy", make_envs(IMAGE, DISCRETE, 2), n_steps=16, batch_size=8, n_epochs=1, device="cpu",
        policy_kwargs={"net_arch": [8]}, rollout_buffer_class=CompressedRolloutBuffer,
        rollout_buffer_kwargs={"compression_method": "delta"},
    )  # fmt: skip
    model.learn(32)
    model.save(tmp_path / "model")
    loaded = PPO.load(tmp_path / "model", env=make_envs(IMAGE, DISCRETE, 4), device="cpu")
    assert type(loaded.rollout_buffer) is CompressedRolloutBuffer
    assert isinstance(loaded.rollout_buffer, RolloutBuffer)
    loaded.learn(64)


def test_another_number_of_environments_may_read_but_not_write(tmp_path: Path) -> None:
    model = dqn(make_envs(IMAGE, DISCRETE, 2))
    model.learn(60)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    loaded = DQN.load(tmp_path / "model", env=make_envs(IMAGE, DISCRETE, 4), device="cpu")
    assert loaded.replay_buffer is not None
    assert loaded.replay_buffer.n_envs == 4
    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    assert_same_samples(loaded.replay_buffer, model.replay_buffer)
    before = contents(loaded.replay_buffer)
    with pytest.raises(SpecMismatchError, match="n_envs"):
        loaded.learn(20)
    assert_same_contents(before, contents(loaded.replay_buffer))


@pytest.mark.parametrize("name", ["one frame", "vector", "action"])
def test_a_buffer_of_another_space_is_refused_and_the_old_one_stays(tmp_path: Path, name: str) -> None:
    model = dqn(make_envs(IMAGE, DISCRETE, 1))
    model.learn(20)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    envs = make_envs(IMAGE, spaces.Discrete(9), 1) if name == "action" else make_envs(SPACES[name], DISCRETE, 1)
    other = dqn(envs)
    other.learn(20)
    old = other.replay_buffer
    before = contents(old)
    # a file of our own: SB3 leaves the one that it opens open
    saved = io.BytesIO((tmp_path / "buffer.pkl").read_bytes())
    with pytest.raises(AlgorithmMismatchError, match=r"(observation|action)_space"):
        other.load_replay_buffer(saved)
    assert other.replay_buffer is old
    assert_same_contents(before, contents(old))
    other.learn(10)


@pytest.mark.parametrize("cls", [CompressedReplayBuffer, CompressedHerReplayBuffer])
def test_a_buffer_of_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch, cls: Any) -> None:
    if cls is CompressedHerReplayBuffer:
        env = DummyVecEnv([BitFlippingEnv])
        buffer = cls(20, env.observation_space, env.action_space, env=env, device="cpu")
    else:
        buffer = filled()
    monkeypatch.setattr(base, "STATE_VERSION", base.STATE_VERSION + 1)
    saved = pickle.dumps(buffer)
    assert pickle.loads(saved) is not None
    monkeypatch.undo()
    with pytest.raises(UnsupportedVersionError, match=r"state version 5.*reads version 4"):
        pickle.loads(saved)


@pytest.mark.parametrize("cls", [CompressedReplayBuffer, GpuReplayBuffer])
def test_a_saved_folder_becomes_the_buffer_of_a_model(tmp_path: Path, cls: Any) -> None:
    model: Any = dqn(make_envs(IMAGE, DISCRETE, 2), cls)
    model.learn(60)
    model.replay_buffer.save(tmp_path / "buffer")
    other = dqn(make_envs(IMAGE, DISCRETE, 2), cls)
    other.load_replay_buffer(tmp_path / "buffer")
    assert type(other.replay_buffer) is cls
    assert_same_samples(other.replay_buffer, model.replay_buffer)
    other.learn(20)


@pytest.mark.parametrize(
    "cls", [CompressedDictReplayBuffer, CompressedDictRolloutBuffer, GpuReplayBuffer, GpuRolloutBuffer]
)
def test_normalizing_an_environment_later_does_not_change_what_is_saved(tmp_path: Path, cls: Any) -> None:
    """`VecNormalize` replaces the images of a Dict space in place."""
    images = spaces.Box(0, 255, (4, 20, 16), np.uint8)
    env = make_envs(spaces.Dict({"images": images, "speed": SPACES["vector"]}), DISCRETE, 1)
    space: Any = env.observation_space
    buffer = cls(10, space, DISCRETE, device="cpu")
    VecNormalize(env)
    assert space["images"] != images
    assert buffer.observation_space["images"] == images
    buffer.save(tmp_path / "buffer")
    assert load(tmp_path / "buffer").observation_space == buffer.observation_space


@pytest.mark.parametrize("cls", [CompressedReplayBuffer, CompressedRolloutBuffer, GpuReplayBuffer, GpuRolloutBuffer])
def test_arguments_may_be_numpy_numbers(tmp_path: Path, cls: Any) -> None:
    options: dict[str, Any] = {"compression_method": "gzip", "compression_kwargs": {"level": np.int64(3)}}
    if issubclass(cls, BaseGpuBuffer):
        options["heap_bytes"] = np.int64(1 << 20)
    buffer = cls(np.int64(40), IMAGE, DISCRETE, device="cpu", n_envs=np.int32(2), **options)
    buffer.save(tmp_path / "buffer")
    loaded = load(tmp_path / "buffer")
    assert (loaded.buffer_size, loaded.n_envs) == (buffer.buffer_size, 2)
    copied = pickle.loads(pickle.dumps(loaded))
    assert copied.memory_usage().codecs == buffer.memory_usage().codecs


def test_options_may_be_any_mapping(tmp_path: Path) -> None:
    methods, dtypes = {"images": "delta"}, {"images": MappingProxyType({"elem_type": np.uint8})}
    space = spaces.Dict({"images": SPACES["float frames"], "speed": SPACES["vector"]})
    buffer = CompressedDictReplayBuffer(
        10, space, DISCRETE, device="cpu", compression_method=MappingProxyType(methods), dtypes=MappingProxyType(dtypes)
    )
    methods["images"] = "none"
    pickle.loads(pickle.dumps(buffer)).save(tmp_path / "buffer")
    assert load(tmp_path / "buffer").storage_options.compression_method == {"images": "delta"}


def test_a_folder_that_does_not_fit_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = dqn(make_envs(IMAGE, DISCRETE, 1))
    model.learn(20)
    old, before = model.replay_buffer, contents(model.replay_buffer)
    vectors: Any = dqn(make_envs(SPACES["vector"], DISCRETE, 1)).replay_buffer
    vectors.save(tmp_path / "vectors")
    CompressedRolloutBuffer(10, IMAGE, DISCRETE, "cpu").save(tmp_path / "rollout")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AlgorithmMismatchError, match="observation_space"):
        model.load_replay_buffer(tmp_path / "vectors")
    with pytest.raises(AlgorithmMismatchError, match="holds a CompressedRolloutBuffer, which is not a replay buffer"):
        model.load_replay_buffer(str(tmp_path / "rollout"))
    with pytest.raises(FileFormatError, match="empty"):
        model.load_replay_buffer(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="missing"):
        model.load_replay_buffer(tmp_path / "missing")
    assert model.replay_buffer is old
    assert_same_contents(before, contents(old))


def test_hindsight_replay_continues_from_a_folder(tmp_path: Path) -> None:
    def make() -> Any:
        return SAC(
            "MultiInputPolicy", BitFlippingEnv(n_bits=4, continuous=True, max_steps=7), buffer_size=60,
            learning_starts=20, device="cpu", seed=0, policy_kwargs={"net_arch": [8]},
            replay_buffer_class=CompressedHerReplayBuffer, replay_buffer_kwargs={"n_sampled_goal": 2},
        )  # fmt: skip

    model, continued, truncated = make(), make(), make()
    model.learn(45)
    model.replay_buffer.save(tmp_path / "buffer")
    continued.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
    assert_same_samples(continued.replay_buffer, model.replay_buffer)
    with pytest.warns(UserWarning, match="The last trajectory"):
        truncated.load_replay_buffer(tmp_path / "buffer")
    assert truncated.replay_buffer.ep_length.astype(bool).sum() > model.replay_buffer.ep_length.astype(bool).sum()
    truncated.learn(20)


def test_her_gets_its_environment_back(tmp_path: Path) -> None:
    def make() -> Any:
        env = BitFlippingEnv(n_bits=4, continuous=True)
        return SAC(
            "MultiInputPolicy", env, buffer_size=60, learning_starts=20, device="cpu", seed=0,
            policy_kwargs={"net_arch": [8]}, replay_buffer_class=CompressedHerReplayBuffer,
            replay_buffer_kwargs={"n_sampled_goal": 2, "compression_method": "delta"},
        )  # fmt: skip

    model = make()
    model.learn(45)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    alone = pickle.loads((tmp_path / "buffer.pkl").read_bytes())
    with pytest.raises(AssertionError, match="VecEnv"):
        alone.sample(4)
    alone.set_env(model.env)
    assert_same_samples(alone, model.replay_buffer)
    with pytest.raises(ValueError, match="already initialized"):
        alone.set_env(model.env)
    fresh = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The last trajectory")
        fresh.load_replay_buffer(tmp_path / "buffer.pkl", truncate_last_traj=False)
    assert_same_samples(fresh.replay_buffer, model.replay_buffer)
    fresh.learn(20)
    model.save(tmp_path / "model")
    loaded = SAC.load(tmp_path / "model", env=model.env, device="cpu")
    assert type(loaded.replay_buffer) is CompressedHerReplayBuffer


@pytest.mark.same_without_extras
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_environments_in_other_processes(way: str) -> None:
    envs = SubprocVecEnv([lambda seed=seed: GameEnv(IMAGE, DISCRETE, seed) for seed in range(2)], start_method=way)  # type: ignore[misc]
    try:
        ours = dqn(envs, replay_buffer_kwargs={"compression_method": "delta"})
        ours.learn(60)
    finally:
        envs.close()
    theirs = dqn(make_envs(IMAGE, DISCRETE, 2), ReplayBuffer)
    theirs.learn(60)
    assert_same_samples(ours.replay_buffer, theirs.replay_buffer)


@pytest.mark.same_without_extras
def test_a_fork_in_the_middle_of_training() -> None:
    # environments are forked after the buffer was used: its locks and threads are not for them
    run_fresh("""
import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv
from tests.compressed.test_persistence import DISCRETE, IMAGE, filled
from tests.contracts.buffer import play
from tests.contracts.vec_env import GameEnv
buffer = filled(46, n_envs=8)
buffer.sample(512)
envs = SubprocVecEnv([lambda: GameEnv(IMAGE, DISCRETE)] * 2, start_method="fork")
envs.reset()
buffer.sample(512)
envs.step(np.zeros(2, int))
envs.close()
""")


class TestMade:
    """`compressed(SomeBuffer)`: no name that pickle could find it by."""

    def test_copies(self) -> None:
        buffer = filled(cls=compressed(Noted), note=7)
        for made in copies(buffer):
            assert type(made) is type(buffer) is compressed(Noted)
            assert made.note == 7
            np.testing.assert_array_equal(made.notes, buffer.notes)
            assert_same_samples(made, buffer)

    def test_subclasses_of_it(self) -> None:
        buffer = filled(cls=Named)
        for made in copies(buffer):
            assert type(made) is Named
            assert_same_samples(made, buffer)

    def test_models_with_it(self, tmp_path: Path) -> None:
        model = dqn(make_envs(IMAGE, DISCRETE, 2), compressed(Noted), replay_buffer_kwargs={"note": 3})
        model.learn(40)
        model.save(tmp_path / "model")
        model.save_replay_buffer(tmp_path / "buffer.pkl")
        loaded = DQN.load(tmp_path / "model", env=make_envs(IMAGE, DISCRETE, 2), device="cpu")
        loaded.load_replay_buffer(tmp_path / "buffer.pkl")
        assert type(loaded.replay_buffer) is compressed(Noted)
        assert_same_samples(loaded.replay_buffer, model.replay_buffer)
        loaded.learn(20)

    @pytest.mark.same_without_extras
    def test_models_with_it_in_another_process(self, tmp_path: Path) -> None:
        model = dqn(make_envs(IMAGE, DISCRETE, 2), compressed(Noted), replay_buffer_kwargs={"note": 3})
        model.learn(40)
        model.save(tmp_path / "model")
        model.save_replay_buffer(tmp_path / "buffer.pkl")
        wanted = sample(model.replay_buffer, 8, 0)[0].observations.sum().item()
        said = run_fresh(
            """
import sys
from stable_baselines3 import DQN
from tests.compressed.test_persistence import DISCRETE, IMAGE, make_envs, sample
model = DQN.load(sys.argv[1] + "/model", env=make_envs(IMAGE, DISCRETE, 2), device="cpu")
assert model.replay_buffer.note == 3
model.learn(20)
model.save_replay_buffer(sys.argv[1] + "/again.pkl")
model.load_replay_buffer(sys.argv[1] + "/again.pkl")
model.load_replay_buffer(sys.argv[1] + "/buffer.pkl")
print(sample(model.replay_buffer, 8, 0)[0].observations.sum().item())
""",
            str(tmp_path),
        )
        assert said.split() == [str(wanted)]


class Named(compressed(Noted)):  # type: ignore[misc]  # made at run time
    """A class over a made one, found by its name."""
