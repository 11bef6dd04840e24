"""Windows of consecutive steps: the request, the windows that were drawn for it, and the batch that is returned."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers._sb3.sequence_index import EpisodeIndex, Held, WindowRules
from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import ArgumentError
from sb3_extra_buffers.stores.layout import StackLayout, find_layout
from sb3_extra_buffers.stores.windows import append_next, mask_of, window_indices

__all__ = [
    "Gathered",
    "NewestFrames",
    "Request",
    "SequenceSamples",
    "Windows",
    "as_signed",
    "check_request",
    "discount_powers",
    "n_step_returns",
    "plan_windows",
]

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# torch stores these dtypes, but cannot index or mask them
_SIGNED = {th.uint16: th.int16, th.uint32: th.int32, th.uint64: th.int64}


class SequenceSamples(NamedTuple):
    """A batch of windows; unless stated otherwise, fields have the shape ``[batch, burn_in + length, ...]``.

    `observations` and `next_observations` are usually views of the same memory. Steps after the end of an episode are
    padding: `mask` is False there, observations repeat the last one of the episode, and actions, rewards, dones and
    discounts are zero.

    Attributes:
        observations: Observations; a dict of them for a Dict space.
        actions: Actions.
        next_observations: Observations ``n_steps`` later, or the last one of the episode if it ends before that.
        dones: Whether the episode ended within ``n_steps``, as float32; time limits do not count.
        rewards: Rewards, or n-step returns.
        discounts: Factor for the value of `next_observations`: gamma to the power of the number of rewards.
        is_first: Whether each step is the first of its episode: reset the recurrent state there.
        mask: False for padding.
        learn_mask: True for the steps to learn from: as `mask`, but False during the burn-in. From the first step of an
            episode on, the recurrent state is known without a burn-in, so these steps are included.
        recurrent_states: The states before the first step of each window, ``[batch, ...]`` by name.
        weights: Importance weights of the windows, ``[batch]``; all 1 unless the windows were drawn by priority.
        steps: The number of each step, as a NumPy array: how many were added before it; -1 for padding.
        envs: The environment of each window, as a NumPy array of shape ``[batch]``.

    Examples:
        >>> from gymnasium import spaces
        >>> import numpy as np
        >>> from sb3_extra_buffers.compressed import CompressedSequenceReplayBuffer
        >>> buffer = CompressedSequenceReplayBuffer(100, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), device="cpu")
        >>> obs = np.zeros((1, 3), np.float32)
        >>> for _ in range(50):
        ...     buffer.add(obs, obs, np.array([1]), np.ones(1), np.zeros(1), [{}])
        >>> batch = buffer.sample_sequences(4, length=8, burn_in=2)
        >>> batch.observations.shape, batch.rewards.shape, bool(batch.mask.all())
        (torch.Size([4, 10, 3]), torch.Size([4, 10]), True)
    """

    observations: Any
    actions: th.Tensor
    next_observations: Any
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor
    is_first: th.Tensor
    mask: th.Tensor
    learn_mask: th.Tensor
    recurrent_states: dict[str, th.Tensor]
    weights: th.Tensor
    steps: Indices
    envs: Indices


class Request(NamedTuple):
    """The validated arguments of `sample_sequences`."""

    batch_size: int
    rules: WindowRules
    burn_in: int
    n_steps: int
    gamma: float
    by: str
    newest_only: bool
    online: bool


class Gathered(NamedTuple):
    """What was read while windows were planned."""

    observations: dict[str, Array]
    """``[batch, length + n_steps, ...]``, of some keys."""
    actions: Array
    """``[batch, length + n_steps - 1, ...]``, as rewards and dones; with ``n_steps=1``, zero in padding."""
    rewards: Array
    dones: Array


class Windows(NamedTuple):
    """Drawn windows of ``length`` steps, and what to read for them."""

    request: Request
    numbers: Indices
    """Numbers of the first steps."""
    envs: Indices
    rows: Indices
    """Indices of observations ``[batch, length + n_steps]``; those of next observations are higher by ``n_obs``.

    Empty if all observations have been gathered.
    """
    columns: Indices
    """Indices of transitions ``[batch, length + n_steps - 1]``, if they have not been gathered."""
    mask: Flags
    is_whole: bool
    """Whether there is no padding, and no episode ends within ``n_steps`` of the windows."""
    is_first: Flags
    n_ahead: Indices | None
    """Number of rewards in the return of each step, ``[batch, length]``; None if it is always ``n_steps``."""
    resets: tuple[Indices, Indices, Indices] | None
    """Steps whose next observation is not in ``rows``, which continue with the next episode: batch, step, index."""
    learn_mask: Flags
    discounts: Array
    steps: Indices
    """As in `SequenceSamples`."""
    gathered: Gathered | None = None


def check_request(*arguments: Any) -> Request:
    """Return the arguments of `Sequences.sample_sequences`, or raise an error that names the invalid one."""
    try:
        return _checked(*arguments)
    except TypeError:  # not hashable
        return _check(*arguments)


def _check(
    batch_size: Any, length: Any, burn_in: Any, n_steps: Any, episode_end: Any, strict_length: Any, by: Any,
    frames: Any, online: Any, gamma: Any,
) -> Request:  # fmt: skip
    for name, value, allowed in (
        ("episode_end", episode_end, ("stop", "pad", "continue")),
        ("sample", by, ("steps", "episodes", "priority")),
        ("frames", frames, ("stacked", "newest")),
    ):
        if value not in allowed:
            raise ArgumentError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    batch_size, burn_in = check_count(batch_size, "batch_size"), check_count(burn_in, "burn_in", 0)
    rules = WindowRules(check_count(length, "length") + burn_in, episode_end, bool(strict_length))
    n_steps = check_count(n_steps, "n_steps")
    if not isinstance(gamma, (int, float, np.number)) or not 0 <= gamma <= 1:
        raise ArgumentError(f"gamma must be a discount factor from 0 to 1, got {gamma!r}")
    return Request(batch_size, rules, burn_in, n_steps, float(gamma), by, frames == "newest", bool(online))


# training asks for the same windows again and again; ``typed``, because True is not a number of windows, but equals 1
_checked = lru_cache(maxsize=16, typed=True)(_check)


def discount_powers(request: Request) -> Array:
    """The discount by the number of rewards ahead, as in SB3's `NStepReplayBuffer`; 0 for padding, which has none."""
    powers = np.asarray(request.gamma ** np.arange(request.n_steps + 1, dtype=np.float32), np.float32)
    powers[0] = 0
    return powers


