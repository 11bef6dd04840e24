"""A plain list of transitions, and what a batch of windows from it must contain."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

Array = npt.NDArray[Any]

IMAGES = spaces.Box(0, 255, (4, 12, 10), np.uint8)
VECTORS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
MIXED = spaces.Dict({"image": IMAGES, "speed": VECTORS})
SPACES: dict[str, spaces.Space[Any]] = {"images": IMAGES, "vectors": VECTORS, "dict": MIXED}
STATES = {"h": (3,), "c": (2, 2)}


class Transition(NamedTuple):
    """One step of one environment."""

    obs: dict[str, Array]
    next_obs: dict[str, Array]
    action: int
    reward: float
    done: bool
    truncated: bool
    is_first: bool
    state: dict[str, Array]


class Model:
    """Steps of several environments in lists, and the buffers that are given the same steps."""

    def __init__(
        self, space: spaces.Space[Any], n_envs: int, seed: int = 0, episode: float = 8.0, noise: bool = False
    ) -> None:
        self.space, self.n_envs, self.episode, self.noise = space, n_envs, episode, noise
        self.rng = np.random.default_rng(seed)
        self.lists: list[list[Transition]] = [[] for _ in range(n_envs)]
        self.observed = [self._observe(None) for _ in range(n_envs)]
        self.is_first = [True] * n_envs

    def _observe(self, before: dict[str, Array] | None) -> dict[str, Array]:
        frame = np.zeros((1, *IMAGES.shape[1:]), np.uint8) if before is None else before["image"][-1:].copy()
        if self.noise:
            frame = self.rng.integers(0, 256, frame.shape, np.uint8)
        frame[0, self.rng.integers(12), self.rng.integers(10)] = self.rng.integers(1, 256)
        stack = np.repeat(frame, 4, axis=0) if before is None else np.concatenate([before["image"][1:], frame])
        return {"image": stack, "speed": self.rng.normal(size=3).astype(np.float32)}

    def as_given(self, observed: list[dict[str, Array]]) -> Any:
        """Observations of all environments as the space has them."""
        stacked = {key: np.stack([each[key] for each in observed]) for key in ("image", "speed")}
        return stacked if self.space is MIXED else stacked["image" if self.space is IMAGES else "speed"]

    def add_to(self, *buffers: Any, count: int = 1) -> None:
        """Add the next ``count`` steps to the lists and to ``buffers``."""
        for _ in range(count):
            before, after = self.observed, [self._observe(each) for each in self.observed]
            done = self.rng.random(self.n_envs) < 1 / self.episode
            truncated = done & (self.rng.random(self.n_envs) < 0.5)
            action = self.rng.integers(0, 5, (self.n_envs, 1))
            reward = self.rng.integers(-8, 8, self.n_envs).astype(np.float32)
            state = {
                name: self.rng.normal(size=(self.n_envs, *shape)).astype(np.float32) for name, shape in STATES.items()
            }
            infos = [{"TimeLimit.truncated": bool(each)} for each in truncated]
            for buffer in buffers:
                more = {"recurrent_state": state} if getattr(buffer, "recurrent_states", None) else {}
                buffer.add(self.as_given(before), self.as_given(after), action, reward, done, infos, **more)
            for env, steps in enumerate(self.lists):
                states = {name: array[env] for name, array in state.items()}
                steps.append(
                    Transition(
                        before[env], after[env], int(action[env, 0]), float(reward[env]), bool(done[env]),
                        bool(truncated[env]), self.is_first[env], states,
                    )
                )  # fmt: skip
            self.is_first = [bool(each) for each in done]
            self.observed = [self._observe(None) if ended else after[env] for env, ended in enumerate(done)]

    @property
    def n_added(self) -> int:
        return len(self.lists[0])

    def held(self, buffer: Any) -> list[tuple[int, int]]:
        """Number and environment of every transition in ``buffer``."""
        return [(n, env) for n in range(self.n_added - buffer.size(), self.n_added) for env in range(self.n_envs)]

    # ---- what a batch must contain ----

    def check(
        self, batch: Any, oldest: int, length: int, n_steps: int = 1, episode_end: str = "stop", gamma: float = 0.99,
        newest: bool = False, burn_in: int = 0, n_added: int | None = None,
    ) -> None:  # fmt: skip
        """Assert that ``batch`` holds windows of the lists, under these rules; steps below ``oldest`` are gone."""
        n_added = self.n_added if n_added is None else n_added
        size, total = len(batch.envs), burn_in + length
        for name in ("rewards", "dones", "discounts", "is_first", "mask", "learn_mask"):
            assert getattr(batch, name).shape == (size, total), name
        assert batch.steps.shape == (size, total)
        mask = batch.mask.numpy()
        np.testing.assert_array_equal(mask, batch.steps >= 0)
        is_known = (np.arange(total) >= burn_in) | (batch.is_first.numpy().cumsum(axis=1) > 0)
        np.testing.assert_array_equal(batch.learn_mask.numpy(), mask & is_known)
        for row, env in enumerate(batch.envs):
            steps, first = self.lists[env], int(batch.steps[row, 0])
            count = int(mask[row].sum())
            assert oldest <= first
            np.testing.assert_array_equal(batch.steps[row, :count], first + np.arange(count))
            assert first + count <= n_added
            if episode_end != "continue":
                assert not any(steps[n].done for n in range(first, first + count - 1)), "a window mixes episodes"
                ended = count == total or steps[first + count - 1].done or first + count == n_added
                assert ended, "a window ends before its episode"
            for name, part in batch.recurrent_states.items():
                np.testing.assert_array_equal(part[row], steps[first].state[name])
            for t in range(total):
                self._check_step(batch, row, env, t, count, n_steps, gamma, newest, n_added)

    def _check_step(
        self, batch: Any, row: int, env: int, t: int, count: int, n_steps: int, gamma: float, newest: bool, n_added: int
    ) -> None:
        steps, first = self.lists[env], int(batch.steps[row, 0])
        if t >= count:
            numbers = (batch.rewards, batch.dones, batch.discounts, batch.is_first, batch.actions)
            assert not any(part[row, t].any() for part in numbers)
            self._same(batch.observations, row, t, steps[first + count - 1].next_obs, newest)
            return
        here = steps[first + t]
        self._same(batch.observations, row, t, here.obs, newest)
        assert batch.actions[row, t].tolist() == [here.action]
        assert bool(batch.is_first[row, t]) == here.is_first
        returned, last = 0.0, here
        for ahead in range(n_steps):
            last = steps[first + t + ahead]
            returned += gamma**ahead * last.reward
            if last.done or first + t + ahead + 1 == n_added:
                break
        np.testing.assert_allclose(float(batch.rewards[row, t]), returned, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(float(batch.discounts[row, t]), gamma ** (ahead + 1), rtol=1e-5)
        assert bool(batch.dones[row, t]) == (last.done and not last.truncated)
        self._same(batch.next_observations, row, t, last.next_obs, newest)

    def _same(self, observations: Any, row: int, t: int, expected: dict[str, Array], newest: bool) -> None:
        if self.space is not MIXED:
            observations = {"image" if self.space is IMAGES else "speed": observations}
        for key, part in observations.items():
            wanted = expected[key][-1:] if newest and key == "image" else expected[key]
            np.testing.assert_array_equal(part[row, t].numpy(), wanted)


def drawn_steps(batch: Any) -> set[tuple[int, int]]:
    """Number and environment of every step of a batch."""
    envs = np.broadcast_to(np.asarray(batch.envs)[:, None], batch.steps.shape)
    return {(int(n), int(env)) for n, env in zip(batch.steps.ravel(), envs.ravel(), strict=True) if n >= 0}
