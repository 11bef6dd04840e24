"""Replay buffers give the batches that SB3's give at the same seed, to the last bit."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.compressed import (
    CompressedDictNStepReplayBuffer,
    CompressedDictReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    CompressedSequenceReplayBuffer,
)
from sb3_extra_buffers.stores.timeline import TimelineStore
from tests.contracts.buffer import (
    ACTIONS,
    IMAGES,
    KEYS,
    SPACES,
    Step,
    assert_same_samples,
    contents,
    is_same,
    play,
    sample,
)
from tests.contracts.store import method_params
from tests.contracts.vec_env import SpacesOnlyVecEnv

METHODS = method_params("auto", "delta", "zstd-5", "rle-jit", "igzip1", "none")
DISCRETE = ACTIONS["discrete"]


def pair(space: spaces.Space[Any], size: int, n_envs: int, actions: Any = DISCRETE, **options: Any) -> list[Any]:
    """Ours and SB3's for the same space."""
    ours: Any = CompressedDictReplayBuffer if isinstance(space, spaces.Dict) else CompressedReplayBuffer
    theirs: Any = DictReplayBuffer if isinstance(space, spaces.Dict) else ReplayBuffer
    known = {name: value for name, value in options.items() if name in inspect.signature(theirs).parameters}
    return [
        ours(size, space, actions, device="cpu", n_envs=n_envs, **options),
        theirs(size, space, actions, device="cpu", n_envs=n_envs, **known),
    ]


def fill(buffers: list[Any], space: spaces.Space[Any], n_steps: int, seed: int = 0, actions: Any = DISCRETE) -> None:
    for step in play(space, buffers[0].n_envs, n_steps, seed, actions):
        for buffer in buffers:
            buffer.add(*step)


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("name", SPACES)
def test_every_space(name: str, n_envs: int) -> None:
    buffers = pair(SPACES[name], 20 * n_envs, n_envs)
    for number, step in enumerate(play(SPACES[name], n_envs, 46)):  # 2.3 times round
        for buffer in buffers:
            buffer.add(*step)
        assert_same_samples(*buffers, seed=number)
    assert buffers[0].full


@pytest.mark.parametrize("name", [*IMAGES, "dict"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, name: str) -> None:
    buffers = pair(SPACES[name], 60, 3, compression_method=method)
    for number, step in enumerate(play(SPACES[name], 3, 46, seed=1)):
        for buffer in buffers:
            buffer.add(*step)
        if number % 3 == 0:
            assert_same_samples(*buffers, seed=number)


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_space(name: str) -> None:
    actions = ACTIONS[name]
    buffers = pair(SPACES["vector"], 40, 2, actions)
    fill(buffers, SPACES["vector"], 33, actions=actions)
    assert_same_samples(*buffers)
    assert buffers[0].actions.dtype == buffers[1].actions.dtype


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7])
def test_buffers_of_one_or_two_steps(size: int) -> None:
    buffers = pair(SPACES["frames first"], size, 4)
    assert buffers[0].buffer_size == buffers[1].buffer_size == 1
    for step in play(SPACES["frames first"], 4, 5):
        for buffer in buffers:
            buffer.add(*step)
        assert_same_samples(*buffers)


@pytest.mark.parametrize("handle", [True, False])
@pytest.mark.parametrize("name", ["frames first", "vector", "dict"])
def test_time_limits(name: str, handle: bool) -> None:
    buffers = pair(SPACES[name], 60, 3, handle_timeout_termination=handle)
    fill(buffers, SPACES[name], 50)
    assert buffers[1].timeouts.any() == handle
    assert_same_samples(*buffers, batch_size=64)


@pytest.mark.parametrize("handle", [True, False])
@pytest.mark.parametrize("name", ["frames first", "vector"])
def test_optimized_memory_keeps_the_true_next_observations(name: str, handle: bool) -> None:
    space = SPACES[name]
    ours = CompressedReplayBuffer(
        60, space, DISCRETE, "cpu", n_envs=3, optimize_memory_usage=True, handle_timeout_termination=handle
    )
    dense = ReplayBuffer(60, space, DISCRETE, "cpu", n_envs=3, handle_timeout_termination=handle)
    theirs = ReplayBuffer(
        60, space, DISCRETE, "cpu", n_envs=3, optimize_memory_usage=True, handle_timeout_termination=False
    )
    assert ours.optimize_memory_usage
    for number, step in enumerate(play(space, 3, 46)):
        for buffer in (ours, dense, theirs):
            buffer.add(*step)
        mine, other = sample(ours, 32, number), sample(theirs, 32, number)
        # the same transitions are drawn as by SB3's optimised buffer
        assert mine[1] == other[1]
        is_same(mine[0].observations, other[0].observations)
        is_same(mine[0].rewards, other[0].rewards)
        # and with the next observations of the one that keeps them all, at the end of an episode too
        np.random.seed(number)  # noqa: NPY002
        high, low = (20, 1) if ours.full else (ours.pos, 0)
        steps = np.random.randint(low, high, size=32)  # noqa: NPY002
        steps = (steps + ours.pos) % 20 if ours.full else steps
        is_same(mine[0], dense._get_samples(steps))


