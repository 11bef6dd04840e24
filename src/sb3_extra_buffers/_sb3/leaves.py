"""The observations of a buffer: one array-like for a Box, one for each key of a Dict."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers.codecs.registry import codec_options
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import ArgumentError, SpecMismatchError
from sb3_extra_buffers.stores.choice import choose_unseen
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Leaf = Array | StoreView

# arrays that were just decoded, while somebody has them: no tensor refers to their memory
_decoded: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()


def take_decoded(array: Any) -> bool:
    """Whether ``array`` came out of a `BufferView` as it is, so that a tensor may take over its memory; once only."""
    if _decoded.get(id(array)) is not array:
        return False
    del _decoded[id(array)]
    return True


class BufferView(StoreView):
    """The view that SB3's own code indexes."""

    def __getitem__(self, index: Any) -> Any:
        batch = super().__getitem__(index)
        if type(batch) is np.ndarray:
            _decoded[id(batch)] = batch
        return batch

    def __setitem__(self, index: Any, value: Any) -> None:
        # floats are rounded to the space's precision, as SB3's arrays do it
        if self.dtype.kind == "f" and getattr(value, "dtype", self.dtype) != self.dtype:
            value = cast(np.asarray(value), self.dtype, "the observation")
        super().__setitem__(index, value)


class Leaves(dict[str, Leaf]):
    """Leaves by key; any other index is applied to each of them, as SB3's n-step buffer does to a Box."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return super().__getitem__(index)
        return {key: leaf[index] for key, leaf in self.items()}


def each_leaf(observations: Leaf | Leaves) -> Iterator[tuple[str | None, Leaf]]:
    """Keys and leaves; a Box has one without a key."""
    if isinstance(observations, dict):
        yield from observations.items()
    else:
        yield None, observations


def make_leaves(
    space: spaces.Space[Any], obs_shape: Any, lead_shape: tuple[int, int], options: StorageOptions
) -> Leaf | Leaves:
    """Storage for ``(n_steps, n_envs)`` observations of ``space``, nothing written yet."""
    if isinstance(space, spaces.Dict):
        return Leaves({key: _make_leaf(key, space[key], obs_shape[key], lead_shape, options) for key in obs_shape})
    return _make_leaf(None, space, obs_shape, lead_shape, options)


def _make_leaf(
    key: str | None,
    space: spaces.Space[Any],
    obs_shape: tuple[int, ...],
    lead_shape: tuple[int, int],
    options: StorageOptions,
) -> Leaf:
    spec = ObsSpec(tuple(obs_shape), np.dtype(space.dtype))
    options.check_dtypes(key, space, spec)
    method = options.method_for(key, spec)
    if method == "none" or (method == "auto" and choose_unseen(spec) is not None):
        # vectors: nothing is faster than SB3's own array
        return np.zeros((*lead_shape, *spec.shape), spec.dtype)
    store = ObservationStore(
        spec,
        n_streams=lead_shape[1],
        method=method,
        options=codec_options(method, options.compression_kwargs, options.decompression_kwargs),
    )
    # what stays dense cannot give its memory back
    store.may_stay_dense = options.max_bytes is None
    return BufferView(store, lead_shape)


def next_leaves(leaves: Leaf | Leaves) -> Leaf | Leaves:
    """As much storage again, for the next observations; frames are shared."""
    if isinstance(leaves, dict):
        return Leaves({key: _next_leaf(leaf) for key, leaf in leaves.items()})
    return _next_leaf(leaves)


def _next_leaf(leaf: Leaf) -> Leaf:
    return leaf.next_view() if isinstance(leaf, StoreView) else np.zeros(leaf.shape, leaf.dtype)


def fit(leaf: Leaf, observations: Any, name: str) -> Array:
    """``observations`` of all environments in the leaf's dtype, or an error that says what does not fit.

    As in SB3, what NumPy can broadcast will do, and floats are rounded to the space's precision.
    """
    array = as_array(observations, name)
    dtype = leaf.dtype
    if array.dtype == dtype and array.shape == leaf.shape[1:]:
        return array
    shape = leaf.shape[1:]
    if array.dtype != dtype:
        array = cast(array, dtype, name)
    if array.shape != shape:
        # Discrete observations come without their axis of one
        if array.shape == shape[:1] and shape[1:] == (1,):
            return array.reshape(shape)
        try:
            return np.broadcast_to(array, shape)
        except ValueError:
            raise SpecMismatchError(
                f"{name} has shape {array.shape}, but {shape[0]} environments with observations of {shape[1:]} "
                f"make {shape}; check n_envs and the observation space"
            ) from None
    return array


def fit_leaves(leaves: Leaves, observations: Any, name: str) -> dict[str, Array]:
    """`fit` for every key."""
    if not isinstance(observations, Mapping):
        raise SpecMismatchError(
            f"{name} is a {type(observations).__name__}, but the observation space has the keys {', '.join(leaves)}; "
            "pass a dict with an array for each"
        )
    missing = [key for key in leaves if key not in observations]
    if missing:
        raise SpecMismatchError(f"{name} lacks {', '.join(missing)}; the space has {', '.join(leaves)}")
    return {key: fit(leaf, observations[key], f"{name}[{key!r}]") for key, leaf in leaves.items()}


def fit_actions(column: Array, actions: Any) -> Array:
    """``actions`` of all environments as a step of ``column`` holds them."""
    array, shape = as_array(actions, "action"), column.shape[1:]
    if array.dtype != column.dtype:
        array = cast(array, column.dtype, "action")
    try:
        return array.reshape(shape)
    except ValueError:
        raise SpecMismatchError(
            f"actions of shape {array.shape} cannot be {shape[0]} actions of {shape[1]} numbers; "
            "check n_envs and the action space"
        ) from None


def fit_column(values: Any, n_envs: int, name: str, dtype: Any = np.float32) -> Array:
    """One number for each environment, such as rewards; a single one is for all of them."""
    array = as_array(values, name)
    if array.dtype.kind not in "biuf":
        raise SpecMismatchError(f"{name} has dtype {array.dtype}; pass a number for each of {n_envs} environments")
    if array.size != 1 and array.shape not in ((n_envs,), (1, n_envs)):
        raise SpecMismatchError(f"{name} has shape {array.shape}, but there are {n_envs} environments; check n_envs")
    # here rather than when it is stored: a warning may be an error
    array = array.astype(dtype, copy=False)
    return array.reshape(-1) if array.size == n_envs else np.broadcast_to(array.reshape(-1), (n_envs,))


def as_array(values: Any, name: str) -> Array:
    """``values`` as an array, or an error that says that they are none."""
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, th.Tensor) else values)
    except (ValueError, TypeError, RuntimeError) as problem:
        raise SpecMismatchError(f"{name} cannot be made an array: {problem}") from problem


def check_count(value: Any, name: str, least: int = 1) -> int:
    """``value``, if it is a whole number from ``least`` on that a batch can have."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if isinstance(value, (bool, np.bool_)) or not least <= count < 1 << 40:
        raise ArgumentError(f"{name} must be a whole number from {least} on, got {value!r}")
    return count


