"""`HerEpisodes`: the episodes of a HER buffer as part of a step that is added completely or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sb3_extra_buffers.errors import NoEpisodeError, SpecMismatchError

if TYPE_CHECKING:
    from stable_baselines3.her.her_replay_buffer import HerReplayBuffer as _Base
else:
    _Base = object

__all__ = ["HerEpisodes"]


class HerEpisodes(_Base):
    """What `HerReplayBuffer.add` does to episodes, planned before a step is written; SB3's class follows in the MRO."""

    def _plan_episodes(self, position: int, done: Any, infos: Any) -> Any:
        """What `_step_added` will need; nothing is changed."""
        if self.copy_info_dict and (not isinstance(infos, (list, tuple, np.ndarray)) or len(infos) != self.n_envs):
            raise SpecMismatchError(f"copy_info_dict needs one dict for each of {self.n_envs} envs, got {infos!r}")
        # the rest of episodes that lose their first step can no longer be sampled
        lost = [
            (env, np.arange(position, self.ep_start[position, env] + length) % self.buffer_size)
            for env, length in enumerate(self.ep_length[position])
            if length > 0
        ]
        return lost, self._current_ep_start.copy(), np.flatnonzero(done), infos

    def _step_added(self, position: int, extra: Any) -> None:
        lost, starts, ended, infos = extra
        for env, steps in lost:
            self.ep_length[steps, env] = 0
        self.ep_start[position] = starts
        if self.copy_info_dict:
            self.infos[position] = infos
        for env in ended:
            length = (position + 1 - starts[env]) % self.buffer_size
            self.ep_length[(starts[env] + np.arange(length)) % self.buffer_size, env] = length
            self._current_ep_start[env] = (position + 1) % self.buffer_size

    def _clear_columns(self) -> None:
        """Forget all episodes, which SB3's `reset` keeps. May be interrupted and run again."""
        super()._clear_columns()  # type: ignore[misc]  # a buffer follows
        self.ep_length[...] = 0
        self._current_ep_start[...] = 0

    def _check_episodes(self) -> None:
        if not self.ep_length.any():
            raise NoEpisodeError(
                f"no episode is complete in the {self.size()} steps of the buffer; set learning_starts to more "
                "steps than an episode takes"
            )
