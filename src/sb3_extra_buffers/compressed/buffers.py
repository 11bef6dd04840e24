"""SB3's replay and rollout buffers with compressed observations, and their n-step and HER variants."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_extra_buffers._sb3.algorithm import check_n_steps
from sb3_extra_buffers._sb3.base import OptionsFirst
from sb3_extra_buffers._sb3.leaves import check_count
from sb3_extra_buffers._sb3.n_step import NStepReplayBuffer
from sb3_extra_buffers._sb3.replay import ReplayMixin
from sb3_extra_buffers._sb3.rollout import RolloutMixin
from sb3_extra_buffers.errors import NoEpisodeError, SpecMismatchError
from sb3_extra_buffers.stores.locks import fork_safe_lock

__all__ = [
    "CompressedDictNStepReplayBuffer",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
]


class CompressedReplayBuffer(ReplayMixin, ReplayBuffer):
    """`ReplayBuffer` that holds image observations in about a hundredth of the memory, lossless.

    Same batches as SB3's at the same seed. Arguments up to ``handle_timeout_termination`` are SB3's; ``n_steps`` and
    ``gamma`` make it an n-step buffer; `StorageOptions` explains the others.

    Example:
        >>> from gymnasium import spaces
        >>> images = spaces.Box(0, 255, (4, 84, 84), "uint8")
        >>> buffer = CompressedReplayBuffer(100_000, images, spaces.Discrete(6), device="cpu", n_envs=4)
    """


class CompressedDictReplayBuffer(ReplayMixin, DictReplayBuffer):
    """`DictReplayBuffer` with compressed observations: each key is stored as suits it.

    ``compression_method`` may name a method for each key. A single one is meant for the images; vectors stay as they
    are.
    """


class CompressedRolloutBuffer(RolloutMixin, RolloutBuffer):
    """`RolloutBuffer` that holds image observations in about a hundredth of the memory, lossless.

    Same batches as SB3's at the same seed. Arguments up to ``n_envs`` are SB3's; `StorageOptions` explains the others.
    """


class CompressedDictRolloutBuffer(RolloutMixin, DictRolloutBuffer):
    """`DictRolloutBuffer` with compressed observations: each key is stored as suits it."""


class CompressedNStepReplayBuffer(NStepReplayBuffer, CompressedReplayBuffer):
    """`NStepReplayBuffer` with compressed observations; ``n_steps`` and ``gamma`` must be those of the algorithm."""

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=check_count(n_steps, "n_steps"), gamma=gamma, **kwargs)
        check_n_steps(self)

    def _get_samples(self, *args: Any, **kwargs: Any) -> Any:
        with self._timeouts_kept():
            samples = super()._get_samples(*args, **kwargs)
        return self._as_asked(samples)


class CompressedDictNStepReplayBuffer(CompressedDictReplayBuffer):
    """n-step returns for Dict observations, which SB3 itself does not have."""

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        kwargs |= {"n_steps": n_steps, "gamma": gamma}
        super().__init__(*args, **kwargs)


class _Episodes(NamedTuple):
    """What a step that is being added changes of episodes."""

    position: int
    n_added: int
    """Steps added before it."""
    starts: Any
    infos: Any
    replaced: list[tuple[int, Any, int]]
    """Environment, steps and length of each episode that loses its first step."""
    ended: list[int]
    """Environments whose episode ends with it."""


class CompressedHerReplayBuffer(OptionsFirst, HerReplayBuffer, CompressedDictReplayBuffer):
    """`HerReplayBuffer` with compressed observations; takes its arguments and those of the compressed buffers."""

    #: What SB3's code changes before and after a step is stored, while it is being added.
    _episodes: _Episodes | None = None

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add one step of every environment: all of it, or after an exception of whatever kind nothing."""
        with self._lock:
            n_added = self._n_added
            try:
                self._recover()
                # SB3's code changes episodes before the step gets to where it is checked
                step = self._fit_step(obs, next_obs, action, reward, done, infos)
                if self._live is not None:
                    self._live.prepare_step()  # while episodes are as they were
                if self.copy_info_dict:
                    self._check_infos(infos)
                self._episodes = self._episodes_at(step[0], step[7])
                super().add(*step[3:8], infos)
                self._episodes = None
            except BaseException as problem:
                self._fail(problem, n_added)

    def _check_infos(self, infos: Any) -> None:
        if not isinstance(infos, (list, tuple, np.ndarray)) or len(infos) != self.n_envs:
            raise SpecMismatchError(
                f"copy_info_dict keeps a dict for each of {self.n_envs} environments, got {infos!r}"
            )

    def _episodes_at(self, position: int, done: Any) -> _Episodes:
        replaced = []
        for env in range(self.n_envs):
            start, length = int(self.ep_start[position, env]), int(self.ep_length[position, env])
            if length > 0:
                replaced.append((env, np.arange(position, start + length) % self.buffer_size, length))
        infos = self.infos[position].copy() if self.copy_info_dict else None
        ended = np.flatnonzero(done).tolist()
        return _Episodes(position, self._n_added, self.ep_start[position].copy(), infos, replaced, ended)

    def _recover(self) -> None:
        super()._recover()
        episodes = self._episodes
        if episodes is None:
            return
        if self._n_added != episodes.n_added:
            # the step is stored: do what comes after it
            for env in episodes.ended:
                self._compute_episode_length(env)
        else:
            self.ep_start[episodes.position] = episodes.starts
            if episodes.infos is not None:
                self.infos[episodes.position] = episodes.infos
            for env, steps, length in episodes.replaced:
                self.ep_length[steps, env] = length
        self._episodes = None

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw transitions of finished episodes, some of them with the goals of others."""
        batch_size = check_count(batch_size, "batch_size", 0)
        if self._step is not None or self._episodes is not None:
            with self._lock:
                self._recover()
        if not self.ep_length.any():
            raise NoEpisodeError(
                f"no episode has ended in the {self.size()} steps that the buffer holds; set learning_starts to more "
                "steps than an episode takes"
            )
        return self._as_asked(super().sample(batch_size, env))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        super().__setstate__(state)
        self._lock = fork_safe_lock(of_buffer=True)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._recover()
            return self._frozen_state(super().__getstate__())

    def _forget_step(self, step: int) -> None:
        # no goal may be taken from an episode whose beginning is gone
        for env in range(self.n_envs):
            length = self.ep_length[step, env]
            if length > 0:
                steps = (self.ep_start[step, env] + np.arange(length)) % self.buffer_size
                self.ep_length[steps, env] = 0
            elif step == self._current_ep_start[env]:
                # the episode goes on: what is left of it begins a step later
                begin = (step + 1) % self.buffer_size
                steps = (begin + np.arange((self.pos - begin) % self.buffer_size)) % self.buffer_size
                self.ep_start[steps, env] = self._current_ep_start[env] = begin
        super()._forget_step(step)
