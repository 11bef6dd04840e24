"""Pass one stream of experience on to several buffers, to compare methods or to record during training."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer

from sb3_extra_buffers.errors import AlgorithmMismatchError
from sb3_extra_buffers.recording.factory import observation_of

if TYPE_CHECKING:
    from sb3_extra_buffers.recording import BaseRecordBuffer

__all__ = ["FanOutReplayBuffer", "FanOutRolloutBuffer"]

# buffer classes, or pairs of a class and its further arguments
Members = Mapping[str, Any] | Sequence[Any]


def _delegated(name: str) -> Any:
    """Return a property that reads attribute ``name`` of the first buffer and sets it in all buffers."""

    def get(self: _FanOut) -> Any:
        return getattr(self.first, name)

    def put(self: _FanOut, value: Any) -> None:
        for buffer in self.buffers.values():
            setattr(buffer, name, value)

    return property(get, put, doc=f"`{name}` of the first buffer.")


class _FanOut:
    """Several buffers with the interface of one: all of them are written to, the first one is read.

    Attributes:
        buffers: The buffers, by name; the first one is read.
        seconds: How long each buffer has taken to add its steps.
    """

    buffers: dict[str, Any]
    seconds: dict[str, float]

    # what SB3 uses; for anything else, use one of the buffers
    pos = _delegated("pos")
    full = _delegated("full")
    buffer_size = _delegated("buffer_size")
    n_envs = _delegated("n_envs")
    device = _delegated("device")
    observation_space = _delegated("observation_space")
    action_space = _delegated("action_space")
    obs_shape = _delegated("obs_shape")
    action_dim = _delegated("action_dim")
    observations = _delegated("observations")
    actions = _delegated("actions")
    rewards = _delegated("rewards")

    _columns: tuple[str, ...]

    def _make_buffers(
        self, members: Members | None, base: type[Any], record: BaseRecordBuffer | None, threads: bool, **common: Any
    ) -> None:
        if not members:
            raise AlgorithmMismatchError(
                f"{type(self).__name__} needs the buffers to add to, such as "
                "buffers={'name': BufferClass, 'other': (BufferClass, {'compression_method': 'rle'})}"
            )
        self.buffers = {}
        for name, member in members.items() if isinstance(members, Mapping) else enumerate(members):
            cls, options = member if isinstance(member, tuple) else (member, {})
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise AlgorithmMismatchError(f"buffer {name!r} must be a {base.__name__} class, got {cls!r}")
            self.buffers[str(name)] = cls(**common, **options)
        self.seconds = dict.fromkeys(self.buffers, 0.0)
        self.record = record
        self._threads = threads and len(self.buffers) > 1
        # process id and executor
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def first(self) -> Any:
        """The buffer that is read."""
        return next(iter(self.buffers.values()))

    def size(self) -> int:
        """Return the number of steps in the first buffer."""
        size: int = self.first.size()
        return size

    def reset(self) -> None:
        """Reset every buffer."""
        for buffer in self.buffers.values():
            buffer.reset()

    def _add_to_all(self, *transition: Any) -> None:
        """Add a step to every buffer; if one raises, the others still add the step."""

        def add(name: str) -> None:
            start = time.perf_counter()
            # copied: SB3's Dict buffers modify the dicts they are given
            self.buffers[name].add(*(dict(part) if isinstance(part, dict) else part for part in transition))
            self.seconds[name] += time.perf_counter() - start

        errors: list[BaseException | None] = []
        if self._threads:
            tasks = [self._executor().submit(add, name) for name in self.buffers]
            errors = [task.exception() for task in tasks]
        else:
            for name in self.buffers:
                try:
                    add(name)
                except Exception as error:
                    errors.append(error)
        for problem in errors:
            if problem is not None:
                raise problem

    def _executor(self) -> ThreadPoolExecutor:
        # threads do not survive a fork
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(len(self.buffers))
        return self._pool[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes of each buffer: its own report, or the size of its arrays."""
        return {
            name: int(buffer.memory_usage().total) if hasattr(buffer, "memory_usage") else _array_bytes(vars(buffer))
            for name, buffer in self.buffers.items()
        }

    def differences(self) -> dict[str, list[str]]:
        """Return, for each buffer that differs from the first, the names of the columns that do; empty if none does."""
        steps = self.buffer_size if self.full else self.pos
        differences = {
            name: [column for column in self._columns if not _equal(self.first, buffer, column, steps)]
            for name, buffer in list(self.buffers.items())[1:]
        }
        return {name: columns for name, columns in differences.items() if columns}

    def __repr__(self) -> str:
        members = ", ".join(f"{name}: {type(buffer).__name__}" for name, buffer in self.buffers.items())
        return f"{type(self).__name__}({members})"


