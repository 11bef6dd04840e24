"""`GpuReplayBuffer` with n-step returns, with priorities, and with hindsight goals."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_extra_buffers._sb3.algorithm import check_n_steps
from sb3_extra_buffers._sb3.her import HerEpisodes
from sb3_extra_buffers._sb3.prioritized import Beta, Priorities, PrioritizedReplayBufferSamples
from sb3_extra_buffers._sb3.sum_tree import SumTree
from sb3_extra_buffers.arguments import as_array, check_count, check_number
from sb3_extra_buffers.errors import ArgumentError
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer
from sb3_extra_buffers.gpu_buffers.replay_buffer import GpuReplayBuffer
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.stores.staging import Lease

__all__ = ["GpuHerReplayBuffer", "GpuNStepReplayBuffer", "GpuPrioritizedReplayBuffer"]

# the arguments of `GpuReplayBuffer` that SB3's HER buffer does not know
_OPTIONS = frozenset({
    "dtypes", "normalize_images", "compression_method", "compression_kwargs", "decompression_kwargs", "output_dtype",
    "buffer_device", "heap_bytes", "max_slot_bytes", "prefer", "sampling",
})  # fmt: skip


class NStepBatches(GpuReplayBuffer):
    """Computes n-step returns on the device, bit-identical to those of SB3's `NStepReplayBuffer`."""

    #: Whether samples have discounts even with ``n_steps=1``, as those of SB3's class have.
    _is_n_step_class = False
    n_steps: int
    gamma: float

    def _set_n_steps(self, n_steps: int, gamma: float) -> None:
        check_number(gamma, "gamma")
        self.n_steps, self.gamma = check_count(n_steps, "n_steps"), gamma
        check_n_steps(self)

    def _make_batch(self, indices: th.Tensor, lease: Lease | None, env: VecNormalize | None) -> Any:
        if self.n_steps == 1 and not self._is_n_step_class:
            return super()._make_batch(indices, lease, env)
        newest, table = (self.pos - 1) % self.buffer_size, self._current_table()
        powers = _powers(self.gamma, self.n_steps, table.records.device)
        found = table.n_step(indices[0], powers, newest, None if env is None else partial(self._normalize, env))
        if lease is not None:
            self._staging.release(lease)
        batch = super()._make_batch(found.indices, None, env)
        return batch._replace(dones=found.dones, rewards=found.returns, discounts=found.discounts)

    def _normalize(self, env: VecNormalize, rewards: th.Tensor) -> th.Tensor:
        return self.to_torch(self._normalize_reward(rewards.cpu().numpy(), env))


@lru_cache(typed=True)  # powers of NumPy's doubles differ from those of Python's floats
def _powers(gamma: float, n_steps: int, device: th.device) -> th.Tensor:
    """``gamma`` to the power of 0 to ``n_steps``, as NumPy computes them."""
    return th.from_numpy(np.asarray(gamma ** np.arange(n_steps + 1, dtype=np.float32), np.float32)).to(device)


class GpuNStepReplayBuffer(NStepReplayBuffer, NStepBatches):
    """SB3's `NStepReplayBuffer`, for Box and Dict spaces, with everything on a torch device.

    Takes the arguments of `GpuReplayBuffer`; ``n_steps`` and ``gamma`` must be those of the algorithm.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.gpu_buffers import GpuNStepReplayBuffer
        >>> model = DQN("MlpPolicy", "CartPole-v1", n_steps=3, replay_buffer_class=GpuNStepReplayBuffer)
        >>> model.replay_buffer.n_steps
        3
    """

    _is_n_step_class = True

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=check_count(n_steps, "n_steps"), gamma=gamma, **kwargs)
        self._set_n_steps(n_steps, gamma)

    # not NStepReplayBuffer's, which reads arrays
    _get_samples = GpuReplayBuffer._get_samples


class GpuPrioritizedReplayBuffer(Priorities, NStepBatches):
    """Prioritised `GpuReplayBuffer` (Schaul et al., 2016), for Box and Dict spaces; priorities are kept on the host.

    Takes the arguments of `GpuReplayBuffer` other than ``sampling``, and those of `CompressedPrioritizedReplayBuffer`:

    Args:
        alpha: How strongly priorities count: 0 samples uniformly, 1 in proportion to TD errors.
        beta: How far importance weights correct the sampling bias: a number, a pair of first and last value, or a
            function of ``progress_remaining``, which goes from 1 to 0.
        epsilon: Added to every TD error, so that every transition can be drawn again.
        n_steps: Number of steps of an n-step return; 1 for ordinary transitions.
        gamma: Discount factor of n-step returns.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import prioritized
        >>> from sb3_extra_buffers.gpu_buffers import GpuPrioritizedReplayBuffer
        >>> model = prioritized(DQN)(
        ...     "MlpPolicy", "CartPole-v1", buffer_size=1000, replay_buffer_class=GpuPrioritizedReplayBuffer
        ... )
        >>> model.learn(50).replay_buffer.sample(32).weights.shape
        torch.Size([32, 1])
    """

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.6,
        beta: Beta = (0.4, 1.0),
        epsilon: float = 1e-6,
        n_steps: int = 1,
        gamma: float = 0.99,
        **kwargs: Any,
    ) -> None:
        if "sampling" in kwargs:
            raise ArgumentError("a prioritised buffer draws indices by priority; leave sampling out")
        self.n_added = 0
        super().__init__(*args, alpha=alpha, beta=beta, epsilon=epsilon, **kwargs)
        self._set_n_steps(n_steps, gamma)
        self._tree = SumTree(self.buffer_size * self.n_envs)

    def _after(self, position: int) -> dict[str, Any]:
        return {**super()._after(position), "n_added": self.n_added + 1}

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw ``batch_size`` transitions by their priorities, normalised by ``env`` if given."""
        batch_size = check_count(batch_size, "batch_size", 0)
        with self._lock:
            self._ensure_recovered()
            steps, envs, weights, indices = self._draw(batch_size)
            samples = tuple(self._samples_at(steps, envs, env))
        (on_device,) = self._staging.upload([weights])
        return PrioritizedReplayBufferSamples._make((*samples, on_device, indices))

    def check(self) -> None:
        """Raise `AssertionError` if the tables of a store, or priorities and transitions, contradict each other."""
        BaseGpuBuffer.check(self)
        Priorities.check(self)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = super().__getstate__()
            state["_tree"] = self._tree.frozen()
        return state


class _WithOptions(GpuReplayBuffer, DictReplayBuffer):
    """Takes the options of `GpuReplayBuffer` from an attribute, because SB3's constructor would not pass them on."""

    _options: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, **vars(self).pop("_options")})