def cast(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """``array`` in another dtype: integers exactly or not at all, floats rounded."""
    if array.dtype.kind not in "biuf" or dtype.kind not in "biuf":
        raise SpecMismatchError(f"{name} has dtype {array.dtype}, which cannot become {dtype}")
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
        if dtype.kind == "f":
            bad = np.isinf(cast) & ~np.isinf(array)
        else:
            bad = cast.astype(array.dtype) != array
            bad |= (cast < 0) != (array < 0)
    if bad.any():
        raise SpecMismatchError(
            f"{name} holds {array[bad].ravel()[0]!r} ({array.dtype}), which is no value of the space's dtype {dtype}; "
            "convert observations before they are added"
        )
    return cast


def held_bytes(leaves: Leaf | Leaves) -> int:
    """Bytes that the stores behind these leaves hold now; cheap enough for every step."""
    return sum(leaf.store.held_bytes if isinstance(leaf, StoreView) else leaf.nbytes for _, leaf in each_leaf(leaves))


def leaves_usage(leaves: Leaf | Leaves, n_copies: int, written: float) -> MemoryUsage:
    """What is held for observations; ``n_copies`` is 2 where the next ones are beside them."""
    total = MemoryUsage(0, 0, 0, 0, 0)
    for key, leaf in each_leaf(leaves):
        if isinstance(leaf, StoreView):
            usage = leaf.memory_usage()
            method = usage.codecs[""]
            # dense is one copy: next observations repeat the observations
            dense = usage.dense // n_copies
            parts = (usage.payload, usage.index, usage.keyframes, usage.other)
        else:
            method, dense = "none", leaf.nbytes
            parts = (int(leaf.nbytes * n_copies * written), 0, 0, 0)
        total += MemoryUsage(*parts, dense=dense, codecs={key or "": method})
    return total