@pytest.mark.parametrize("name", ["frames first", "vector", "dict"])
def test_steps_may_be_a_list(name: str) -> None:
    """As subclasses that choose the steps themselves may pass them to `_get_samples`."""
    space: Any = SPACES[name]
    kinds: Any = CompressedReplayBuffer, ReplayBuffer
    if name == "dict":
        kinds = CompressedDictReplayBuffer, DictReplayBuffer
    ours, theirs = (kind(40, space, DISCRETE, "cpu", n_envs=2) for kind in kinds)
    for step in play(space, 2, 20):
        for buffer in (ours, theirs):
            buffer.add(*step)
    batches = []
    for buffer in (ours, theirs):
        np.random.seed(0)  # noqa: NPY002
        batches.append(buffer._get_samples([3, 17, 3, -1]))
    is_same(*batches)


def test_optimized_memory_is_accepted_for_dicts() -> None:
    ours = CompressedDictReplayBuffer(40, SPACES["dict"], DISCRETE, "cpu", n_envs=2, optimize_memory_usage=True)
    (theirs,) = pair(SPACES["dict"], 40, 2)[1:]
    fill([ours, theirs], SPACES["dict"], 15)
    assert_same_samples(ours, theirs)


@pytest.mark.parametrize("name", ["frames first", "vector", "discrete"])
@pytest.mark.parametrize("how", ["argument", "class"])
@pytest.mark.parametrize("n_envs", [1, 4])
def test_n_step_returns(name: str, how: str, n_envs: int) -> None:
    space, size = SPACES[name], 20 * n_envs
    theirs = NStepReplayBuffer(size, space, DISCRETE, "cpu", n_envs=n_envs, n_steps=4, gamma=0.9)
    our_class: Any = CompressedReplayBuffer if how == "argument" else CompressedNStepReplayBuffer
    ours = our_class(size, space, DISCRETE, "cpu", n_envs=n_envs, n_steps=4, gamma=0.9)
    assert isinstance(ours, NStepReplayBuffer) == (how == "class")
    for number, step in enumerate(play(space, n_envs, 46)):
        ours.add(*step)
        theirs.add(*step)
        assert_same_samples(ours, theirs, seed=number)


def test_n_step_buffers_ignore_optimize_memory_usage() -> None:
    ours = CompressedReplayBuffer(20, SPACES["vector"], DISCRETE, "cpu", optimize_memory_usage=True, n_steps=3)
    theirs = NStepReplayBuffer(20, SPACES["vector"], DISCRETE, "cpu", n_steps=3)
    fill([ours, theirs], SPACES["vector"], 33)
    assert_same_samples(ours, theirs)


@pytest.mark.parametrize("our_class", [CompressedDictReplayBuffer, CompressedDictNStepReplayBuffer])
@pytest.mark.parametrize("n_played", [12, 46])
def test_n_step_returns_of_dicts(our_class: Any, n_played: int) -> None:
    n_envs, n_steps, gamma, n_ring = 3, 3, 0.9, 20
    ours = our_class(n_ring * n_envs, SPACES["dict"], DISCRETE, "cpu", n_envs=n_envs, n_steps=n_steps, gamma=gamma)
    played = list(play(SPACES["dict"], n_envs, n_played))
    for step in played:
        ours.add(*step)

    batch: Any = sample(ours, 64, seed=7)[0]

    np.random.seed(7)  # noqa: NPY002
    places = np.random.randint(0, min(n_played, n_ring), size=64)  # noqa: NPY002
    envs = np.random.randint(0, n_envs, size=64)  # noqa: NPY002
    assert type(batch).__name__ == "DictReplayBufferSamples"
    for row, (place, env) in enumerate(zip(places, envs, strict=True)):
        first = max(number for number in range(n_played) if number % n_ring == place)
        wanted, end = 0.0, first
        for offset in range(n_steps):
            end = first + offset
            wanted += gamma**offset * float(played[end].reward[env])
            if played[end].done[env] or end == n_played - 1:
                break
        last = played[end]
        over = last.done[env] and not last.infos[env].get("TimeLimit.truncated", False)
        assert batch.rewards[row].item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert batch.dones[row].item() == over
        assert batch.discounts[row].item() == pytest.approx(gamma ** (end - first + 1), rel=1e-6)
        assert batch.actions[row].item() == played[first].action[env]
        for key in KEYS:
            np.testing.assert_array_equal(batch.observations[key][row].squeeze(), played[first].obs[key][env])
            np.testing.assert_array_equal(batch.next_observations[key][row].squeeze(), last.next_obs[key][env])