def plan_windows(request: Request, numbers: Indices, envs: Indices, index: EpisodeIndex, held: Held) -> Windows:
    """Return what to read for windows that begin at these steps."""
    length, n_steps = request.rules.length, request.n_steps
    n_columns = length + n_steps - 1
    n_obs, columns = index.n_steps * index.n_envs, np.arange(n_columns)
    indices = window_indices(numbers % index.n_steps, envs, n_columns, index.n_steps, index.n_envs)
    is_first = index.starts.take(indices)
    lengths = np.minimum(held.n_added - numbers, n_columns)
    has_resets = bool(is_first[:, 1:].any())
    if has_resets and request.rules.episode_end != "continue":
        is_next = is_first[:, 1:]
        lengths = np.where(is_next.any(axis=1), np.minimum(is_next.argmax(axis=1) + 1, lengths), lengths)
        has_resets = False
    steps, powers = numbers[:, None] + np.arange(length), discount_powers(request)
    if not has_resets and int(lengths.min()) == n_columns:
        # fast path: nothing ends here
        rows = np.concatenate([indices, indices[:, -1:] + n_obs], axis=1)
        mask, is_first = np.ones((len(numbers), length), np.bool_), np.ascontiguousarray(is_first[:, :length])
        learn_mask, discounts = _learn_mask(request, mask, is_first), np.full(mask.shape, powers[n_steps])
        return Windows(
            request, numbers, envs, rows, indices, mask, True, is_first, None, None, learn_mask, discounts, steps
        )
    is_first &= columns < lengths[:, None]
    ends, resets = lengths[:, None], None
    if has_resets:
        ends = _next_resets(is_first, lengths)[:, :length]
        # within n_steps of the last step of an episode, which is not the last one of the window
        batch, at = np.nonzero((columns[:length] + n_steps >= ends) & (ends < lengths[:, None]))
        resets = batch, at, indices[batch, ends[batch, at] - 1] + n_obs
    n_ahead = np.maximum(np.minimum(ends - columns[:length], n_steps), 0)
    rows, mask = append_next(indices, lengths, n_obs), mask_of(lengths, length)
    is_first = np.ascontiguousarray(is_first[:, :length])
    return Windows(
        request, numbers, envs, rows, rows[:, :-1] % n_obs, mask, False, is_first, n_ahead, resets,
        _learn_mask(request, mask, is_first), powers.take(n_ahead), np.where(mask, steps, -1),
    )  # fmt: skip


