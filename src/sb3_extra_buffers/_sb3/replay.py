"""`ReplayMixin`: turns a replay buffer of SB3's layout into a compressed one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers._sb3 import opening  # noqa: F401  # load_replay_buffer loads folders from here on
from sb3_extra_buffers._sb3.algorithm import check_n_steps, check_space, own_space
from sb3_extra_buffers._sb3.base import NO_MEMORY
from sb3_extra_buffers._sb3.budget import BudgetMixin
from sb3_extra_buffers._sb3.frame_steps import FrameSteps
from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.steps import as_list, fit_actions, fit_column, fit_flags, fit_truncations, step_numbers
from sb3_extra_buffers._sb3.transitions import Transitions
from sb3_extra_buffers._sb3.views import Array, ObsViews
from sb3_extra_buffers.arguments import check_count, check_number
from sb3_extra_buffers.errors import (
    EmptyBufferError,
    ExtraBuffersError,
    IndexOutOfRangeError,
    OutOfMemoryError,
    SpecMismatchError,
)
from sb3_extra_buffers.stores.arena import zeros
from sb3_extra_buffers.stores.reentry import writes
from sb3_extra_buffers.stores.transactions import HELD, WRITING

if TYPE_CHECKING:
    from sb3_extra_buffers._sb3.sharing import BufferSharing, SharedHandle

    _Base = ReplayBuffer
else:
    _Base = object

Indices = npt.NDArray[np.int64]

# dtypes in which rewards and dones are stored as they are; NumPy has one object for each
_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)

# ``_unfinished`` while all transitions are being removed
_RESETTING = "resetting"

# What is left to do for a step whose observations are stored: position, n_added, n_evicted, obs, next_obs, action,
# reward, done, truncated, extra. A plain tuple: a named one would make `add` of vectors 4 % slower.
Step = tuple[int, int, int, dict[str, Array], dict[str, Array], Array, Array, Array, Any, Any]

# the fast paths of `add` and `sample` bypass these methods, so they are taken only if no subclass overrides them
_ADDING = ("_fit_step", "_write_stores", "_finish_step", "_advance")
_SAMPLING = ("_draw", "_range", "_read", "_get_samples", "_samples_at", "_make_samples")
# methods with which SB3 makes a batch from arrays; they are bypassed unless a subclass overrides one of them
_NORMALIZING = ("_normalize_obs", "_normalize_reward")


class ReplayMixin(BudgetMixin, _Base):
    """Keeps the observations of a replay buffer in stores; everything else stays as SB3 laid it out.

    Next observations are stored too and share frames with the observations, so ``optimize_memory_usage`` has nothing
    left to save. It is accepted, together with ``handle_timeout_termination``, and only decides how indices are drawn.

    Attributes:
        n_added: Steps added so far, overwritten and evicted ones included.
    """

    next_observations: Any
    n_steps: int
    gamma: float
    #: Whether this is SB3's `NStepReplayBuffer`, whose samples have discounts even with ``n_steps=1``.
    _is_n_step_class = False
    #: Called with the position and the last field of a `Step` to complete it; must be idempotent.
    _step_added: Any = None
    #: Publishes every change to other processes, if the buffer is shared.
    _sharing: BufferSharing | None = None

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        dtypes: Mapping[str, Any] | None = None,
        normalize_images: bool = False,
        compression_method: str | Mapping[str, str] = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        output_dtype: Literal["raw", "float"] = "raw",
        max_bytes: int | str | None = None,
        on_max_bytes: Literal["evict", "raise"] = "evict",
        n_steps: int = 1,
        gamma: float = 0.99,
        storage: Literal["memory", "mmap"] = "memory",
        path: str | os.PathLike[str] | None = None,
        prefer: Literal["memory", "speed"] | None = None,
    ) -> None:
        how = dtypes, normalize_images, compression_method, compression_kwargs, decompression_kwargs, output_dtype
        self._take_options(StorageOptions(*how, max_bytes, on_max_bytes, storage, path, prefer))
        buffer_size = check_count(buffer_size, "buffer_size", 0)  # as in SB3, 0 holds one step
        n_envs, n_steps = check_count(n_envs, "n_envs"), check_count(n_steps, "n_steps")
        check_number(gamma, "gamma")
        check_space(self, observation_space)
        # SB3 lays out a single step, so that dense observations are never allocated
        super().__init__(
            n_envs,
            own_space(observation_space),
            action_space,
            device=device,
            n_envs=n_envs,
            optimize_memory_usage=False,
            handle_timeout_termination=handle_timeout_termination,
        )
        self.n_steps, self.gamma = n_steps, gamma
        self.optimize_memory_usage = optimize_memory_usage and not (self._is_n_step_class or n_steps > 1)
        self.n_evicted = self.n_added = 0
        try:
            self._lay_out(max(buffer_size // n_envs, 1))
        except NO_MEMORY as problem:
            if isinstance(problem, ExtraBuffersError):
                raise
            raise OutOfMemoryError(f"not enough memory for buffer_size={buffer_size}: {problem}") from problem
        if not self._is_n_step_class:
            check_n_steps(self)
        self._start_in_folder()

    def _lay_out(self, n_steps: int) -> None:
        """Lengthen every column that SB3 laid out for one step to ``n_steps``, or to what ``max_bytes`` allows."""
        columns = {
            name: column
            for name, column in vars(self).items()
            if isinstance(column, np.ndarray) and column.shape[:2] == (1, self.n_envs)
            and name not in ("observations", "next_observations")
        }  # fmt: skip
        limit = self._options.evict_above or self._options.raise_above
        if limit is not None:
            n_steps = self._affordable_steps(n_steps, limit, sum(column.nbytes for column in columns.values()))
        for name, column in columns.items():
            # mostly zeros: with `zeros`, pages that are never written take no memory
            is_sparse = name in ("dones", "timeouts") and n_steps * column.nbytes > mmap.PAGESIZE
            setattr(self, name, (zeros if is_sparse else np.zeros)((n_steps, *column.shape[1:]), column.dtype))
        self.buffer_size = n_steps
        lead_shape = n_steps, self.n_envs
        views = ObsViews.make(self.observation_space, self.obs_shape, lead_shape, self._options, with_next=True)
        self._use_views(views, views.make_next())
        self._per_env = (self.n_envs,)
        self._action_shape = (self.n_envs, self.action_dim)
        self._column_bytes = None

    def _use_views(self, observations: ObsViews, next_observations: ObsViews | None = None) -> None:
        super()._use_views(observations)
        self._next_views = self._next_views if next_observations is None else next_observations
        self.next_observations = self._next_views.as_sb3()
        self._cache_views()

    def _cache_views(self) -> None:
        views, next_views = self._views, self._next_views
        pairs = [(key, view, next_views.stored[key]) for key, view in views.stored.items()]
        #: Compressed observations, which are written as a transaction.
        self._stored = [pair for pair in pairs if pair[0] not in views.raw]
        #: Observations on a time axis; like plain arrays, they are written in `_finish_step`.
        self._raw = [pair for pair in pairs if pair[0] in views.raw]
        self._dense = [(key, array, next_views.dense[key]) for key, array in views.dense.items()]
        for position, (_, view, _) in enumerate(self._raw):
            # these stores share the buffer's lock, and their readers' locks
            view.store.lock = self._lock
            if position:
                view.store.readers = self._raw[0][1].store.readers
        self._transitions = Transitions.of(self, self._raw)
        # whether the fast paths apply: no subclass overrides the methods that they bypass. Either nothing is
        # encoded, or there is a single key: `FrameSteps` may write its observations, once the method is known
        all_raw = not (self._stored or self._dense)
        is_single = len(pairs) == len(self._stored) == 1 and not (self._dense or views.is_dict)
        self._adds_directly = (all_raw or is_single) and _inherits(type(self), _ADDING)
        is_n_step = self.n_steps > 1 or self._is_n_step_class
        self._draws_and_reads = all_raw and not is_n_step and _inherits(type(self), _SAMPLING)
        for name in ("read_only", "mmap_folder", "_sharing"):
            # `add` reads them at every step, and Python finds them faster here than in the class
            vars(self).setdefault(name, getattr(self, name))
        self._frame_steps: FrameSteps | None = None
        self._inner_tried: Any = None
        options = self._options
        cls = type(self)
        #: Whether a subclass overrides a method with which SB3 makes batches.
        self._calls_sb3 = cls.to_torch is not ReplayMixin.to_torch or any(
            getattr(cls, name) is not getattr(BaseBuffer, name) for name in _NORMALIZING
        )
        self._converts = options.output_dtype != "raw" or options.normalize_images or self._calls_sb3
        # the fast path for observations of a Box, if they are stored in the dtype of the space
        self._box_shape = None if views.is_dict or views.narrowed else views.by_key[""].shape[1:]

    def obs_views(self) -> dict[str, ObsViews]:
        return {"observations": self._views, "next_observations": self._next_views}

    def _after_setstate(self) -> None:
        super()._after_setstate()
        self._cache_views()

    def _start_in_folder(self) -> None:
        """With ``storage="mmap"``, have the first step create the folder, when everything has been set up."""
        if self._options.storage == "mmap" and self._options.path is not None:
            from sb3_extra_buffers.files.mmap_buffer import check_new, create_folder

            self.mmap_folder = create_folder(self, check_new(self._options.path))

    def _written_stores(self) -> Iterable[Any]:
        return [view.store for _, view, _ in self._stored]

    def _prepare_raw(self) -> Transitions | None:
        """Reserve space for another step of observations on a time axis, before anything is changed."""
        transitions = self._transitions
        if transitions is None or not transitions.is_current(self):
            for _, view, _ in self._raw:
                view.store.reserve_next()
            if transitions is None or not transitions.is_current(self):
                self._transitions = transitions = Transitions.of(self, self._raw)
        return transitions

    def _recover(self) -> None:
        unfinished = self._unfinished
        if unfinished is _RESETTING:
            self._clear_columns()
            # one call into C, which signal handlers cannot interrupt
            self.__dict__.update(pos=0, full=False, n_evicted=0, _unfinished=None)
            return
        if type(unfinished) is tuple and isinstance(unfinished[0], FrameSteps):
            steps, position, n_added, *_ = unfinished
            if steps.has_written(n_added + 1):
                self._advance(position, n_added + 1, None)
            else:
                self._unfinished = None
            return
        if unfinished is not None and self._raw:
            self._prepare_raw()
            if type(unfinished) is tuple and isinstance(unfinished[0], Transitions):
                _, position, n_added, *arguments = unfinished
                try:
                    step = self._fit_step(*arguments)
                except ExtraBuffersError:
                    # invalid arguments: `add` would have raised this error
                    self._unfinished = None
                else:
                    self._unfinished = (position, n_added + 1, *step[2:])
        super()._recover()

    # ---- adding ----

    @writes
    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one step of every environment; after any exception, all of it was added or nothing.

        Args:
            obs: Observations, of shape ``(n_envs, ...)``; a dict of them for a Dict space.
            next_obs: Observations after the actions.
            action: Actions.
            reward: Rewards.
            done: Whether each episode ended.
            infos: The environments' dicts; only ``"TimeLimit.truncated"`` is read.
        """
        with self._lock:
            n_added, sharing = self.n_added, None
            try:
                if self._sharing is not None:
                    self._check_outside()
                    sharing = self._sharing
                    sharing.begin()
                    n_added = self.n_added
                if self._unfinished is not None:
                    self._ensure_recovered()
                    n_added = self.n_added
                # the step is one compiled call, unless something has to be converted, recorded or evicted
                writer: Any = self._frame_steps if self._transitions is None else self._transitions
                if (
                    writer is not None
                    and self._adds_directly
                    and not self.read_only
                    and self.mmap_folder is None
                    and self._options.max_bytes is None
                    and not self.n_evicted
                ):
                    position = self.pos
                    self._unfinished = writer, position, n_added, obs, next_obs, action, reward, done, infos
                    if writer.put(self, position, n_added + 1, obs, next_obs, action, reward, done, infos):
                        # `_advance`, inlined
                        self.n_added = n_added + 1
                        if self._step_added is not None:
                            self._step_added(position, None)
                        position += 1
                        if position == self.buffer_size:
                            self.full = True
                            position = 0
                        self.pos = position
                        self._unfinished = None
                        return
                self._unfinished = HELD
                if self._raw:
                    self._prepare_raw()
                if type(infos) is not list:
                    infos = as_list(infos)
                step = self._fit_step(obs, next_obs, action, reward, done, infos)
                folder = self.mmap_folder
                if folder is not None:
                    folder.prepare_step()
                if self._stored:
                    self._write_stores(step)
                if folder is not None:
                    # also without stores: an interrupt must undo what is recorded
                    self._unfinished = WRITING
                    folder.record_step(obs, next_obs, action, reward, done, infos)
                self._unfinished = step
                self._finish_step(step)
                if self._adds_directly and self._stored and sharing is None:
                    self._find_frame_steps()
                limit = self._options.evict_above
                if limit is not None:
                    self._evict_beyond(limit)
            except BaseException as problem:
                self._fail(problem, n_added)
            finally:
                try:
                    if sharing is not None:
                        sharing.end()
                except BaseException:
                    # otherwise readers would wait until the next step
                    if sharing is not None:
                        sharing.abandon()
                    raise

    #: `add` for steps from a journal, which an overridden `add` has already been applied to.
    replay_step = add

    def _find_frame_steps(self) -> None:
        """Have later steps written by one compiled call, if that is possible."""
        _, view, next_view = self._stored[0]
        steps, inner = self._frame_steps, view.store.inner
        if inner is not self._inner_tried or (steps is not None and not steps.is_of(self)):
            self._frame_steps = FrameSteps.of(self, view, next_view)
            self._inner_tried = inner

    def _position(self) -> int:
        return self.n_added

    def _write_stores(self, step: Step) -> None:
        position, _, _, obs, next_obs, _, _, _, _, _ = step
        # `_begin_step`, inlined: this runs at every step
        for _, view, _ in self._stored:
            view.store.commit()
        self._unfinished = WRITING
        for key, view, next_view in self._stored:
            view.write_fitted(next_view, position, obs[key], next_obs[key])

    def _finish_step(self, step: Step) -> None:
        position, n_added, n_evicted, obs, next_obs, action, reward, done, truncated, extra = step
        for key, array, next_array in self._dense:
            array[position] = obs[key]
            next_array[position] = next_obs[key]
        if self._transitions is not None:
            self._transitions.write(position, obs, next_obs, action, reward, done, truncated)
        else:
            for key, view, next_view in self._raw:
                view.write_fitted(next_view, position, obs[key], next_obs[key])
            self.actions[position] = action
            self.rewards[position] = reward
            self.dones[position] = done
            if truncated is not None:
                self.timeouts[position] = truncated
        self.n_evicted = n_evicted
        self._advance(position, n_added, extra)

    def _advance(self, position: int, n_added: int, extra: Any) -> None:
        """Count the step at ``position``, which has been written."""
        self.n_added = n_added
        if self._step_added is not None:
            self._step_added(position, extra)
        position += 1
        if position == self.buffer_size:
            self.full = True
            position = 0
        self.pos = position
        self._unfinished = None

    def _fit_step(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> Step:
        """Check what `add` was given and return it as it will be written; nothing is changed."""
        if self.read_only:
            self._check_writable()
        if not 0 <= self.pos < self.buffer_size:
            # ``pos`` can be assigned to, and kernels do not check it
            raise IndexOutOfRangeError(f"pos is {self.pos}, but the buffer has steps 0 to {self.buffer_size - 1}")
        # fast path: skip validation where shape and dtype already match
        views, shape = self._views, self._box_shape
        if shape is None:
            obs, next_obs = views.fit(obs, "obs"), views.fit(next_obs, "next_obs")
        else:
            dtype = views.by_key[""].dtype
            if type(obs) is np.ndarray and obs.shape == shape and obs.dtype == dtype:
                obs = {"": obs}
            else:
                obs = views.fit(obs, "obs")
            if type(next_obs) is np.ndarray and next_obs.shape == shape and next_obs.dtype == dtype:
                next_obs = {"": next_obs}
            else:
                next_obs = views.fit(next_obs, "next_obs")
        actions = self.actions
        if type(action) is not np.ndarray or action.shape != self._action_shape or action.dtype != actions.dtype:
            action = fit_actions(actions, action)
        per_env = self._per_env
        if type(reward) is not np.ndarray or reward.shape != per_env or reward.dtype is not _FLOAT32:
            reward = fit_column(reward, self.n_envs, "reward")
        if type(done) is not np.ndarray or done.shape != per_env or done.dtype is not _BOOL:
            done = fit_flags(done, self.n_envs, "done")
        # read only if necessary, because some callers pass a dict
        truncated = fit_truncations(infos, self.n_envs) if self.handle_timeout_termination else None
        limit = self._options.raise_above
        if limit is not None:
            self._check_budget(limit)
        n_evicted = self.n_evicted
        if n_evicted and self.full:
            n_evicted -= 1  # the step that is overwritten was evicted before
        return self.pos, self.n_added + 1, n_evicted, obs, next_obs, action, reward, done, truncated, None

    def extend(self, *args: Any) -> None:
        """Add several steps: the arguments of `add`, each with one more leading axis.

        If one of them does not fit, none is added.
        """
        try:
            steps = list(zip(*args, strict=True))
        except (TypeError, ValueError) as problem:
            raise SpecMismatchError(f"extend() takes arrays with the same number of steps: {problem}") from problem
        if len(args) != 6:
            raise SpecMismatchError(f"extend() takes the six arguments of add(), got {len(args)}")
        steps = [(*step[:5], as_list(step[5])) for step in steps]
        fitted = [(self._fit_step(*step), step[5]) for step in steps]
        for (_, _, _, obs, next_obs, action, reward, done, _, _), infos in fitted:
            # these arguments are converted already, so `add` takes its fast path
            self.add(self._views.as_sb3(obs), self._views.as_sb3(next_obs), action, reward, done, infos)

    # ---- sampling ----

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw ``batch_size`` transitions; random numbers are drawn in SB3's order.

        ``env`` normalises the batch if it is a `VecNormalize`.

        Threads may sample while another one adds: batches are decoded without the buffer's lock. If one of the drawn
        steps was overwritten or evicted in the meantime, a batch is drawn again and read with the lock.
        """
        batch_size = check_count(batch_size, "batch_size", 0)
        try:
            with self._lock:
                if self._unfinished is not None:
                    buffer = self._undisturbed()
                    if buffer is not self:
                        return buffer.sample(batch_size, env)
                if self._draws_and_reads:
                    arrays = self._draw_raw(batch_size)
                    if arrays is not None:
                        return self._raw_samples(arrays, env)
                drawn = self._draw(batch_size)
                n_added, pos = self.n_added, self.pos
            batch = self._read(drawn, env)
            if self.n_added != n_added or self._unfinished is not None:
                with self._lock:
                    if not self._still_held(drawn[0], n_added, pos):
                        batch = self._read(self._draw(batch_size), env)
            return batch
        except NO_MEMORY as problem:
            if isinstance(problem, ExtraBuffersError):
                raise
            raise OutOfMemoryError(f"not enough memory for a batch of {batch_size}: {problem}") from problem

    def _draw(self, batch_size: int) -> tuple[Any, ...]:
        """Draw what `_read` needs to make a batch: a tuple that begins with the steps."""
        low, high, shift = self._range()
        steps = np.random.randint(low, high, size=batch_size)
        return ((steps + shift) % self.buffer_size if shift else steps,)

    def _range(self) -> tuple[int, int, int]:
        """Return the range to draw from, and the offset to add, modulo ``buffer_size``, to get a step."""
        count = self.size()
        if count < 0:
            raise IndexOutOfRangeError(
                f"pos={self.pos} and full={self.full} were assigned after {self.n_evicted} steps had been evicted, so "
                "the order of steps is unknown; call reset()"
            )
        if count == 0:
            raise EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
        if self.n_evicted:
            oldest = self.pos if self.full else 0
            return 0, count, oldest + self.n_evicted
        if self.optimize_memory_usage and self.full and self.buffer_size > 1:
            return 1, self.buffer_size, self.pos
        return 0, count, 0

    def _draw_raw(self, batch_size: int) -> list[Array] | None:
        """Draw and read a batch in one compiled call; None if that is not possible."""
        transitions = self._prepare_raw()
        return None if transitions is None else transitions.draw(batch_size, *self._range())

    def _raw_samples(self, arrays: list[Array], env: VecNormalize | None) -> Any:
        """Convert arrays from `Transitions` to SB3's samples."""
        if env is None and not self._converts and self.device.type == "cpu":
            # fast path: the same result with fewer calls
            tensors = list(map(th.from_numpy, arrays))
            if not self._views.is_dict:
                return ReplayBufferSamples(tensors[0], tensors[2], tensors[1], tensors[3], tensors[4])
            obs, next_obs = self._by_key(tensors)
            return DictReplayBufferSamples(obs, tensors[-3], next_obs, tensors[-2], tensors[-1])
        obs, next_obs = self._by_key(arrays)
        actions, dones, rewards = arrays[-3:]
        return self._make_samples((obs, actions, next_obs, dones, self._normalize_reward(rewards, env)), env)

    def _by_key(self, values: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        keys = [key for key, _, _ in self._raw]
        return dict(zip(keys, values[:-3:2], strict=True)), dict(zip(keys, values[1:-3:2], strict=True))

    def _read(self, drawn: tuple[Any, ...], env: VecNormalize | None) -> Any:
        return self._get_samples(drawn[0], env=env)

    def _still_held(self, steps: Indices, n_added: int, pos: int) -> bool:
        """Whether nothing has changed ``steps`` since the buffer had this ``n_added`` and ``pos``."""
        numbers = step_numbers(steps, n_added, pos, self.buffer_size)
        # n-step transitions also depend on the steps that follow
        is_held = (numbers >= self.n_added - self.size()) & (numbers <= n_added - self.n_steps)
        return bool(is_held.all())

    def _get_samples(self, batch_inds: npt.NDArray[Any], env: VecNormalize | None = None) -> Any:
        steps = np.asarray(batch_inds)  # as in SB3, subclasses may pass lists
        return self._samples_at(steps, np.random.randint(0, high=self.n_envs, size=(len(steps),)), env)

    def _samples_at(self, steps: Indices, envs: Indices, env: VecNormalize | None) -> Any:
        """The transitions at ``(steps[i], envs[i])`` as tensors, n-step ones where ``n_steps`` says so."""
        if self.n_steps > 1 or self._is_n_step_class:
            return self._n_step_samples_at(steps, envs, env)
        arrays = None
        if self._raw:
            with self._lock:
                transitions = self._prepare_raw()
                arrays = None if transitions is None else transitions.read(steps, envs)
        if arrays is not None and not (self._stored or self._dense):
            return self._raw_samples(arrays, env)
        obs, next_obs = ({}, {}) if arrays is None else self._by_key(arrays)
        for key, view, next_view in self._stored if arrays is not None else (*self._stored, *self._raw):
            # frames that observations and next observations share are decoded once
            obs[key], next_obs[key] = view.read_with([next_view], (steps, envs))
        for key, array, next_array in self._dense:
            obs[key], next_obs[key] = array[steps, envs], next_array[steps, envs]
        if arrays is not None:
            actions, dones, rewards = arrays[-3:]
        else:
            # dones that are due to timeouts do not count; take() is faster than an index for each axis
            flat = (steps * self.n_envs + envs).reshape(-1, 1)
            dones = self.dones.take(flat) * (1 - self.timeouts.take(flat))
            actions, rewards = self.actions[steps, envs], self.rewards.take(flat)
        return self._make_samples((obs, actions, next_obs, dones, self._normalize_reward(rewards, env)), env)

    def _n_step_samples_at(self, steps: Indices, envs: Indices, env: VecNormalize | None) -> Any:
        """The batch of SB3's `NStepReplayBuffer`, whose own method writes to ``timeouts`` and draws ``envs`` itself."""
        offsets = np.arange(self.n_steps)
        ahead = (steps[:, None] + offsets) % self.buffer_size, envs[:, None]  # (batch_size, n_steps)
        is_last = (self.dones[ahead] != 0) | (self.timeouts[ahead] != 0)
        # the step after the newest one is the oldest one
        is_last |= ahead[0] == (self.pos - 1) % self.buffer_size
        is_last[:, -1] = True
        n_more = is_last.argmax(axis=1)
        rewards = self._normalize_reward(self.rewards[ahead], env)
        rewards = rewards * self.gamma ** offsets.astype(np.float32) * (offsets <= n_more[:, None])
        ends = (steps + n_more) % self.buffer_size, envs
        obs = {key: view[steps, envs] for key, view in self._views.by_key.items()}
        next_obs = {key: view[ends] for key, view in self._next_views.by_key.items()}
        dones = (self.dones[ends] * (1 - self.timeouts[ends])).reshape(-1, 1)
        discounts = self.gamma ** (n_more + 1).astype(np.float32).reshape(-1, 1)
        batch = obs, self.actions[steps, envs], next_obs, dones, rewards.sum(axis=1, keepdims=True), discounts
        return self._make_samples(batch, env)

    def _make_samples(self, batch: tuple[Any, ...], env: VecNormalize | None) -> Any:
        """Make SB3's samples from fresh arrays; on the CPU, the tensors share their memory."""
        obs, actions, next_obs, *columns = batch
        views, to_torch = self._views, self._to_torch
        obs, next_obs = views.as_sb3(obs), views.as_sb3(next_obs)
        make = DictReplayBufferSamples if views.is_dict else ReplayBufferSamples
        if self._calls_sb3:
            tensors = self._to_torch_as_sb3(obs, env), self.to_torch(actions), self._to_torch_as_sb3(next_obs, env)
            return make(*tensors, *map(self.to_torch, columns))
        if env is not None:
            obs, next_obs = env.normalize_obs(obs), env.normalize_obs(next_obs)
        tensors = self._obs_to_torch(obs), to_torch(actions), self._obs_to_torch(next_obs)
        return make(*tensors, *map(to_torch, columns))

    def _to_torch_as_sb3(self, obs: Any, env: VecNormalize | None) -> Any:
        """Tensors of observations, made with the methods that subclasses override."""
        obs = self._normalize_obs(obs, env)
        if isinstance(obs, dict):
            return self._convert_each({key: self.to_torch(part) for key, part in obs.items()})
        return self._convert_each(self.to_torch(obs))

    @writes
    def reset(self) -> None:
        """Remove all transitions."""
        self._check_writable()
        with self._lock, self._changing():
            self._ensure_recovered()
            folder = self.mmap_folder
            if folder is not None:
                folder.prepare_reset()
            # from here on, the reset is completed after any exception
            self._unfinished = _RESETTING
            self._recover()
            if folder is not None:
                folder.record_reset()

    def _clear_columns(self) -> None:
        """Forget what subclasses keep of each step. May be interrupted and run again."""

    # ---- sharing ----

    def _changing(self) -> AbstractContextManager[None]:
        if self._sharing is None:
            return nullcontext()
        self._check_outside()
        return self._sharing.changing()

    def share(self) -> SharedHandle:
        """Let other processes on this machine read the buffer through shared memory.

        The contents of the buffer are moved to shared memory, and later steps are added there. Readers decode batches
        in their own process. Returns a handle that can be pickled; its method `open` returns a `SharedReader`.
        """
        with self._lock:
            self._ensure_recovered()
            if self._sharing is None:
                from sb3_extra_buffers._sb3.sharing import BufferSharing

                # readers follow what the stores report; the fast path reports nothing
                self._frame_steps = self._inner_tried = None
                self._sharing = BufferSharing(self)
            return self._sharing.handle

    def stop_sharing(self) -> None:
        """Stop sharing: reading raises `OwnerEndedError` from now on, and the buffer can be used as before."""
        with self._lock:
            sharing, self._sharing = self._sharing, None
            if sharing is not None:
                sharing.close()


def _inherits(cls: type[Any], names: tuple[str, ...]) -> bool:
    """Whether ``cls`` inherits these methods from `ReplayMixin` unchanged."""
    return all(getattr(cls, name) is getattr(ReplayMixin, name) for name in names)