class _ReachedGoals:
    """``next_observations`` of a HER buffer, of which SB3 reads the goals that were reached."""

    def __init__(self, buffer: GpuHerReplayBuffer, key: str = "") -> None:
        self._buffer, self._key = buffer, key

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, str):
            return _ReachedGoals(self._buffer, where)
        return self._buffer._read_next(self._key, *where[:2])


class GpuHerReplayBuffer(HerEpisodes, HerReplayBuffer, _WithOptions):
    """SB3's `HerReplayBuffer` with observations on a torch device; new goals and rewards are computed on the host.

    Takes the arguments of `HerReplayBuffer` and of `GpuReplayBuffer`, other than ``sampling``.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from stable_baselines3.common.envs import BitFlippingEnv
        >>> from sb3_extra_buffers.gpu_buffers import GpuHerReplayBuffer
        >>> env = BitFlippingEnv(n_bits=4, continuous=False)
        >>> model = DQN("MultiInputPolicy", env, replay_buffer_class=GpuHerReplayBuffer, learning_starts=20)
        >>> model.learn(30).replay_buffer.sample(8).observations["desired_goal"].shape
        torch.Size([8, 4])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "sampling" in kwargs:
            raise ArgumentError("hindsight goals are drawn on the host; leave sampling out")
        self._options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
        super().__init__(*args, **kwargs)
        # SB3 makes a dict for each transition of the capacity, 64 bytes each
        self.infos = np.full(self.infos.shape, {}, dtype=object)

    @property
    def next_observations(self) -> Any:  # type: ignore[override]  # SB3 only reads it
        """What SB3 reads goals from."""
        return _ReachedGoals(self)

    def _read_next(self, key: str, steps: npt.NDArray[Any], envs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Next observations of ``key`` at ``(steps[i], envs[i])``, on the host and as they were added."""
        store = self.obs_stores[key]
        indices = (self.buffer_size + np.asarray(steps, np.int64)) * self.n_envs + envs
        array: npt.NDArray[Any] = store.read(IndexBatch(indices[None]))[0].cpu().numpy()
        return array.astype(self._dtypes[key][0]) if key in self._dtypes else array

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Add one step of every environment; after an exception, either the whole step was added or nothing."""
        # not HerReplayBuffer's, which changes episodes before the step is checked: `_step_added` does the same
        GpuReplayBuffer.add(self, *args, **kwargs)

    def _extra(self, position: int, done: Any, infos: Any) -> Any:
        return self._plan_episodes(position, as_array(done, "done"), infos)

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw ``batch_size`` transitions of complete episodes, some of them with goals that were reached later.

        ``env`` normalises the batch if it is a `VecNormalize`.
        """
        batch_size = check_count(batch_size, "batch_size", 0)
        # goals come from whole episodes: the lock keeps other threads from overwriting them meanwhile
        with self._lock:
            self._ensure_recovered()
            self._check_episodes()
            return super().sample(batch_size, env)

    def _get_real_samples(self, batch_indices: Any, env_indices: Any, env: Any = None) -> Any:
        return self._samples_at(batch_indices, env_indices, env)

    def _get_virtual_samples(self, batch_indices: Any, env_indices: Any, env: Any = None) -> Any:
        batch = self._samples_at(batch_indices, env_indices, None)
        infos: Any = [{} for _ in range(len(batch_indices))]
        if self.copy_info_dict:
            infos = np.array([dict(info) for info in self.infos[batch_indices, env_indices]], dtype=object)
        goals = self._sample_goals(batch_indices, env_indices)
        reached = self._read_next("achieved_goal", batch_indices, env_indices)
        assert self.env is not None, "a HerReplayBuffer needs an env to compute rewards: call set_env()"
        rewards = self.env.env_method("compute_reward", reached, goals, infos, indices=[0])[0].astype(np.float32)
        on_device = self._convert(self.to_torch(goals))
        obs, next_obs = ({**part, "desired_goal": on_device} for part in (batch.observations, batch.next_observations))
        if env is not None:
            obs, next_obs = self._normalized(obs, env), self._normalized(next_obs, env)
        rewards = self.to_torch(self._normalize_reward(rewards.reshape(-1, 1), env))
        return DictReplayBufferSamples(obs, batch.actions, next_obs, batch.dones, rewards)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = BaseGpuBuffer.__getstate__(self)
            del state["env"]  # as HerReplayBuffer does
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        GpuReplayBuffer.__setstate__(self, state)
        self.env = None