@pytest.mark.parametrize(
    ("name", "n_steps"), [("frames first", 1), ("vector", 1), ("dict", 1), ("frames first", 3), ("vector", 3)]
)
def test_vec_normalize(name: str, n_steps: int) -> None:
    space = SPACES[name]
    keys = ["vector"] if name == "dict" else None
    normalize = VecNormalize(SpacesOnlyVecEnv(space, DISCRETE, 2), norm_obs_keys=keys)
    rng = np.random.default_rng(0)
    statistics: Any = normalize.obs_rms.values() if isinstance(normalize.obs_rms, dict) else [normalize.obs_rms]
    for each in statistics:
        each.mean, each.var = rng.normal(size=each.mean.shape), rng.random(each.mean.shape) + 0.5
    normalize.ret_rms.var = np.array(3.7)
    if n_steps == 1:
        buffers = pair(space, 40, 2)
    else:
        buffers = [
            CompressedReplayBuffer(40, space, DISCRETE, "cpu", n_envs=2, n_steps=n_steps),
            NStepReplayBuffer(40, space, DISCRETE, "cpu", n_envs=2, n_steps=n_steps),
        ]
    fill(buffers, space, 33)
    plain, _ = sample(buffers[0], 16, 0)
    assert_same_samples(*buffers, env=normalize)
    # what the statistics made of a batch is nothing the buffer remembers
    is_same(sample(buffers[0], 16, 0)[0], plain)


class Rewards:
    """Made by a subclass; the rest of the batch stays SB3's."""

    @staticmethod
    def _normalize_reward(reward: Any, env: Any = None) -> Any:
        return np.sign(reward)


class Observations:
    @staticmethod
    def _normalize_obs(obs: Any, env: Any = None) -> Any:
        return {key: np.roll(part, 1) for key, part in obs.items()} if isinstance(obs, dict) else np.roll(obs, 1)


class Tensors:
    def to_torch(self, array: Any, copy: bool = True) -> Any:
        return super().to_torch(array, copy).flip(0)  # type: ignore[misc]  # a buffer follows


@pytest.mark.parametrize("changes", [Rewards, Observations, Tensors])
@pytest.mark.parametrize("name", ["frames first", "vector", "dict"])
def test_a_subclass_may_change_how_batches_are_made(name: str, changes: type[Any]) -> None:
    space, is_dict = SPACES[name], name == "dict"
    ours = CompressedDictReplayBuffer if is_dict else CompressedReplayBuffer
    theirs = DictReplayBuffer if is_dict else ReplayBuffer
    buffers = [type("Changed", (changes, cls), {})(40, space, DISCRETE, "cpu", 2) for cls in (ours, theirs)]
    fill(buffers, space, 33)
    assert_same_samples(*buffers)


def test_the_windows_of_a_subclass_have_the_rewards_that_it_makes() -> None:
    space = SPACES["vector"]
    changed: Any = type("Changed", (Rewards, CompressedSequenceReplayBuffer), {})
    buffer = changed(40, space, DISCRETE, "cpu", 2)
    fill([buffer], space, 33)
    for n_steps in (1, 2):
        rewards = buffer.sample_sequences(20, 3, n_steps=n_steps, gamma=1.0).rewards
        assert set(rewards.unique().tolist()) <= set(map(float, range(-n_steps, n_steps + 1)))


def test_batches_share_no_memory_with_the_buffer() -> None:
    ours, theirs = pair(SPACES["frames first"], 40, 2)
    fill([ours, theirs], SPACES["frames first"], 30)
    batch, _ = sample(ours, 32, 0)
    for tensor in batch[:5]:
        tensor.zero_()
    assert_same_samples(ours, theirs)


def test_observations_are_copied_when_they_are_added() -> None:
    # VecFrameStack and others hand out the array that they go on writing to
    ours, theirs = pair(SPACES["frames first"], 40, 2)
    fill([ours, theirs], SPACES["frames first"], 3)
    for step in play(SPACES["frames first"], 2, 30, seed=3):
        theirs.add(*step)
        ours.add(*step)
        for array in (step.obs, step.next_obs, step.action, step.reward):
            array[...] = 1
    assert_same_samples(ours, theirs, batch_size=64)