def _learn_mask(request: Request, mask: Flags, is_first: Flags) -> Flags:
    learn_mask, burn_in = mask.copy(), request.burn_in
    if burn_in:
        # after the first step of an episode, the state is known without a burn-in
        learn_mask[:, :burn_in] &= np.logical_or.accumulate(is_first[:, :burn_in], axis=1)
    return learn_mask


def _next_resets(is_first: Flags, lengths: Indices) -> Indices:
    """Return for each column of each window the next column at which an episode begins, or the end of the window."""
    n_columns = is_first.shape[1]
    found = np.where(is_first, np.arange(n_columns), lengths[:, None])
    found = np.append(found[:, 1:], lengths[:, None], axis=1)
    nearest: Indices = np.minimum.accumulate(found[:, ::-1], axis=1)[:, ::-1]
    return nearest


def n_step_returns(
    rewards: th.Tensor, dones: th.Tensor, n_ahead: th.Tensor | None, powers: Array, length: int
) -> tuple[th.Tensor, th.Tensor]:
    """Return n-step returns and dones of the first ``length`` columns; ``n_ahead`` is as in `Windows`."""
    n_steps = len(powers) - 1
    returns = rewards[:, :length].clone()
    for ahead in range(1, n_steps):
        later = rewards[:, ahead : ahead + length] * float(powers[ahead])
        returns += later if n_ahead is None else later * (n_ahead > ahead)
    if n_ahead is None:
        return returns, dones[:, n_steps - 1 :].clone()
    last = th.arange(length, device=dones.device) + (n_ahead - 1).clamp(min=0)
    return returns, dones.gather(1, last)


class NewestFrames:
    """Finds out how the images of a buffer are stacked, and returns the newest frame of each stack.

    Stores that split images into frames return single frames already. For other stores, the layout is found by
    comparing a few consecutive images.
    """

    def __init__(self) -> None:
        self._layouts: dict[str, StackLayout] = {}

    @staticmethod
    def may_cut(layout: StackLayout | None) -> bool:
        """Whether frames are stacked along the axis of channels; an image that scrolls looks like a stack too."""
        if layout is None or layout.stack == 1:
            return True
        shape = layout.spec.shape
        if layout.axis == "last":
            return shape[-1] < shape[0]
        return shape[0] < shape[-1] or (shape[0] == shape[-1] and len(shape) > 2)

    def take(self, observations: Any, key: str, spec: ObsSpec, examples: Callable[[], Array]) -> Any:
        """Return the newest frames ``[batch, n, ...]``; the axis along which they were stacked is kept.

        Args:
            observations: Arrays or tensors ``[batch, n, ...]``: whole observations, or frames of them.
            key: The key of the observations in a Dict space.
            spec: Shape and dtype of whole observations.
            examples: Returns a few consecutive observations, to find the layout from.
        """
        shape = tuple(observations.shape[2:])
        if shape != spec.shape:
            # a frame without the axis of length one along which frames were stacked
            first = (1, *shape) if spec.shape[1:] == shape else (*shape, 1)
            return (
                observations if len(shape) == len(spec.shape) else observations.reshape(*observations.shape[:2], *first)
            )
        if len(shape) < 2:
            return observations
        layout = self._layouts.get(key)
        if layout is None:
            layout = find_layout(spec, [spec.to_rows(examples())])
            if layout.stack == 1 or not self.may_cut(layout):
                return observations
            self._layouts[key] = layout
        if layout.axis == "first":
            return observations[:, :, -(shape[0] // layout.stack) :]
        return observations[..., -(shape[-1] // layout.stack) :]

    def __reduce__(self) -> tuple[Any, ...]:
        return NewestFrames, ()


def as_signed(tensor: th.Tensor) -> th.Tensor:
    """The memory of ``tensor`` in a dtype that torch can index and mask."""
    dtype = _SIGNED.get(tensor.dtype)
    return tensor if dtype is None else tensor.view(dtype)