def _array_bytes(parts: Mapping[str, Any]) -> int:
    return sum(
        _array_bytes(part) if isinstance(part, dict) else part.nbytes
        for part in parts.values()
        if isinstance(part, (np.ndarray, dict))
    )


def _equal(left: Any, right: Any, column: str, steps: int) -> bool:
    ours, theirs = getattr(left, column), getattr(right, column)
    pairs = [(ours[key], theirs[key]) for key in ours] if isinstance(ours, dict) else [(ours, theirs)]
    # step by step: a whole column may not fit into memory when decompressed
    return all(
        a.shape == b.shape
        and all(np.array_equal(a[step], b[step], equal_nan=True) for step in range(min(steps, len(a))))
        for a, b in pairs
    )


class FanOutRolloutBuffer(_FanOut, RolloutBuffer):
    """A rollout buffer that passes every step on to several buffers; the algorithm learns from the first.

    Training is the same as with the first buffer alone. All buffers receive the arguments of SB3's buffer.
    Experimental.

    Args:
        buffers: Rollout buffer classes by name, or pairs of a class and its further arguments. The first one is the
            one to learn from.
        record: A record buffer for the steps of the first environment.
        threads: Whether buffers add steps in parallel, each in its own thread.
        buffer_size: Number of steps of a rollout, in each environment.
        observation_space: Space of the observations.
        action_space: Space of the actions.
        device: Device of the batches.
        gae_lambda: Trade-off between bias and variance of generalised advantage estimates.
        gamma: Discount factor.
        n_envs: Number of parallel environments.

    Examples:
        >>> from stable_baselines3 import PPO
        >>> from stable_baselines3.common.buffers import RolloutBuffer
        >>> from sb3_extra_buffers.compressed import CompressedRolloutBuffer
        >>> from sb3_extra_buffers.vec_buf import FanOutRolloutBuffer
        >>> kinds = {"dense": RolloutBuffer, "rle": (CompressedRolloutBuffer, {"compression_method": "rle"})}
        >>> options = dict(rollout_buffer_class=FanOutRolloutBuffer, rollout_buffer_kwargs=dict(buffers=kinds))
        >>> PPO("MlpPolicy", "CartPole-v1", n_steps=64, n_epochs=1, **options).learn(64).rollout_buffer
        FanOutRolloutBuffer(dense: RolloutBuffer, rle: CompressedRolloutBuffer)
    """

    gae_lambda = _delegated("gae_lambda")
    gamma = _delegated("gamma")
    returns = _delegated("returns")
    episode_starts = _delegated("episode_starts")
    values = _delegated("values")
    log_probs = _delegated("log_probs")
    advantages = _delegated("advantages")
    generator_ready = _delegated("generator_ready")

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
        # SB3's constructor is not called: it would allocate arrays
        self._make_buffers(
            buffers, RolloutBuffer, record, threads,
            buffer_size=buffer_size, observation_space=observation_space, action_space=action_space, device=device,
            gae_lambda=gae_lambda, gamma=gamma, n_envs=n_envs,
        )  # fmt: skip

    def add(
        self, obs: Any, action: Any, reward: Any, episode_start: Any, value: th.Tensor, log_prob: th.Tensor
    ) -> None:
        """Add a step to every buffer.

        Args:
            obs: Observations, of shape ``(n_envs, ...)``.
            action: Actions.
            reward: Rewards.
            episode_start: Whether an episode began with each observation.
            value: Values of the observations.
            log_prob: Log probabilities of the actions.
        """
        self._add_to_all(obs, action, reward, episode_start, value, log_prob)
        if self.record is not None:
            # rollouts mark the start of episodes, recordings their end
            if episode_start[0]:
                self.record.end_episode()
            self.record.add(observation_of(obs, 0), reward[0], np.array(action[0]))

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: Any) -> None:
        """Compute returns and advantages in every buffer from ``last_values`` and ``dones``, as SB3 does."""
        for buffer in self.buffers.values():
            buffer.compute_returns_and_advantage(last_values, dones)

    def get(self, batch_size: int | None = None) -> Any:
        """Yield random batches of ``batch_size`` from the first buffer."""
        return self.first.get(batch_size)


