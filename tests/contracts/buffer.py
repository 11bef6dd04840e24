"""What the tests of SB3 buffers share: games of every space, played step by step, and what makes batches the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from tests.contracts.store import Stacked, Walk

Array = npt.NDArray[Any]

SPACES: dict[str, spaces.Space[Any]] = {
    "frames first": spaces.Box(0, 255, (4, 20, 16), np.uint8),
    "frames last": spaces.Box(0, 255, (20, 16, 4), np.uint8),
    "one frame": spaces.Box(0, 255, (24, 32, 1), np.uint8),
    "float frames": spaces.Box(0, 1, (4, 12, 16), np.float32),
    "vector": spaces.Box(-1, 1, (17,), np.float32),
    "double": spaces.Box(-1, 1, (5,), np.float64),
    "discrete": spaces.Discrete(7),
    "multi discrete": spaces.MultiDiscrete([3, 200]),
    "multi binary": spaces.MultiBinary(9),
}
KEYS = {name.replace(" ", "_"): SPACES[name] for name in ("frames first", "vector", "discrete", "multi binary")}
SPACES["dict"] = spaces.Dict(KEYS)
IMAGES = [name for name, space in SPACES.items() if len(space.shape or ()) == 3]
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "double": spaces.Box(-1, 1, (2, 2), np.float64),
    "multi binary": spaces.MultiBinary(5),
    "multi discrete": spaces.MultiDiscrete([2, 3]),
}


class Step(NamedTuple):
    """What `ReplayBuffer.add` takes."""

    obs: Any
    next_obs: Any
    action: Array
    reward: Array
    done: Array
    infos: list[dict[str, Any]]


class Game:
    """One environment whose observations are of ``space``; what it shows is a matter of ``seed`` alone."""

    def __init__(self, space: spaces.Space[Any], seed: int) -> None:
        # a copy: spaces draw their samples from a state of their own
        self.space = copy.deepcopy(space)
        self.rng = np.random.default_rng(seed)
        self.images: dict[str, Stacked] = {}
        for name, part in self._parts().items():
            part.seed(seed)
            if len(part.shape or ()) == 3:
                self.images[name] = self._play(part, seed)
        self.obs = self._look()

    def _parts(self) -> dict[str, spaces.Space[Any]]:
        return dict(self.space) if isinstance(self.space, spaces.Dict) else {"": self.space}

    @staticmethod
    def _play(space: spaces.Space[Any], seed: int) -> Stacked:
        shape, dtype = space.shape or (), space.dtype
        axis = "first" if shape[0] == 4 else "last"
        frame = shape[1:] if axis == "first" else shape[:-1]
        return Stacked(Walk(frame, seed, dtype or np.uint8), min(shape), axis, episode=10**9)

    def _look(self) -> Any:
        seen: dict[str, Any] = {}
        for name, part in self._parts().items():
            image = self.images.get(name)
            seen[name] = part.sample() if image is None else image.observation.reshape(part.shape or ())
        return seen if isinstance(self.space, spaces.Dict) else seen[""]

    def step(self) -> tuple[Any, Any, bool, dict[str, Any]]:
        """``obs, next_obs, done, info``; ``next_obs`` is the terminal one where the episode ends."""
        before = self.obs
        for image in self.images.values():
            image.step()
        after = self.obs = self._look()
        done = bool(self.rng.random() < 0.12)
        info: dict[str, Any] = {"TimeLimit.truncated": bool(done and self.rng.random() < 0.5)}
        if done:
            for image in self.images.values():
                image._planes = [np.zeros_like(image.walk.frame)] * image.stack
                image._push(image.walk.step())
            self.obs = self._look()
        elif self.rng.random() < 0.3:
            info = {}
        return before, after, done, info


def stack_envs(observations: list[Any]) -> Any:
    """Observations of several environments as a vectorised one hands them out."""
    if isinstance(observations[0], dict):
        return {key: np.stack([each[key] for each in observations]) for key in observations[0]}
    return np.stack(observations)


def play(
    space: spaces.Space[Any], n_envs: int, n_steps: int, seed: int = 0, actions: spaces.Space[Any] | None = None
) -> Iterator[Step]:
    """Steps of ``n_envs`` games with episodes that end, half of them by a time limit."""
    games = [Game(space, seed * 100 + env) for env in range(n_envs)]
    action_space = actions or ACTIONS["discrete"]
    action_space.seed(seed)
    rng = np.random.default_rng(seed)
    for _ in range(n_steps):
        played = [game.step() for game in games]
        yield Step(
            stack_envs([each[0] for each in played]),
            stack_envs([each[1] for each in played]),
            np.stack([np.asarray(action_space.sample()) for _ in games]),
            rng.normal(size=n_envs).astype(np.float32),
            np.array([each[2] for each in played]),
            [each[3] for each in played],
        )


def is_same(ours: Any, theirs: Any) -> None:
    """Raise unless two batches are the same to the last bit: values, dtypes, shapes, types, devices."""
    if isinstance(theirs, th.Tensor):
        assert type(ours) is type(theirs)
        assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device)
        assert ours.is_contiguous()
        assert ours.cpu().numpy().tobytes() == theirs.cpu().contiguous().numpy().tobytes()
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            is_same(ours[key], theirs[key])
    elif isinstance(theirs, tuple):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            is_same(mine, other)
    else:
        assert theirs is None
        assert ours is None


def sample(buffer: Any, batch_size: int, seed: int, env: Any = None) -> tuple[Any, Any]:
    """A batch drawn after ``seed``, and the random number that would come next."""
    np.random.seed(seed)  # noqa: NPY002  # the generator that SB3 draws from
    return buffer.sample(batch_size, env=env), np.random.random()  # noqa: NPY002


def assert_same_samples(ours: Any, theirs: Any, *, seed: int = 0, batch_size: int = 16, env: Any = None) -> None:
    """Raise unless both draw the same batch and leave the random generator in the same state."""
    mine, my_next = sample(ours, batch_size, seed, env)
    other, other_next = sample(theirs, batch_size, seed, env)
    is_same(mine, other)
    assert my_next == other_next


def rollouts(buffer: Any, batch_size: int | None, seed: int) -> list[Any]:
    """All batches of a rollout, drawn after ``seed``."""
    np.random.seed(seed)  # noqa: NPY002
    return list(buffer.get(batch_size))


def assert_same_rollout(ours: Any, theirs: Any, batch_size: int | None, seed: int = 0) -> None:
    mine, other = rollouts(ours, batch_size, seed), rollouts(theirs, batch_size, seed)
    assert len(mine) == len(other) > 0
    for one, two in zip(mine, other, strict=True):
        is_same(one, two)


def contents(buffer: Any) -> dict[str, Any]:
    """A plain copy of everything that a buffer holds and that can be read from outside."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        return np.array(value).copy()

    columns = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts", "ep_start", "ep_length")
    found = {name: plain(getattr(buffer, name)) for name in columns if hasattr(buffer, name)}
    return found | {"pos": buffer.pos, "full": buffer.full, "size": buffer.size()}


def assert_same_contents(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, dict):
            assert_same_contents(value, after[name])
        else:
            np.testing.assert_array_equal(value, after[name], err_msg=name)