def test_add_does_not_change_the_dict_of_the_caller() -> None:
    ours = pair(SPACES["dict"], 40, 2)[0]
    step = next(play(SPACES["dict"], 2, 1))
    before = dict(step.obs)
    ours.add(*step)
    assert all(step.obs[key] is before[key] for key in before)


def test_unwritten_steps_read_as_zeros() -> None:
    for name in ("frames first", "dict"):
        buffers = pair(SPACES[name], 40, 2)
        for buffer in buffers:
            buffer.full = True
        assert_same_samples(*buffers)
        fill(buffers, SPACES[name], 3)
        before, after = contents(buffers[1]), contents(buffers[0])
        assert before.keys() == after.keys()


@pytest.mark.parametrize("name", SPACES)
def test_observations_index_like_arrays(name: str) -> None:
    ours, theirs = pair(SPACES[name], 40, 2)
    fill([ours, theirs], SPACES[name], 27)
    for attribute in ("observations", "next_observations"):
        mine, other = getattr(ours, attribute), getattr(theirs, attribute)
        parts = [(mine[key], other[key]) for key in other] if isinstance(other, dict) else [(mine, other)]
        for one, two in parts:
            assert (one.shape, one.dtype, len(one)) == (two.shape, two.dtype, len(two))
            assert one.nbytes > 0
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one[: ours.pos], two[: ours.pos])
            np.testing.assert_array_equal(one[ours.pos :], two[ours.pos :])
            for mine_step, other_step in zip(one, two, strict=True):
                np.testing.assert_array_equal(mine_step, other_step)


def test_extend_takes_another_buffers_columns() -> None:
    old, theirs = pair(SPACES["frames first"], 20, 2)
    fill([old, theirs], SPACES["frames first"], 10)
    new = pair(SPACES["frames first"], 20, 2)[0]
    infos = [[{"TimeLimit.truncated": bool(each)} for each in step] for step in theirs.timeouts]
    new.extend(old.observations, old.next_observations, old.actions, old.rewards, old.dones, infos)
    assert_same_samples(new, theirs)
    with pytest.raises(ValueError, match="zip"):
        new.extend(old.observations, old.next_observations[:5], old.actions, old.rewards, old.dones, infos)


def test_an_observation_without_its_environment_axis() -> None:
    # imitation's SQIL adds single transitions by keyword, with numbers for rewards
    ours, theirs = pair(SPACES["frames first"], 20, 1)
    for step in play(SPACES["frames first"], 1, 25):
        for buffer in (ours, theirs):
            buffer.add(
                obs=step.obs[0],
                next_obs=step.next_obs[0],
                action=step.action[0],
                reward=np.array(1.0),
                done=step.done[0],
                infos=step.infos,
            )
    assert_same_samples(ours, theirs)


def test_time_limits_as_arrays_of_one() -> None:
    """SB3's own tests pass them so."""
    buffers = pair(SPACES["vector"], 10, 1)
    for number, step in enumerate(play(SPACES["vector"], 1, 5)):
        for buffer in buffers:
            buffer.add(*step[:5], [{"TimeLimit.truncated": np.array([number % 2 == 0])}])
    np.testing.assert_array_equal(buffers[0].timeouts, buffers[1].timeouts)
    assert buffers[0].timeouts[:5].ravel().tolist() == [1, 0, 1, 0, 1]


def test_infos_are_not_looked_at_without_time_limits() -> None:
    # CleanRL passes a dict
    ours, theirs = pair(SPACES["frames first"], 20, 2, handle_timeout_termination=False)
    for step in play(SPACES["frames first"], 2, 15):
        for buffer in (ours, theirs):
            buffer.add(*step[:5], infos={"TimeLimit.truncated": [True]})
    assert_same_samples(ours, theirs)


def test_columns_are_plain_arrays_that_others_may_write() -> None:
    ours, theirs = pair(SPACES["frames first"], 20, 2)
    fill([ours, theirs], SPACES["frames first"], 7)
    for buffer in (ours, theirs):
        # as algorithms do that begin anew with an old buffer
        buffer.dones[(buffer.pos - 1) % buffer.buffer_size] = True
        buffer.timeouts[buffer.pos - 1, :] = True
        buffer.rewards[0] = 5
        buffer.actions[1] = 2
    assert_same_samples(ours, theirs, batch_size=64)


def test_the_device_is_read_at_every_sample() -> None:
    ours, theirs = pair(SPACES["frames first"], 20, 2)
    fill([ours, theirs], SPACES["frames first"], 7)
    ours.device = theirs.device = th.device("meta")
    assert {tensor.device.type for tensor in ours.sample(4)[:5]} == {"meta"}
    ours.device = theirs.device = th.device("cpu")
    assert_same_samples(ours, theirs)


