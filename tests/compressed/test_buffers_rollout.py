"""Rollout buffers, sb3-contrib's among them, give the batches of the originals at the same seed, to the last bit."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_extra_buffers.compressed import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.errors import EmptyBufferError, SpecMismatchError
from tests.contracts.buffer import ACTIONS, IMAGES, SPACES, Step, assert_same_rollout, is_same, play, rollouts
from tests.contracts.store import method_params
from tests.torture.interrupts import Injector

METHODS = method_params("auto", "delta", "zstd-5", "rle-jit", "igzip1", "none")
DISCRETE = ACTIONS["discrete"]
N_STEPS = 17


def pair(space: spaces.Space[Any], n_envs: int, actions: Any = DISCRETE, **options: Any) -> tuple[Any, Any]:
    arguments = {"device": "cpu", "gamma": 0.9, "gae_lambda": 0.8, "n_envs": n_envs}
    if isinstance(space, spaces.Dict):
        ours: Any = CompressedDictRolloutBuffer(N_STEPS, space, actions, **arguments, **options)  # type: ignore[arg-type]
        return ours, DictRolloutBuffer(N_STEPS, space, actions, **arguments)  # type: ignore[arg-type]  # as written
    ours = CompressedRolloutBuffer(N_STEPS, space, actions, **arguments, **options)  # type: ignore[arg-type]
    return ours, RolloutBuffer(N_STEPS, space, actions, **arguments)  # type: ignore[arg-type]


def fill(buffers: Any, steps: list[Step], **more: Any) -> None:
    """Reset ``buffers`` and add ``steps`` to each as an on-policy algorithm does."""
    n_envs = buffers[0].n_envs
    rng = np.random.default_rng(5)
    for buffer in buffers:
        buffer.reset()
    for step in steps:
        value, log_prob = (th.as_tensor(rng.normal(size=n_envs).astype(np.float32)) for _ in range(2))
        extra = {name: make(rng) for name, make in more.items()}
        for buffer in buffers:
            buffer.add(step.obs, step.action, step.reward, step.done, value, log_prob, **extra)
    last, dones = th.as_tensor(rng.normal(size=(n_envs, 1)).astype(np.float32)), rng.random(n_envs) < 0.5
    for buffer in buffers:
        buffer.compute_returns_and_advantage(last, dones)


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("name", SPACES)
def test_every_space(name: str, n_envs: int) -> None:
    buffers = pair(SPACES[name], n_envs)
    steps = list(play(SPACES[name], n_envs, 3 * N_STEPS))
    for rollout in range(3):
        fill(buffers, steps[rollout * N_STEPS : (rollout + 1) * N_STEPS])
        for epoch, batch_size in enumerate([16, None, 7]):
            assert_same_rollout(*buffers, batch_size, seed=epoch)
        # what PPO logs after training
        for column in ("values", "returns", "advantages", "log_probs", "actions"):
            np.testing.assert_array_equal(getattr(buffers[0], column), getattr(buffers[1], column))


@pytest.mark.parametrize("name", [*IMAGES, "dict"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, name: str) -> None:
    buffers = pair(SPACES[name], 3, compression_method=method)
    for seed in range(2):
        fill(buffers, list(play(SPACES[name], 3, N_STEPS, seed)))
        assert_same_rollout(*buffers, 16)


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_space(name: str) -> None:
    buffers = pair(SPACES["frames first"], 2, ACTIONS[name])
    fill(buffers, list(play(SPACES["frames first"], 2, N_STEPS, actions=ACTIONS[name])))
    assert_same_rollout(*buffers, 16)


@pytest.mark.parametrize("name", ["frames first", "vector", "dict"])
def test_unwritten_steps_read_as_zeros(name: str) -> None:
    buffers = pair(SPACES[name], 2)
    for buffer in buffers:
        buffer.full = True
    assert_same_rollout(*buffers, 8)
    fill(buffers, list(play(SPACES[name], 2, N_STEPS)))
    for buffer in buffers:
        buffer.reset()
        buffer.full = True
    assert_same_rollout(*buffers, 8)


def test_adding_to_a_full_rollout_is_refused() -> None:
    buffers = pair(SPACES["frames first"], 2)
    steps = list(play(SPACES["frames first"], 2, N_STEPS))
    fill(buffers, steps)
    for buffer in buffers:
        with pytest.raises(IndexError):
            buffer.add(steps[0].obs, steps[0].action, steps[0].reward, steps[0].done, th.zeros(2), th.zeros(2))
    assert_same_rollout(*buffers, 16)


def test_reading_an_incomplete_rollout_is_refused() -> None:
    ours, _ = pair(SPACES["frames first"], 2)
    for step in play(SPACES["frames first"], 2, 5):
        ours.add(step.obs, step.action, step.reward, step.done, th.zeros(2), th.zeros(2))
    with pytest.raises(EmptyBufferError, match=r"5 of 17 steps"):
        ours.get(4)


def test_reset_keeps_the_chosen_method() -> None:
    ours, _ = pair(SPACES["frames first"], 4)
    fill([ours], list(play(SPACES["frames first"], 4, N_STEPS)))
    store = ours.observations.store
    method = ours.memory_usage().codecs
    assert "not compressed yet" not in method[""]
    ours.reset()
    assert ours.observations.store is store
    assert ours.memory_usage().codecs == method


@pytest.mark.parametrize("name", ["frames first", "dict"])
def test_an_interrupted_reset_is_complete_or_has_not_begun(name: str) -> None:
    interrupt_resets(*pair(SPACES[name], 2), list(play(SPACES[name], 2, N_STEPS)))


def interrupt_resets(ours: Any, theirs: Any, steps: list[Step], **more: Any) -> None:
    """Interrupt ``reset`` of a complete rollout at many places, each time after the next rollout was added."""
    is_dict = isinstance(ours.observations, dict)
    observations = ours.observations if is_dict else {"": ours.observations}
    shapes = {key: part.shape for key, part in observations.items()}
    outcomes = set()
    for at in range(1, 5000, 29):
        fill([ours, theirs], steps, **more)
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()) as injector:
            ours.reset()
        ours.recover()  # as any use does first
        outcomes.add(ours.full)
        if ours.full:
            assert_same_rollout(ours, theirs, 7, seed=0)
        else:
            theirs.reset()
            for column in ("pos", "rewards", "actions", "values", *more_columns(theirs)):
                np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column))
            observations = ours.observations if is_dict else {"": ours.observations}
            assert {key: part.shape for key, part in observations.items()} == shapes
        if injector.count < at:
            break
    assert outcomes == {False, True}


def more_columns(buffer: Any) -> list[str]:
    return [name for name in ("action_masks", "hidden_states_pi", "cell_states_vf") if hasattr(buffer, name)]


@pytest.mark.parametrize("method", ["none", "delta"])
def test_output_dtypes(method: str) -> None:
    space, steps = SPACES["dict"], list(play(SPACES["dict"], 2, N_STEPS))
    options: list[dict[str, Any]] = [{}, {"output_dtype": "float"}, {"normalize_images": True}]
    raw, floats, scaled = (pair(space, 2, compression_method=method, **each)[0] for each in options)
    fill([raw, floats, scaled], steps)
    for want, got, small in zip(*(rollouts(buffer, 8, 0) for buffer in (raw, floats, scaled)), strict=True):
        for key, tensor in want.observations.items():
            is_same(got.observations[key], tensor.float())
            is_same(small.observations[key], tensor.float() / 255.0 if tensor.ndim == 4 else tensor)
        is_same(got.actions, want.actions)


def test_batches_share_no_memory_with_the_buffer() -> None:
    buffers = pair(SPACES["frames first"], 2)
    fill(buffers, list(play(SPACES["frames first"], 2, N_STEPS)))
    for batch in rollouts(buffers[0], 8, 0):
        for tensor in batch:
            tensor.zero_()
    assert_same_rollout(*buffers, 8)


def test_to_torch_copies_arrays_of_the_user() -> None:
    # only arrays that SB3 has just read for a batch become tensors without a copy
    ours, _ = pair(SPACES["frames first"], 2)
    fill([ours], list(play(SPACES["frames first"], 2, N_STEPS)))
    array = ours.observations[3]
    first, second = ours.to_torch(array), ours.to_torch(array)
    first.zero_()
    assert second.any()


@pytest.mark.parametrize("name", ["frames first", "multi discrete", "dict"])
def test_bad_input_is_refused_and_changes_nothing(name: str) -> None:
    space = SPACES[name]
    ours, theirs = pair(space, 3)
    steps = list(play(space, 3, N_STEPS))
    good = [(step.obs, step.action, step.reward, step.done, th.zeros(3), th.ones(3)) for step in steps]
    for number, step in enumerate(good):
        obs = step[0]["frames_first"] if name == "dict" else step[0]
        wrong: Any = obs.astype(np.float64)
        wrong[1].flat[0] = np.nan
        few: Any = obs[:2]
        half = obs + 0.5
        for bad in (
            wrong,
            few,
            half,
            obs.astype(object),
            obs.astype(np.int32) + 2**20 if name != "multi discrete" else half,
        ):
            bad_obs = {**step[0], "frames_first": bad} if name == "dict" else bad
            with pytest.raises(SpecMismatchError, match="obs"):
                ours.add(bad_obs, *step[1:])
        for place, value in (
            (1, step[1][:2]),
            (1, step[1] + 0.5),
            (2, step[2][:2]),
            (3, step[3][:2]),
            (4, th.zeros(2)),
        ):
            with pytest.raises(SpecMismatchError):
                ours.add(*step[:place], value, *step[place + 1 :])
        assert ours.pos == number
        ours.add(*step)
        theirs.add(*step)
    if name == "dict":
        with pytest.raises(SpecMismatchError, match="lacks discrete, multi_binary, vector"):
            ours.add({"frames_first": steps[0].obs["frames_first"]}, *good[0][1:])
    for buffer in (ours, theirs):
        buffer.compute_returns_and_advantage(th.zeros(3), np.zeros(3))
    assert_same_rollout(ours, theirs, 16)


class TestContrib:
    """sb3-contrib's buffers."""

    @pytest.fixture(autouse=True)
    def _contrib(self) -> None:
        pytest.importorskip("sb3_contrib")

    @staticmethod
    def pair(kind: str, space: spaces.Space[Any], actions: Any, n_envs: int, **options: Any) -> tuple[Any, Any]:
        import sb3_contrib.common.maskable.buffers as maskable
        import sb3_contrib.common.recurrent.buffers as recurrent

        import sb3_extra_buffers.compressed as compressed

        name = f"{kind}{'Dict' if isinstance(space, spaces.Dict) else ''}RolloutBuffer"
        theirs = getattr(maskable if kind == "Maskable" else recurrent, name)
        ours = getattr(compressed, f"Compressed{name}")
        assert issubclass(ours, theirs)
        # as MaskablePPO and RecurrentPPO make theirs
        places: tuple[Any, ...] = (N_STEPS, space, actions)
        if kind == "Recurrent":
            places = (*places, (N_STEPS, 2, n_envs, 6))
        places = (*places, "cpu")
        kwargs = {"gamma": 0.9, "gae_lambda": 0.8, "n_envs": n_envs}
        return ours(*places, **kwargs, **options), theirs(*places, **kwargs)

    @staticmethod
    def more(kind: str, n_envs: int, n_masks: int) -> dict[str, Any]:
        if kind == "Maskable":
            return {"action_masks": lambda rng: rng.random((n_envs, n_masks)) < 0.7}
        from sb3_contrib.common.recurrent.type_aliases import RNNStates

        def states(rng: Any) -> Any:
            def pair() -> Any:
                return tuple(th.as_tensor(rng.normal(size=(2, n_envs, 6)).astype(np.float32)) for _ in range(2))

            return RNNStates(pair(), pair())

        return {"lstm_states": states}

    @pytest.mark.parametrize("n_envs", [1, 4])
    @pytest.mark.parametrize("name", ["frames first", "frames last", "vector", "discrete", "dict"])
    @pytest.mark.parametrize("kind", ["Maskable", "Recurrent"])
    def test_same_rollouts(self, kind: str, name: str, n_envs: int) -> None:
        buffers = self.pair(kind, SPACES[name], DISCRETE, n_envs)
        for seed in range(2):
            fill(buffers, list(play(SPACES[name], n_envs, N_STEPS, seed)), **self.more(kind, n_envs, 4))
            for epoch, batch_size in enumerate([16, None]):
                assert_same_rollout(*buffers, batch_size, seed=epoch)

    @pytest.mark.parametrize("kind", ["Maskable", "Recurrent"])
    def test_an_interrupted_reset_is_complete_or_has_not_begun(self, kind: str) -> None:
        buffers = self.pair(kind, SPACES["frames first"], DISCRETE, 2)
        interrupt_resets(*buffers, list(play(SPACES["frames first"], 2, N_STEPS)), **self.more(kind, 2, 4))

    @pytest.mark.parametrize("name", ["multi discrete", "multi binary"])
    def test_masks_of_every_action_space(self, name: str) -> None:
        buffers = self.pair("Maskable", SPACES["frames first"], ACTIONS[name], 2)
        steps = list(play(SPACES["frames first"], 2, N_STEPS, actions=ACTIONS[name]))
        fill(buffers, steps, **self.more("Maskable", 2, {"multi discrete": 5, "multi binary": 10}[name]))
        assert_same_rollout(*buffers, 16)

    @pytest.mark.parametrize("kind", ["Maskable", "Recurrent"])
    def test_options_reach_them(self, kind: str) -> None:
        space = SPACES["frames first"]
        floats = self.pair(kind, space, DISCRETE, 2, output_dtype="float", compression_method="gzip2")[0]
        raw = self.pair(kind, space, DISCRETE, 2)[0]
        fill([floats, raw], list(play(space, 2, N_STEPS)), **self.more(kind, 2, 4))
        assert floats.memory_usage().codecs == {"": "gzip2"}
        for got, want in zip(rollouts(floats, 8, 0), rollouts(raw, 8, 0), strict=True):
            is_same(got.observations, want.observations.float())

    @pytest.mark.parametrize("kind", ["Maskable", "Recurrent"])
    def test_an_incomplete_rollout_is_refused(self, kind: str) -> None:
        ours = self.pair(kind, SPACES["frames first"], DISCRETE, 2)[0]
        with pytest.raises(EmptyBufferError, match=r"0 of 17 steps"):
            next(ours.get(4))


def test_values_in_double_precision() -> None:
    # of a policy in float64: SB3 computes returns with the last values as they are
    buffers = pair(SPACES["vector"], 3)
    fill(buffers, list(play(SPACES["vector"], 3, N_STEPS)))
    last, dones = th.as_tensor(np.random.default_rng(0).normal(size=(3, 1))), np.array([True, False, False])
    for buffer in buffers:
        buffer.compute_returns_and_advantage(last, dones)
    np.testing.assert_array_equal(buffers[0].advantages, buffers[1].advantages)
