"""`add` takes tensors, where they are; columns are on the device of the buffer."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.utils import set_random_seed

from sb3_extra_buffers.errors import ArgumentError, SpecMismatchError
from sb3_extra_buffers.gpu_buffers import GpuNStepReplayBuffer, GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.stores import device_base, device_columns
from tests.gpu import never_waits, noting
from tests.gpu_buffers.test_buffers import IMAGE, N_ENVS, SPACES, replay_pair, same, transitions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")]
PLACES = [
    "cpu",
    # as on a GPU, in main memory: stores with reference kernels, and columns with Triton's
    pytest.param(
        "interpreted",
        marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
    ),
    pytest.param("cuda", marks=on_gpu),
    pytest.param("pinned", marks=on_gpu),
]


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "interpreted":
        return str(request.param)
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
    monkeypatch.setattr(device_columns, "runs_kernels", lambda device: True)
    return "cpu"


def device_of(place: str) -> str:
    return "cpu" if place == "cpu" else "cuda"


def on_device(values: Any, device: str) -> Any:
    if isinstance(values, dict):
        return {key: on_device(part, device) for key, part in values.items()}
    return th.from_numpy(np.array(values)).to(device)


def as_tensors(transition: tuple[Any, ...], device: str, step: int) -> tuple[Any, ...]:
    """A transition on the device, in one of several ways that all mean the same."""
    obs, next_obs, action, reward, done, infos = transition
    truncated = th.tensor([info["TimeLimit.truncated"] for info in infos], device=device)
    tensors = [on_device(part, device) for part in (obs, next_obs, action, reward, done)]
    if step % 4 == 1:
        # other dtypes, and dtypes in which environments return them
        tensors[2:] = [tensors[2].to(th.int32)[:, None], tensors[3].double(), tensors[4].bool()]
    if step % 4 == 2:
        return obs, next_obs, action, tensors[3], done, infos  # mixed
    if step % 4 == 3 and not isinstance(obs, dict):
        # not contiguous
        return th.stack([tensors[0]] * 2, 1)[:, 0], *tensors[1:], {"TimeLimit.truncated": truncated.cpu().numpy()}
    return *tensors, {"TimeLimit.truncated": truncated if step % 8 else truncated.float()}


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta", "gzip1"])
@pytest.mark.parametrize("name", SPACES)
def test_replays_of_tensors_equal_sb3_at_the_same_seed(place: str, method: str, name: str) -> None:
    ours, theirs = replay_pair(SPACES[name], compression_method=method, buffer_device=place)
    for step, transition in enumerate(transitions(SPACES[name], 47)):
        theirs.add(*copy.deepcopy(transition))
        given = as_tensors(copy.deepcopy(transition), device_of(place), step)
        ours.add(*given)
        # whatever was given may be overwritten afterwards
        for part in given:
            if isinstance(part, th.Tensor):
                part.zero_()
        if step % 9 == 8:
            batches = []
            for buffer in (ours, theirs):
                set_random_seed(step)
                batches.append(buffer.sample(16))
            same(*batches)
    for column in ("actions", "rewards", "dones", "timeouts"):
        np.testing.assert_array_equal(th.as_tensor(getattr(ours, column)).cpu(), getattr(theirs, column))
    again = pickle.loads(pickle.dumps(ours))
    set_random_seed(47)
    batch = theirs.sample(16)
    set_random_seed(47)
    same(again.sample(16), batch)


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize(
    "infos", [None, [], {}, [{}] * N_ENVS, np.array([{}] * N_ENVS), [{"TimeLimit.truncated": False}] * N_ENVS]
)
def test_a_step_without_truncations_overwrites_an_older_one(place: str, infos: Any) -> None:
    ours, _ = replay_pair(SPACES["vector"], buffer_device=place)
    for step, (obs, next_obs, action, reward, _, _) in enumerate(transitions(SPACES["vector"], 22)):
        ended = np.ones(N_ENVS, np.float32)
        truncated = [{"TimeLimit.truncated": True}] * N_ENVS
        ours.add(obs, next_obs, action, reward, ended, truncated if step < 20 else infos)
    timeouts = th.as_tensor(ours.timeouts).cpu()
    assert not timeouts[:2].any()
    assert timeouts[2:].all()


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("name", ["image", "vector", "dict"])
def test_rollouts_of_tensors_equal_sb3_at_the_same_seed(place: str, method: str, name: str, tmp_path: Path) -> None:
    space, actions, device = SPACES[name], spaces.Discrete(4), device_of(place)
    ours: Any = GpuRolloutBuffer(
        16, space, actions, device, 0.9, 0.97, N_ENVS, compression_method=method, buffer_device=place
    )
    from stable_baselines3.common.buffers import DictRolloutBuffer

    kind: Any = DictRolloutBuffer if isinstance(space, spaces.Dict) else RolloutBuffer
    theirs = kind(16, space, actions, "cpu", 0.9, 0.97, N_ENVS)
    for rollout in range(2):
        for buffer in (ours, theirs):
            buffer.reset()
        for step, (obs, _, action, reward, done, _) in enumerate(transitions(space, 16, rollout)):
            value, log_prob = th.randn(N_ENVS, 1), th.randn(N_ENVS)
            theirs.add(copy.deepcopy(obs), action, reward, done, value, log_prob)
            rest: list[Any] = [on_device(part, device) for part in (action, reward, done)]
            if step % 3 == 1:
                rest[2] = rest[2].bool()
            if step % 3 == 2:
                rest = [action, reward, done > 0]
            ours.add(on_device(obs, device), *rest, value.to(device), log_prob.to(device))
        last, ended = th.randn(N_ENVS, 1), np.array([True, False, False])
        theirs.compute_returns_and_advantage(last, ended)
        ours.compute_returns_and_advantage(last.to(device), on_device(ended, device) if rollout else ended)
        for column in ("rewards", "episode_starts", "values", "log_probs", "advantages", "returns", "actions"):
            np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column), column)
        batches = []
        for buffer in (ours, theirs):
            set_random_seed(rollout)
            batches.append(list(buffer.get(10)))
        for a, b in zip(*batches, strict=True):
            same(a, b)
        for column in ("rewards", "values", "advantages", "returns", "actions"):
            np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column), column)
    again = pickle.loads(pickle.dumps(ours))
    ours.save(tmp_path / "rollout")
    for buffer in (again, type(ours).load(tmp_path / "rollout")):
        set_random_seed(rollout)
        for a, b in zip(buffer.get(10), batches[1], strict=True):
            same(a, b)


@pytest.mark.parametrize("place", PLACES[1:], indirect=True)
@pytest.mark.parametrize(("n_steps", "n_envs"), [(1, 1), (7, 3), (40, 70)])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (1, 1), (np.float64(0.9), 0.9)])
def test_returns_are_those_of_sb3_bit_for_bit(
    place: str, n_steps: int, n_envs: int, gamma: float, gae_lambda: float
) -> None:
    space, device = SPACES["vector"], device_of(place)
    both: list[Any] = [
        kind(n_steps, space, spaces.Discrete(4), where, gae_lambda, gamma, n_envs)
        for kind, where in ((GpuRolloutBuffer, device), (RolloutBuffer, "cpu"))
    ]
    random = np.random.default_rng(0)
    for _ in range(n_steps):
        obs = random.standard_normal((n_envs, 7)).astype(np.float32)
        numbers = [random.standard_normal(n_envs).astype(np.float32) for _ in range(3)]
        start = random.random(n_envs) < 0.2
        for buffer in both:
            buffer.add(obs, np.zeros((n_envs, 1)), numbers[0], start, th.tensor(numbers[1]), th.tensor(numbers[2]))
    last, dones = th.from_numpy(random.standard_normal(n_envs).astype(np.float32)), random.random(n_envs) < 0.5
    for buffer in both:
        buffer.compute_returns_and_advantage(last, dones)
    for name in ("advantages", "returns"):
        np.testing.assert_array_equal(getattr(both[0], name), getattr(both[1], name))


def bad_tensors() -> Iterator[Any]:
    one = th.ones(N_ENVS)
    yield "reward", {"reward": th.ones(2)}
    yield "done", {"done": th.ones(N_ENVS, 2)}
    yield "complex", {"reward": one.to(th.complex64)}
    yield "action shape", {"action": th.ones(2, 1, dtype=th.int64)}
    yield "action fractions", {"action": one / 2}
    yield "truncations", {"infos": {"TimeLimit.truncated": th.ones(2)}}
    yield "infos of another kind", {"infos": th.zeros(N_ENVS)}
    yield "obs shape", {"obs": th.zeros(N_ENVS, 3, dtype=th.uint8)}
    yield "obs too large", {"next_obs": th.full((N_ENVS, *IMAGE.shape), 300)}
    yield "obs fractions", {"obs": th.full((N_ENVS, *IMAGE.shape), 0.5)}


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("bad", [pytest.param(bad, id=name) for name, bad in bad_tensors()])
def test_tensors_that_do_not_fit_raise_and_change_nothing(place: str, bad: dict[str, Any]) -> None:
    ours, theirs = replay_pair(IMAGE, compression_method="delta", buffer_device=place)
    device = device_of(place)
    names = ("obs", "next_obs", "action", "reward", "done", "infos")
    *before, last = transitions(IMAGE, 24)
    for transition in before:
        for buffer in (ours, theirs):
            buffer.add(*copy.deepcopy(transition))
    arguments = {name: on_device(part, device) for name, part in zip(names[:5], last[:5], strict=True)}
    arguments["infos"] = last[5]
    changed = {
        name: {key: part.to(device) for key, part in value.items()} if isinstance(value, dict) else value.to(device)
        for name, value in bad.items()
    }
    with pytest.raises(SpecMismatchError):
        ours.add(**{**arguments, **changed})
    ours.check()
    ours.add(**arguments)
    theirs.add(*last)
    batches = []
    for buffer in (ours, theirs):
        set_random_seed(0)
        batches.append(buffer.sample(64))
    same(*batches)


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("name", ["image", "dict"])
@pytest.mark.parametrize("optimize_memory_usage", [False, True])
def test_indices_drawn_on_the_device_cover_what_is_held(place: str, name: str, optimize_memory_usage: bool) -> None:
    space = SPACES[name]
    ours, _ = replay_pair(
        space, compression_method="delta", buffer_device=place, sampling="device",
        optimize_memory_usage=optimize_memory_usage, handle_timeout_termination=True,
    )  # fmt: skip
    held: dict[float, Any] = {}
    for step, (obs, next_obs, action, _, done, infos) in enumerate(transitions(space, 27)):
        rewards = np.arange(N_ENVS, dtype=np.float32) + step * N_ENVS
        ours.add(obs, next_obs, action, rewards, done, infos)
        held |= {float(rewards[i]): (obs, next_obs, action, i) for i in range(N_ENVS)}
        if step not in (3, 26):
            continue
        state = np.random.get_state(legacy=False)["state"]["key"].copy()  # noqa: NPY002  # SB3's generator
        th.manual_seed(step)
        batch = ours.sample(600)
        th.manual_seed(step)
        assert th.equal(batch.rewards, ours.sample(600).rewards)
        assert (np.random.get_state(legacy=False)["state"]["key"] == state).all()  # noqa: NPY002
        found = set(batch.rewards.flatten().tolist())
        oldest = 0 if step < 20 else step - 19 + optimize_memory_usage
        assert found == set(range(oldest * N_ENVS, (step + 1) * N_ENVS))
        for row, number in enumerate(batch.rewards.flatten().tolist()):
            obs, next_obs, action, i = held[number]
            assert batch.actions[row, 0] == action[i]
            for ours_part, theirs_part in ((batch.observations, obs), (batch.next_observations, next_obs)):
                if name == "dict":
                    ours_part, theirs_part = ours_part["image"], theirs_part["image"]
                np.testing.assert_array_equal(ours_part[row].cpu(), theirs_part[i])


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_rollout_permuted_on_the_device_yields_each_step_once(place: str) -> None:
    device = device_of(place)
    buffer = GpuRolloutBuffer(
        16, IMAGE, spaces.Discrete(4), device, n_envs=N_ENVS, compression_method="delta", buffer_device=place,
        sampling="device",
    )  # fmt: skip
    steps = list(transitions(IMAGE, 16))
    for at, (obs, _, action, reward, done, _) in enumerate(steps):
        values = th.arange(N_ENVS, dtype=th.float32) + at * N_ENVS
        buffer.add(obs, action, reward, done, values, values)
    seen = []
    for batch in buffer.get(10):
        for row, number in enumerate(batch.old_values.int().tolist()):
            at, env = divmod(number, N_ENVS)
            np.testing.assert_array_equal(batch.observations[row].cpu(), steps[at][0][env])
            assert batch.actions[row, 0] == steps[at][2][env]
            seen.append(number)
    assert sorted(seen) == list(range(16 * N_ENVS))
    assert seen != sorted(seen)


def test_sampling_is_checked() -> None:
    both: Any = (GpuReplayBuffer, GpuRolloutBuffer)
    for make in both:
        with pytest.raises(ArgumentError, match="sampling"):
            make(10, IMAGE, spaces.Discrete(4), "cpu", sampling="cuda")


def test_columns_on_the_cpu_are_arrays_that_can_be_assigned_to() -> None:
    ours, _ = replay_pair(IMAGE)
    for transition in transitions(IMAGE, 5):
        ours.add(*transition)
    ours.rewards[:5] = 3
    ours.dones = np.ones_like(ours.dones)
    ours.timeouts[...] = 0
    batch = ours.sample(8)
    assert (batch.rewards == 3).all()
    assert (batch.dones == 1).all()


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["replay", "rollout"])
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("name", ["image", "vector", "dict"])
def test_adding_tensors_never_touches_the_host(kind: str, method: str, name: str) -> None:
    space, actions = SPACES[name], spaces.Discrete(4)
    steps = [tuple(on_device(part, "cuda") for part in transition[:5]) for transition in transitions(space, 60)]
    truncated = {"TimeLimit.truncated": th.zeros(N_ENVS, dtype=th.bool, device="cuda")}
    value = th.zeros(N_ENVS, device="cuda")
    if kind == "replay":
        buffer: Any = GpuReplayBuffer(300 * N_ENVS, space, actions, "cuda", N_ENVS, compression_method=method)
    else:
        buffer = GpuRolloutBuffer(300, space, actions, "cuda", n_envs=N_ENVS, compression_method=method)

    def add(step: tuple[Any, ...]) -> None:
        obs, next_obs, action, reward, done = step
        if kind == "replay":
            buffer.add(obs, next_obs, action, reward, done, truncated)
        else:
            buffer.add(obs, action, reward, done.bool(), value, value)

    # until a method is chosen, kernels are compiled and memory is reserved
    for step in steps[:50]:
        add(step)
    th.cuda.synchronize()
    names: list[str] = []
    with noting(names):
        for step in steps[50:]:
            add(step)
    assert names
    assert [name for name in names if "Memcpy HtoD" in name or "Memcpy DtoH" in name or "Synchronize" in name] == []


@pytest.mark.gpu
@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampling", ["numpy", "device"])
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("name", ["image", "vector", "dict"])
@pytest.mark.parametrize("kind", [GpuReplayBuffer, GpuNStepReplayBuffer])
def test_sampling_never_waits(kind: Any, name: str, method: str, sampling: Any) -> None:
    space = SPACES[name]
    buffer = kind(300 * N_ENVS, space, spaces.Discrete(4), "cuda", N_ENVS, compression_method=method, sampling=sampling)
    for transition in transitions(space, 50):
        buffer.add(*transition)
    buffer.sample(64)  # compiles kernels
    with never_waits():
        for _ in range(10):
            batch = buffer.sample(64)
    assert batch.rewards.is_cuda


@pytest.mark.gpu
@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampling", ["numpy", "device"])
@pytest.mark.parametrize("method", ["none", "delta"])
def test_reading_a_rollout_never_waits(method: str, sampling: Any) -> None:
    buffer = GpuRolloutBuffer(
        60, IMAGE, spaces.Discrete(4), "cuda", n_envs=N_ENVS, compression_method=method, sampling=sampling
    )
    value, dones = th.zeros(N_ENVS, device="cuda"), th.zeros(N_ENVS, dtype=th.bool, device="cuda")
    for rollout in range(2):
        buffer.reset()
        for obs, _, action, reward, done, _ in transitions(IMAGE, 60, rollout):
            buffer.add(obs, action, reward, done, value, value)
        if rollout == 0:
            buffer.compute_returns_and_advantage(value, dones)
            list(buffer.get(20))  # compiles kernels
            continue
        with never_waits():
            buffer.compute_returns_and_advantage(value, dones)
            assert len(list(buffer.get(20))) == 9