@pytest.mark.parametrize("name", ["frames first", "vector"])
def test_samples_convert_to_numpy(name: str) -> None:
    # SBX calls .numpy() on every field and reads discounts
    ours, _ = pair(SPACES[name], 20, 2)
    fill([ours], SPACES[name], 7)
    batch = ours.sample(8)
    assert batch.discounts is None
    for tensor in batch[:5]:
        assert tensor.numpy().flags.writeable
        assert tensor.is_contiguous()
        assert not tensor.is_pinned()


def test_reset_removes_all_transitions() -> None:
    ours, theirs = pair(SPACES["frames first"], 40, 2)
    fill([ours, theirs], SPACES["frames first"], 33)
    for buffer in (ours, theirs):
        buffer.reset()
    assert ours.size() == 0
    fill([ours, theirs], SPACES["frames first"], 5, seed=4)
    assert_same_samples(ours, theirs)


@pytest.mark.parametrize("method", method_params("none", "delta"))
@pytest.mark.parametrize("n_steps", [1, 3])
def test_output_dtypes(method: str, n_steps: int) -> None:
    space, kwargs = SPACES["frames first"], {"n_steps": n_steps, "compression_method": method}
    raw = CompressedReplayBuffer(40, space, DISCRETE, "cpu", n_envs=2, **kwargs)  # type: ignore[arg-type]  # as above
    floats = CompressedReplayBuffer(40, space, DISCRETE, "cpu", n_envs=2, output_dtype="float", **kwargs)  # type: ignore[arg-type]
    scaled = CompressedReplayBuffer(40, space, DISCRETE, "cpu", n_envs=2, normalize_images=True, **kwargs)  # type: ignore[arg-type]
    fill([raw, floats, scaled], space, 33)
    want, got, small = (sample(buffer, 16, 0)[0] for buffer in (raw, floats, scaled))
    for name in ("observations", "next_observations"):
        assert getattr(want, name).dtype == th.uint8
        is_same(getattr(got, name), getattr(want, name).float())
        is_same(getattr(small, name), getattr(want, name).float() / 255.0)
    is_same(got.actions, want.actions)


def test_vectors_are_on_a_time_axis() -> None:
    pytest.importorskip("numba")
    ours = pair(SPACES["dict"], 40, 2)[0]
    assert {key: isinstance(leaf.store.inner, TimelineStore) for key, leaf in ours.observations.items()} == {
        "frames_first": False,
        "vector": True,
        "discrete": True,
        "multi_binary": True,
    }
    for key, view in ours.observations.items():
        assert view.store is ours.next_observations[key].store


def test_a_method_for_each_key() -> None:
    space = spaces.Dict({"a": SPACES["frames first"], "b": SPACES["one frame"]})
    buffers = pair(space, 60, 2, compression_method={"a": "delta", "b": "gzip3"})
    fill(buffers, space, 50)
    assert_same_samples(*buffers)
    assert buffers[0].memory_usage().codecs == {"a": "delta", "b": "gzip3"}


def test_next_observations_share_their_frames() -> None:
    space = spaces.Box(0, 255, (4, 40, 40), np.uint8)
    replay = CompressedReplayBuffer(400, space, DISCRETE, "cpu", n_envs=2, compression_method="delta")
    rollout = CompressedRolloutBuffer(200, space, DISCRETE, "cpu", n_envs=2, compression_method="delta")
    for step in play(space, 2, 200):
        replay.add(*step)
        rollout.add(step.obs, step.action, step.reward, step.done, th.zeros(2), th.zeros(2))
    both, one = replay.memory_usage(), rollout.memory_usage()
    assert both.dense_observations == 2 * one.dense_observations == 2 * 400 * 4 * 40 * 40
    # terminal observations are all that is new in the next ones
    assert both.payload < 1.25 * one.payload
    assert both.total < 0.25 * both.dense


def test_samples_of_dicts_are_dict_samples() -> None:
    ours, theirs = pair(SPACES["dict"], 40, 2)
    fill([ours, theirs], SPACES["dict"], 3)
    assert type(ours.sample(2)) is type(theirs.sample(2)) is DictReplayBufferSamples


def test_steps_are_named_tuples_of_what_add_takes() -> None:
    assert list(Step._fields) == list(inspect.signature(ReplayBuffer.add).parameters)[1:]
    assert list(Step._fields) == list(inspect.signature(CompressedReplayBuffer.add).parameters)[1:]