class FanOutReplayBuffer(_FanOut, ReplayBuffer):
    """A replay buffer that passes every transition on to several buffers; the algorithm samples from the first.

    Training is the same as with the first buffer alone. All buffers receive the arguments of SB3's buffer.
    Experimental.

    Args:
        buffers: Replay buffer classes by name, or pairs of a class and its further arguments. The first one is the
            one to sample from.
        record: A record buffer for the steps of the first environment.
        threads: Whether buffers add steps in parallel, each in its own thread.
        buffer_size: Maximum number of transitions, in all environments together.
        observation_space: Space of the observations.
        action_space: Space of the actions.
        device: Device of the sampled batches.
        n_envs: Number of parallel environments.
        optimize_memory_usage: As in SB3's buffer.
        handle_timeout_termination: Do not count time limits as ends of episodes.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from stable_baselines3.common.buffers import ReplayBuffer
        >>> from sb3_extra_buffers.compressed import CompressedReplayBuffer
        >>> from sb3_extra_buffers.vec_buf import FanOutReplayBuffer
        >>> kinds = {"dense": ReplayBuffer, "rle": (CompressedReplayBuffer, {"compression_method": "rle"})}
        >>> options = dict(replay_buffer_class=FanOutReplayBuffer, replay_buffer_kwargs=dict(buffers=kinds))
        >>> DQN("MlpPolicy", "CartPole-v1", buffer_size=1000, **options).learn(50).replay_buffer.differences()
        {}
    """

    next_observations = _delegated("next_observations")
    dones = _delegated("dones")
    timeouts = _delegated("timeouts")
    optimize_memory_usage = _delegated("optimize_memory_usage")
    handle_timeout_termination = _delegated("handle_timeout_termination")

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
        # SB3's constructor is not called: it would allocate arrays
        self._make_buffers(
            buffers, ReplayBuffer, record, threads,
            buffer_size=buffer_size, observation_space=observation_space, action_space=action_space, device=device,
            n_envs=n_envs, optimize_memory_usage=optimize_memory_usage,
            handle_timeout_termination=handle_timeout_termination,
        )  # fmt: skip

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add a transition to every buffer.

        Args:
            obs: Observations, of shape ``(n_envs, ...)``.
            next_obs: Observations after the actions.
            action: Actions.
            reward: Rewards.
            done: Whether each episode ended.
            infos: The environments' dicts.
        """
        self._add_to_all(obs, next_obs, action, reward, done, infos)
        if self.record is not None:
            self.record.add(observation_of(obs, 0), reward[0], np.array(action[0]), done=done[0])

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw ``batch_size`` transitions from the first buffer, normalised by ``env`` if given."""
        return self.first.sample(batch_size, env=env)
