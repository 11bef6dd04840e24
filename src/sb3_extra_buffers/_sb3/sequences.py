"""`Sequences`: windows of consecutive steps from a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers._sb3.base import NO_MEMORY
from sb3_extra_buffers._sb3.prioritized import Beta, as_errors, check_errors, check_exponents
from sb3_extra_buffers._sb3.sequence_index import EpisodeIndex, Held
from sb3_extra_buffers._sb3.sequence_priorities import WindowPriorities, mix_errors
from sb3_extra_buffers._sb3.sequence_states import INFO_KEY, StateColumns, StateUpdate, check_shapes
from sb3_extra_buffers._sb3.sequence_windows import (
    NewestFrames,
    Request,
    SequenceSamples,
    Windows,
    as_signed,
    check_request,
    discount_powers,
    n_step_returns,
    plan_windows,
)
from sb3_extra_buffers._sb3.steps import position_assigned
from sb3_extra_buffers._sb3.views import Array
from sb3_extra_buffers.arguments import as_array, check_count
from sb3_extra_buffers.errors import (
    ArgumentError,
    EmptyBufferError,
    ExtraBuffersError,
    OutOfMemoryError,
    PriorityError,
    SpecMismatchError,
)
from sb3_extra_buffers.stores.checks import require, within
from sb3_extra_buffers.stores.reentry import refuse, writes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Sequences"]

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# above every priority that `update_priorities` can compute, and small enough that the sum over a whole buffer is finite
_MAX_PRIORITY = 1e39
# consecutive observations from which the layout of stacked images is found
_LAYOUT_STEPS = 32


#: Windows, the recurrent states before them, and their weights.
_Drawn = tuple[Windows, dict[str, Array], npt.NDArray[np.float32]]


class Sequences:
    """Mixin that samples windows of consecutive steps; a replay buffer must follow in the MRO.

    The buffer calls `_step_added` for each step, with what `_plan_sequence` returned, and counts the steps in
    ``n_added``. Its position is always ``n_added % buffer_size``.
    """

    _index: EpisodeIndex
    _states: StateColumns
    _newest: NewestFrames
    _priorities: WindowPriorities | None = None
    # states that were passed to `add`, while it runs
    _given_states: Any = None
    #: Whether to read batches while holding the lock.
    _locks_reads = False

    if TYPE_CHECKING:
        # provided by the buffer
        buffer_size: int
        n_envs: int
        pos: int
        full: bool
        n_added: int
        gamma: float
        _lock: Any
        _unfinished: Any

        def size(self) -> int: ...
        def _check_writable(self) -> None: ...
        def _ensure_recovered(self) -> None: ...
        def _undisturbed(self) -> Self: ...
        def _changing(self) -> AbstractContextManager[None]: ...

    def __init__(
        self,
        *args: Any,
        recurrent_states: Mapping[str, int | Sequence[int]] | None = None,
        recurrent_dtype: Any = "float32",
        prioritized: bool = False,
        alpha: float = 0.9,
        beta: Beta = 0.6,
        epsilon: float = 1e-6,
        eta: float = 0.9,
        **kwargs: Any,
    ) -> None:
        self.recurrent_states, self.recurrent_dtype = check_shapes(recurrent_states, recurrent_dtype)
        if not isinstance(eta, (int, float, np.number)) or not 0 <= eta <= 1:
            raise ArgumentError(f"eta must be from 0 (mean of the TD errors) to 1 (their maximum), got {eta}")
        self.prioritized, self.eta = bool(prioritized), float(eta)
        self.alpha, self.beta, self.epsilon = check_exponents(alpha, beta, epsilon)
        #: Fraction of the training that is left, from 1 to 0: the argument of the schedule of beta.
        self.progress_remaining = 1.0
        self.max_priority = 1.0
        super().__init__(*args, **kwargs)

    def _make_sequence_columns(self) -> None:
        n_steps, n_envs = self.buffer_size, self.n_envs
        self._index, self._newest = EpisodeIndex(n_steps, n_envs), NewestFrames()
        self._states = StateColumns(self.recurrent_states, self.recurrent_dtype, n_steps, n_envs)
        if self.prioritized:
            self._priorities = WindowPriorities(self._index)

    def _extra_bytes(self) -> int:
        own = self._index.nbytes + self._states.nbytes
        own += 0 if self._priorities is None else self._priorities.tree.nbytes
        return own + int(super()._extra_bytes())  # type: ignore[misc]  # a buffer follows

    # ---- adding ----

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        infos: Any,
        recurrent_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one step of every environment; after any exception, either the whole step was added or nothing.

        Args:
            obs: Observations, of shape ``(n_envs, ...)``; a dict of them for a Dict space.
            next_obs: Observations after the actions.
            action: Actions.
            reward: Rewards.
            done: Whether each episode ended, by a time limit too.
            infos: The environments' dicts; ``"TimeLimit.truncated"`` is read, and so is ``"recurrent_state"`` if the
                argument ``recurrent_state`` is None.
            recurrent_state: The states of the agent before the step, ``(n_envs, ...)`` by name.
        """
        with self._lock:
            # assigned even if it is None: an interrupt may have left the states of an earlier step
            before, self._given_states = self._given_states, recurrent_state
            try:
                super().add(obs, next_obs, action, reward, done, infos)  # type: ignore[misc]  # a buffer follows
            finally:
                # those of the step that a signal handler with a step of its own has interrupted, or None
                self._given_states = before

    def _plan_sequence(self, done: Any, infos: Any) -> Any:
        """Return what `_step_added` needs; changes nothing."""
        return self._index.plan(done), self._states.fit(self._given_states, infos)

    def _step_added(self, position: int, extra: Any) -> None:
        planned, states = extra
        self._index.write(position, planned)
        self._states.write(position, states)
        if self._priorities is not None:
            self._priorities.write_step(position, self.max_priority**self.alpha)

    def step_states(self, infos: Any) -> list[Array]:
        """The states of the step that is being added, for a journal."""
        states = self._states.fit(self._given_states, infos)
        return [] if states is None else list(states.values())

    def with_step_states(self, infos: list[dict[str, Any]], states: Sequence[Array]) -> list[dict[str, Any]]:
        """Return the infos of a step, including the states that `step_states` returned."""
        names = list(self._states.shapes)
        require(len(states) == len(names), "a journal record has other recurrent states")
        if not names:
            return infos
        infos = infos if len(infos) == self.n_envs else [{**(infos[0] if infos else {})} for _ in range(self.n_envs)]
        for name, array in zip(names, states, strict=True):
            require(array.shape == (self.n_envs, *self._states.shapes[name]), f"the state {name!r} has another shape")
        return [
            {**info, INFO_KEY: {name: array[env] for name, array in zip(names, states, strict=True)}}
            for env, info in enumerate(infos)
        ]

    def _clear_sequences(self) -> None:
        """Forget all steps; may be interrupted and run again."""
        # the next multiple of buffer_size: old step numbers stay stale, and n_added % buffer_size is still the position
        n_added = -(-self.n_added // self.buffer_size) * self.buffer_size
        self._index.clear(n_added)
        if self._priorities is not None:
            self._priorities.tree.clear()
        self.n_added = n_added

    def _recover(self) -> None:
        if isinstance(self._unfinished, StateUpdate):
            self._states.apply(self._unfinished)
            self._unfinished = None
        else:
            super()._recover()  # type: ignore[misc]  # a buffer follows

    # ---- sampling ----

    def sample_sequences(
        self,
        batch_size: int,
        length: int,
        burn_in: int = 0,
        n_steps: int = 1,
        *,
        episode_end: Literal["stop", "pad", "continue"] = "stop",
        strict_length: bool = False,
        sample: Literal["steps", "episodes", "priority"] | None = None,
        frames: Literal["stacked", "newest"] = "stacked",
        online: bool = False,
        gamma: float | None = None,
        env: VecNormalize | None = None,
    ) -> SequenceSamples:
        """Draw ``batch_size`` windows of ``burn_in + length`` consecutive steps.

        Threads may sample while another one adds, as with `sample`.

        Args:
            batch_size: Number of windows.
            length: Steps of a window to learn from.
            burn_in: Steps before those, to warm up a recurrent state.
            n_steps: Number of steps of an n-step return; some of its rewards may come after the end of the window.
            episode_end: ``"stop"`` for windows of one episode, padded only if the whole episode is shorter;
                ``"pad"`` for windows that begin at any step and are padded where their episode ends; ``"continue"`` for
                windows that continue into the next episode, where `is_first` is set.
            strict_length: Only draw windows without padding, as `SliceSampler` of TorchRL does with this argument.
            sample: ``"steps"`` makes all windows equally likely, ``"episodes"`` all episodes, ``"priority"`` draws in
                proportion to priorities. By default ``"priority"`` if the buffer is prioritised, else ``"steps"``.
            frames: ``"newest"`` to return only the newest frame of each stack, for recurrent agents.
            online: Begin the batch with windows of steps that no online batch has contained yet, oldest first, so that
                new steps are soon learnt from (as in DreamerV3).
            gamma: Discount factor of n-step returns; by default that of the buffer.
            env: A `VecNormalize` that normalises observations and rewards.
        """
        by = sample or ("priority" if self._priorities is not None else "steps")
        if by == "priority" and self._priorities is None:
            raise ArgumentError("sample='priority' needs a buffer that was created with prioritized=True")
        gamma = self.gamma if gamma is None else gamma
        request = check_request(
            batch_size, length, burn_in, n_steps, episode_end, strict_length, by, frames, online, gamma
        )
        unseen = self._index.unseen
        try:
            with self._lock:
                buffer = self if self._unfinished is None else self._undisturbed()
                if buffer is not self:
                    if online:
                        raise refuse(f"this {type(self).__name__}, whose online queue would change,")
                    return buffer.sample_sequences(
                        batch_size, length, burn_in, n_steps, episode_end=episode_end, strict_length=strict_length,
                        sample=sample, frames=frames, gamma=gamma, env=env,
                    )  # fmt: skip
                unseen = self._index.unseen
                drawn, n_added = self._draw_windows(request), self.n_added
                if self._locks_reads:
                    return self._read_windows(drawn, env)
            batch = self._read_windows(drawn, env)
            if self.n_added != n_added or self._unfinished is not None:
                with self._lock:
                    self._ensure_recovered()
                    if int(drawn[0].numbers.min()) < self._held().oldest:
                        self._index.return_unseen(unseen)
                        batch = self._read_windows(self._draw_windows(request), env)
            return batch
        except BaseException as problem:
            if request.online:
                with self._lock:
                    self._index.return_unseen(unseen)
            if isinstance(problem, ExtraBuffersError) or not isinstance(problem, NO_MEMORY):
                raise
            raise OutOfMemoryError(f"not enough memory for {batch_size} windows: {problem}") from problem

    def _held(self) -> Held:
        return Held(self.n_added - self.size(), self.n_added)

    def _draw_windows(self, request: Request) -> _Drawn:
        """Draw windows, and find out what to read for them; the caller holds the lock."""
        held = self._held()
        if held.oldest == held.n_added:
            raise EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
        if self.n_added % self.buffer_size != self.pos or held.oldest < 0:
            raise position_assigned(self)
        numbers, envs = self._draw_starts(request, held)
        windows = self._plan_windows(request, numbers, envs, held)
        states = self._states.read(numbers % self.buffer_size, envs) if self._states.columns else {}
        return windows, states, self._weights(request, numbers, envs)

    def _draw_starts(self, request: Request, held: Held) -> tuple[Indices, Indices]:
        """The numbers of the first steps, and the environments."""
        index, rules, count = self._index, request.rules, request.batch_size
        fresh = index.fresh(count, rules, held) if request.online else None
        n_more = count if fresh is None else count - len(fresh[0])
        if fresh is not None and not n_more:
            return fresh
        if request.by == "priority" and self._priorities is not None:
            more = self._priorities.draw(n_more, rules, held, index)
        else:
            more = index.draw(n_more, rules, held, request.by == "episodes")
        return more if fresh is None else (np.append(fresh[0], more[0]), np.append(fresh[1], more[1]))

    def _plan_windows(self, request: Request, numbers: Indices, envs: Indices, held: Held) -> Windows:
        return plan_windows(request, numbers, envs, self._index, held)

    def _weights(self, request: Request, numbers: Indices, envs: Indices) -> npt.NDArray[np.float32]:
        if request.by != "priority" or self._priorities is None:
            return np.ones(len(numbers), np.float32)
        return self._priorities.weights(numbers, envs, self.beta, self.progress_remaining)

    def _read_windows(self, drawn: _Drawn, env: VecNormalize | None) -> SequenceSamples:
        """The batch of windows that were drawn."""
        windows, states, weights = drawn
        arrays = [windows.discounts, windows.is_first, windows.mask, windows.learn_mask, weights, *states.values()]
        uploaded = self._upload(arrays)
        observations, following = self._read_both(windows, env)
        actions, rewards, dones = self._read_transitions(windows, uploaded[2], env)
        return SequenceSamples(
            observations, actions, following, dones, rewards,
            discounts=uploaded[0], is_first=uploaded[1], mask=uploaded[2], learn_mask=uploaded[3], weights=uploaded[4],
            recurrent_states=dict(zip(states, uploaded[5:], strict=True)),
            steps=windows.steps, envs=windows.envs,
        )  # fmt: skip

    def _read_both(self, windows: Windows, env: VecNormalize | None) -> tuple[Any, Any]:
        """Read observations and next observations, which are usually views of the same memory."""
        request, observations, following = windows.request, {}, {}
        for key, tensor in self._read_window_observations(windows, env).items():
            observations[key] = tensor.narrow(1, 0, request.rules.length)
            following[key] = tensor.narrow(1, request.n_steps, request.rules.length)
        if windows.resets is not None:
            *at, indices = windows.resets
            where = tuple(self._upload(at))
            last = self._read_observations(indices[:, None], request.newest_only, env)
            for key, tensor in following.items():
                following[key] = tensor.clone()
                as_signed(following[key]).index_put_(where, as_signed(last[key][:, 0]))
        return self._observations_as_sb3(observations), self._observations_as_sb3(following)

    def _read_transitions(
        self, windows: Windows, mask: th.Tensor, env: VecNormalize | None
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """Actions, n-step returns and dones."""
        actions, rewards, dones = self._read_window_columns(windows, env)
        request = windows.request
        if request.n_steps > 1:
            n_ahead = None if windows.n_ahead is None else self._upload([windows.n_ahead])[0]
            rewards, dones = n_step_returns(rewards, dones, n_ahead, discount_powers(request), mask.shape[1])
            actions = actions[:, : mask.shape[1]].clone()
        elif windows.gathered is not None and env is None:
            return actions, rewards, dones  # zero in padding
        if not windows.is_whole:
            # not by index, which would wait for a GPU
            is_padding = ~mask
            as_signed(actions).masked_fill_(is_padding[..., None], 0)
            rewards.masked_fill_(is_padding, 0)
            dones.masked_fill_(is_padding, 0)
        return actions, rewards, dones

    def _read_window_observations(self, windows: Windows, env: VecNormalize | None) -> dict[str, th.Tensor]:
        return self._read_observations(windows.rows, windows.request.newest_only, env)

    def _read_window_columns(
        self, windows: Windows, env: VecNormalize | None
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        return self._read_columns(windows.columns, env)

    def _newest_rows(self) -> Indices:
        """Indices ``[1, n]`` of the newest observations of an environment."""
        steps = np.arange(max(self.n_added - min(self.size(), _LAYOUT_STEPS), 0), self.n_added) % self.buffer_size
        return (steps * self.n_envs)[None]

    def _read_observations(self, rows: Indices, newest_only: bool, env: VecNormalize | None) -> dict[str, th.Tensor]:
        """Observations ``[batch, n, ...]`` by key, on the device of the samples, for indices ``[batch, n]``."""
        raise NotImplementedError

    def _read_columns(self, indices: Indices, env: VecNormalize | None) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """Actions, rewards and dones (other than time limits) of the transitions at ``indices [batch, n]``."""
        raise NotImplementedError

    def _observations_as_sb3(self, by_key: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _upload(self, arrays: list[Array]) -> list[th.Tensor]:
        """Fresh arrays as tensors on the device of the samples."""
        raise NotImplementedError

    # ---- after training ----

    def holds(self, batch: SequenceSamples) -> Flags:
        """Return whether each step of ``batch``, from `sample_sequences`, is still held; False for padding."""
        steps, _ = self._steps_of(batch)
        held = self._held()
        is_held: Flags = (steps >= max(held.oldest, 0)) & (steps < held.n_added)
        return is_held

    def _steps_of(self, batch: SequenceSamples) -> tuple[Indices, Indices]:
        """Step numbers and environments of a batch."""
        if not isinstance(batch, SequenceSamples):
            raise ArgumentError(f"pass the batch that sample_sequences() returned, not a {type(batch).__name__}")
        steps, envs = as_array(batch.steps, "batch.steps"), as_array(batch.envs, "batch.envs")
        fits = steps.dtype == envs.dtype == np.int64 and steps.ndim == 2 and envs.shape == steps.shape[:1]
        if not fits or (envs < 0).any() or (envs >= self.n_envs).any():
            raise ArgumentError(
                "batch.steps and batch.envs are not those of a batch from this buffer; pass the batch unchanged"
            )
        return steps, envs

    @writes
    def update_recurrent_states(self, batch: SequenceSamples, states: Mapping[str, Any], offset: int = 0) -> Flags:
        """Replace the stored states of steps of a batch, for example by states from the trained network.

        Steps that were overwritten or evicted since the batch was drawn are skipped, and so is padding.

        Args:
            batch: What `sample_sequences` returned.
            states: By name, the states before ``n`` steps of each window, ``[batch, n, ...]``, or before a single step,
                ``[batch, ...]``.
            offset: The number of this step, or of the first of these steps, in each window.

        Returns:
            Whether each state was stored, ``[batch, n]`` or ``[batch]``.
        """
        (steps, envs), offset = self._steps_of(batch), check_count(offset, "offset", 0)
        if not self._states.shapes or not isinstance(states, Mapping):
            self._states.fit_batch(states, (), "states")  # raises
        name, shape = next(iter(self._states.shapes.items()))
        given = as_array(states.get(name, ()), f"states[{name!r}]")
        is_single = given.ndim == 1 + len(shape)
        n_states = 1 if is_single or given.ndim < 2 else given.shape[1]
        if offset + n_states > steps.shape[1]:
            raise SpecMismatchError(
                f"the windows have {steps.shape[1]} steps, got states for steps {offset} to {offset + n_states - 1}"
            )
        lead = (len(envs),) if is_single else (len(envs), n_states)
        fitted = self._states.fit_batch(states, lead, "states")
        self._check_writable()
        with self._lock, self._changing():
            self._ensure_recovered()
            is_held = self.holds(batch)[:, offset : offset + n_states]
            rows, columns = np.nonzero(is_held)
            positions = steps[rows, offset + columns] % self.buffer_size
            flat = {
                name: array.reshape(*is_held.shape, *self._states.shapes[name])[rows, columns]
                for name, array in fitted.items()
            }
            self._unfinished = StateUpdate(positions, envs[rows], flat)
            self._recover()
        return is_held[:, 0] if is_single else is_held

    def update_priorities(self, batch: SequenceSamples, td_errors: Any) -> Flags:
        """Set the priorities of the windows of a batch to ``eta * max + (1 - eta) * mean`` of their TD errors.

        Windows whose first step was overwritten or evicted since the batch was drawn are skipped. If an argument is
        invalid, no priority is changed.

        Args:
            batch: What `sample_sequences` returned.
            td_errors: The absolute TD error of each step, ``[batch, length]``, or ``[batch, burn_in + length]``; those
                of steps that are not in `learn_mask` are ignored.

        Returns:
            Whether each priority was set, ``[batch]``.
        """
        priorities = self._priorities
        if priorities is None:
            raise PriorityError("this buffer has no priorities: create it with prioritized=True")
        steps, envs = self._steps_of(batch)
        errors, mask = as_errors(td_errors), as_array(batch.learn_mask, "batch.learn_mask")
        if mask.shape != steps.shape or mask.dtype != np.bool_:
            raise ArgumentError("batch.learn_mask is not that of a batch from this buffer; pass the batch unchanged")
        if errors.ndim != 2 or len(errors) != len(mask) or errors.shape[1] > mask.shape[1]:
            raise PriorityError(
                f"td_errors has shape {errors.shape}, expected [batch, length] or [batch, burn_in + length] for "
                f"{len(mask)} windows of {mask.shape[1]} steps"
            )
        mask = mask[:, mask.shape[1] - errors.shape[1] :]
        check_errors(errors[mask])
        mixed = mix_errors(errors, mask, self.eta) + self.epsilon
        with self._lock:
            self._ensure_recovered()
            is_set: Flags = self.holds(batch)[:, 0] & mask.any(axis=1)
            self.max_priority = max(self.max_priority, float(mixed[is_set].max(initial=0)))
            priorities.update(steps[is_set, 0], envs[is_set], mixed[is_set] ** self.alpha)
        return is_set

    def check_sequences(self) -> None:
        """Raise `AssertionError` if episodes, priorities and steps contradict each other; for tests."""
        held = self._held()
        if self.n_added % self.buffer_size != self.pos or held.oldest < 0:
            raise AssertionError(f"n_added is {self.n_added}, but the position is {self.pos}")
        if self._priorities is not None:
            self._priorities.check(held)

    # ---- files ----

    def sequence_columns(self) -> dict[str, Array]:
        """Return all arrays that are saved, by name."""
        index = self._index
        found: dict[str, Array] = {
            "is_first": index.starts, "next_is_first": index.next_is_first, "unseen_steps": index.unseen
        }  # fmt: skip
        found |= {f"states/{name}": column for name, column in self._states.columns.items()}
        if self._priorities is not None:
            tree = self._priorities.tree
            found["priorities"] = tree.read(slice(0, tree.n_leaves)).reshape(self.buffer_size, self.n_envs).copy()
        return found

    def _use_sequence_columns(self, columns: Mapping[str, Array]) -> None:
        """Continue with copies of the columns that every step changes."""
        index = self._index
        index.starts, index.next_is_first = columns["is_first"], columns["next_is_first"]
        for name in self._states.columns:
            self._states.columns[name] = columns[f"states/{name}"]

    def restore_sequences(self, parts: Any) -> None:
        """Use the columns of `LoadedParts`, which are not trusted."""
        require(self.n_added % self.buffer_size == self.pos, "the number of steps does not fit the position")
        require(self.n_added >= self.size(), "more steps are held than were added")
        lead, index = (self.buffer_size, self.n_envs), self._index
        index.starts = parts.column("is_first", np.bool_, lead)
        index.next_is_first = parts.column("next_is_first", np.bool_, lead[1:])
        index.unseen = parts.column("unseen_steps", np.int64, lead[1:])
        within(index.unseen, 0, 1 << 60, "the number of an unseen step")
        for name, column in self._states.columns.items():
            self._states.columns[name] = parts.column(f"states/{name}", column.dtype, column.shape)
        if self._priorities is None:
            return
        values = parts.column("priorities", np.float64, lead)
        require((values >= 0) & (values <= _MAX_PRIORITY), "a priority is negative, too large or not a number")
        # a new step with priority 0 would never be drawn
        for name, low, high in (("max_priority", 1e-300, _MAX_PRIORITY), ("progress_remaining", -1e300, 1e300)):
            value = parts.entry("state", name, kind=(int, float))
            require(low <= value <= high, f"{name} is {value}")
            setattr(self, name, float(value))
        self._priorities.tree.write(slice(0, values.size), values.reshape(-1))
        try:
            self._priorities.check(self._held())
        except AssertionError as problem:
            require(False, str(problem))
