"""One stream of experience, several buffers: to compare methods, or to record while training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer

from sb3_extra_buffers.errors import AlgorithmMismatchError

if TYPE_CHECKING:
    from sb3_extra_buffers.recording import BaseRecordBuffer

__all__ = ["FanOutReplayBuffer", "FanOutRolloutBuffer"]

Members = Mapping[str, Any] | Sequence[Any]


def _of_first(name: str) -> Any:
    """An attribute of the first buffer; setting it sets it in all of them."""

    def get(self: _FanOut) -> Any:
        return getattr(self.first, name)

    def put(self: _FanOut, value: Any) -> None:
        for buffer in self.buffers.values():
            setattr(buffer, name, value)

    return property(get, put, doc=f"`{name}` of the first buffer.")


class _FanOut:
    """Several buffers behind the face of one: all are written, the first is read.

    Attributes:
        buffers: The buffers, by name, first the one that is read.
        seconds: How long each has taken to add what it was given.
    """

    buffers: dict[str, Any]
    seconds: dict[str, float]

    # what SB3 looks at; everything else is to be asked of one of the buffers
    pos = _of_first("pos")
    full = _of_first("full")
    buffer_size = _of_first("buffer_size")
    n_envs = _of_first("n_envs")
    device = _of_first("device")
    observation_space = _of_first("observation_space")
    action_space = _of_first("action_space")
    obs_shape = _of_first("obs_shape")
    action_dim = _of_first("action_dim")
    observations = _of_first("observations")
    actions = _of_first("actions")
    rewards = _of_first("rewards")

    _columns: tuple[str, ...]

    def _make(
        self, members: Members | None, base: type[Any], record: BaseRecordBuffer | None, threads: bool, **common: Any
    ) -> None:
        if not members:
            raise AlgorithmMismatchError(
                f"{type(self).__name__} has no buffers to hand experience to; pass "
                "buffers={'name': BufferClass, 'other': (BufferClass, {'compression_method': 'rle'})}"
            )
        named = members if isinstance(members, Mapping) else {str(place): each for place, each in enumerate(members)}
        self.buffers = {}
        for name, member in named.items():
            cls, options = member if isinstance(member, tuple) else (member, {})
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise AlgorithmMismatchError(f"buffer {name!r} must be a {base.__name__} class, got {cls!r}")
            self.buffers[name] = cls(**common, **options)
        self.seconds = dict.fromkeys(self.buffers, 0.0)
        self.record = record
        self._threads = threads and len(self.buffers) > 1
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def first(self) -> Any:
        """The buffer that is read."""
        return next(iter(self.buffers.values()))

    def size(self) -> int:
        """Steps held."""
        held: int = self.first.size()
        return held

    def _add(self, *transition: Any) -> None:
        """Give a step to every buffer; an error of one is raised when all have had it."""

        def add(name: str, buffer: Any) -> None:
            start = time.perf_counter()
            # SB3's Dict buffers write into the dicts they are given
            buffer.add(*(dict(part) if isinstance(part, dict) else part for part in transition))
            self.seconds[name] += time.perf_counter() - start

        self._each(add)

    def _each(self, act: Callable[[str, Any], None]) -> None:
        errors = []
        if self._threads:
            tasks = [self._executor().submit(act, name, buffer) for name, buffer in self.buffers.items()]
            errors = [error for error in (task.exception() for task in tasks) if error is not None]
        else:
            for name, buffer in self.buffers.items():
                try:
                    act(name, buffer)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _executor(self) -> ThreadPoolExecutor:
        # threads do not survive a fork
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(len(self.buffers))
        return self._pool[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def memory_usage(self) -> dict[str, int]:
        """Bytes that each buffer holds: what it says itself, or the size of its arrays."""
        found = {}
        for name, buffer in self.buffers.items():
            usage = getattr(buffer, "memory_usage", None)
            found[name] = _array_bytes(vars(buffer)) if usage is None else int(usage().total)
        return found

    def differences(self) -> dict[str, list[str]]:
        """Which columns of which buffers are not equal to those of the first; empty if all agree."""
        steps = self.buffer_size if self.full else self.pos
        found: dict[str, list[str]] = {}
        for name, buffer in list(self.buffers.items())[1:]:
            unlike = [column for column in self._columns if not _same(self.first, buffer, column, steps)]
            if unlike:
                found[name] = unlike
        return found

    def __repr__(self) -> str:
        members = ", ".join(f"{name}: {type(buffer).__name__}" for name, buffer in self.buffers.items())
        return f"{type(self).__name__}({members})"


def _array_bytes(parts: Mapping[str, Any]) -> int:
    return sum(
        _array_bytes(part) if isinstance(part, dict) else part.nbytes
        for part in parts.values()
        if isinstance(part, (np.ndarray, dict))
    )


def _same(one: Any, other: Any, column: str, steps: int) -> bool:
    ours, theirs = getattr(one, column), getattr(other, column)
    pairs = [(ours[key], theirs[key]) for key in ours] if isinstance(ours, dict) else [(ours, theirs)]
    # a step at a time: a compressed column as a whole may not fit into memory
    return all(
        a.shape == b.shape and all(np.array_equal(a[step], b[step]) for step in range(min(steps, len(a))))
        for a, b in pairs
    )


class FanOutRolloutBuffer(_FanOut, RolloutBuffer):
    """A rollout buffer that hands every step to several; the algorithm learns from the first.

    Training is the same as with the first buffer alone. The arguments of SB3's buffer go to every one of them.
    Experimental.

    Args:
        buffers: Classes of rollout buffers by name, or pairs of a class and its further arguments; first the one to
            learn from.
        record: A record buffer that is given what the first environment does.
        threads: Whether buffers add at the same time, each in a thread of its own.

    Example:
        >>> from sb3_extra_buffers.compressed import CompressedRolloutBuffer
        >>> kinds = {"dense": RolloutBuffer, "rle": (CompressedRolloutBuffer, {"compression_method": "rle"})}
        >>> options = dict(rollout_buffer_class=FanOutRolloutBuffer, rollout_buffer_kwargs=dict(buffers=kinds))
    """

    gae_lambda = _of_first("gae_lambda")
    gamma = _of_first("gamma")
    returns = _of_first("returns")
    episode_starts = _of_first("episode_starts")
    values = _of_first("values")
    log_probs = _of_first("log_probs")
    advantages = _of_first("advantages")
    generator_ready = _of_first("generator_ready")

    _columns = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        buffers: Members | None = None,
        record: BaseRecordBuffer | None = None,
        threads: bool = False,
    ) -> None:
        # SB3's own constructor would lay out arrays of its own
        self._make(
            buffers, RolloutBuffer, record, threads,
            buffer_size=buffer_size, observation_space=observation_space, action_space=action_space, device=device,
            gae_lambda=gae_lambda, gamma=gamma, n_envs=n_envs,
        )  # fmt: skip

    def reset(self) -> None:
        for buffer in self.buffers.values():
            buffer.reset()

    def add(
        self, obs: Any, action: Any, reward: Any, episode_start: Any, value: th.Tensor, log_prob: th.Tensor
    ) -> None:
        """Give a step to every buffer."""
        self._add(obs, action, reward, episode_start, value, log_prob)
        if self.record is not None:
            # a rollout says where episodes begin
            if episode_start[0]:
                self.record.end_episode()
            self.record.add(_first(obs), reward[0], np.array(action[0]))

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: Any) -> None:
        """In every buffer."""
        for buffer in self.buffers.values():
            buffer.compute_returns_and_advantage(last_values, dones)

    def get(self, batch_size: int | None = None) -> Any:
        """The rollout of the first buffer in random batches."""
        return self.first.get(batch_size)


class FanOutReplayBuffer(_FanOut, ReplayBuffer):
    """A replay buffer that hands every transition to several; the algorithm samples from the first.

    Training is the same as with the first buffer alone. The arguments of SB3's buffer go to every one of them.
    Experimental.

    Args:
        buffers: Classes of replay buffers by name, or pairs of a class and its further arguments; first the one to
            sample from.
        record: A record buffer that is given what the first environment does.
        threads: Whether buffers add at the same time, each in a thread of its own.
    """

    next_observations = _of_first("next_observations")
    dones = _of_first("dones")
    timeouts = _of_first("timeouts")
    optimize_memory_usage = _of_first("optimize_memory_usage")
    handle_timeout_termination = _of_first("handle_timeout_termination")

    _columns = ("observations", "actions", "rewards", "dones", "timeouts")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        buffers: Members | None = None,
        record: BaseRecordBuffer | None = None,
        threads: bool = False,
    ) -> None:
        # SB3's own constructor would lay out arrays of its own
        self._make(
            buffers, ReplayBuffer, record, threads,
            buffer_size=buffer_size, observation_space=observation_space, action_space=action_space, device=device,
            n_envs=n_envs, optimize_memory_usage=optimize_memory_usage,
            handle_timeout_termination=handle_timeout_termination,
        )  # fmt: skip

    def reset(self) -> None:
        for buffer in self.buffers.values():
            buffer.reset()

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Give a transition to every buffer."""
        self._add(obs, next_obs, action, reward, done, infos)
        if self.record is not None:
            self.record.add(_first(obs), reward[0], np.array(action[0]), done=done[0])

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """A random batch of the first buffer."""
        return self.first.sample(batch_size, env=env)


def _first(observations: Any) -> Any:
    if isinstance(observations, dict):
        return {key: part[0] for key, part in observations.items()}
    return np.array(observations[0])
