"""Storage for the observations of a buffer: a view or an array for each key; a Box has the single key ``""``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.steps import fit_observations
from sb3_extra_buffers.arguments import cast, narrow
from sb3_extra_buffers.codecs.registry import codec_options
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.kernels import has_numba
from sb3_extra_buffers.stores.choice import choose_unseen
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.raw import RawStore
from sb3_extra_buffers.stores.timeline import TimelineStore
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
View = Array | StoreView

_INT64, _ALL = np.dtype(np.int64), slice(None)


class BufferView(StoreView):
    """The view that SB3's own code indexes."""

    def __getitem__(self, index: Any) -> Any:
        # fast path: SB3 indexes by (steps, envs) or (steps, envs, :)
        if type(index) is tuple and 2 <= len(index) <= 3 and type(self.store.inner) is TimelineStore:
            steps, envs = index[:2]
            if (
                type(steps) is type(envs) is np.ndarray
                and steps.dtype is envs.dtype is _INT64
                and steps.ndim == 1
                and steps.shape == envs.shape
                and self.indices is None
                and self.first_index in (0, len(self) * self.store.n_streams)
                and self.lead_shape == (len(self), self.store.n_streams)
                and (len(index) == 2 or (type(index[2]) is slice and index[2] == _ALL and self.ndim > 2))
            ):
                rows = self.store.read_pairs(steps, envs, self.first_index > 0)
                if rows is not None:
                    batch: Array = rows.view(self.stored_dtype).reshape(len(steps), *self.obs_shape)
                    return self._converted(batch)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        # floats are rounded to the precision of the space, as by SB3's arrays
        if self.dtype.kind == "f" and getattr(value, "dtype", self.dtype) not in (self.dtype, self.stored_dtype):
            value = cast(np.asarray(value), self.dtype, "the observation")
        super().__setitem__(index, value)

    def read_windows_at(self, indices: npt.NDArray[np.int64], newest_only: bool) -> Array:
        """Observations at ``indices [batch, length]``; those of next observations continue after the last one.

        ``newest_only`` returns the newest frames of stacks, if the store has cut them into frames.
        """
        store = self.store
        rows, spec = store.read_windows(indices + self.first_index, newest_only), store.spec
        if rows.shape[-1] != spec.nbytes and store.layout is not None:
            spec = store.layout.frame_spec
        return self._converted(rows.view(spec.dtype).reshape(*indices.shape, *spec.shape))


class ObsViews:
    """Where the observations of a buffer are: by key, in a `BufferView` or a plain array.

    Vectors are in plain arrays in rollout buffers, and without numba in all buffers.

    Inside a buffer every observation is a dict; that of a Box has the key ``""``. `as_sb3` is the way out.

    Attributes:
        by_key: All views and arrays.
        stored: Those in stores.
        dense: Those in plain arrays.
        raw: Those in stores that do not compress them, such as vectors.
    """

    def __init__(self, by_key: Mapping[str, View], is_dict: bool) -> None:
        self.by_key, self.is_dict = dict(by_key), is_dict
        self.stored = {key: view for key, view in by_key.items() if isinstance(view, StoreView)}
        self.dense = {key: view for key, view in by_key.items() if isinstance(view, np.ndarray)}
        self.raw = {key: view for key, view in self.stored.items() if _is_raw(view)}
        self._steps = {key: (view.shape[1:], view.dtype) for key, view in by_key.items()}
        #: The dtypes of observations that are stored in a smaller dtype than that of the space.
        self.narrowed = {key: view.stored_dtype for key, view in self.stored.items() if view.stored_dtype != view.dtype}

    def with_views(self, by_key: Mapping[str, View]) -> ObsViews:
        """The same observations in other views: copies whose stores are frozen, so that they do not tell their kind."""
        views = ObsViews(by_key, self.is_dict)
        views.raw = {key: views.stored[key] for key in self.raw}
        return views

    @classmethod
    def make(
        cls,
        space: spaces.Space[Any],
        obs_shape: Any,
        lead_shape: tuple[int, int],
        options: StorageOptions,
        with_next: bool = False,
    ) -> ObsViews:
        """Storage for ``lead_shape = (n_steps, n_envs)`` observations of ``space``; unwritten ones read as zeros.

        ``with_next`` says that `make_next` will be called.
        """
        how = lead_shape, options, with_next
        if isinstance(space, spaces.Dict):
            options.check_keys(obs_shape)
            views = {key: _make_view(key, space[key], obs_shape[key], *how) for key in obs_shape}
            return cls(views, is_dict=True)
        return cls({"": _make_view("", space, obs_shape, *how)}, is_dict=False)

    def make_next(self) -> ObsViews:
        """Storage for the next observations, which shares frames with this one."""
        return ObsViews(
            {
                # zeros_like would write to every page, and make all of it resident
                key: view.next_view() if isinstance(view, StoreView) else np.zeros(view.shape, view.dtype)
                for key, view in self.by_key.items()
            },
            self.is_dict,
        )

    def as_sb3(self, by_key: Mapping[str, Any] | None = None) -> Any:
        """The views, or other values by key, as SB3 expects them: one for a Box, a new dict in its order for a Dict."""
        by_key = self.by_key if by_key is None else by_key
        return {key: by_key[key] for key in self.by_key} if self.is_dict else by_key[""]

    # ---- writing ----

    def fit(self, observations: Any, name: str) -> dict[str, Array]:
        """Return the observations of all environments by key, in the shape and stored dtype of a step."""
        if not self.is_dict:
            observations = {"": observations}
        elif not isinstance(observations, Mapping):
            raise SpecMismatchError(
                f"{name} is a {type(observations).__name__}, but the observation space has the keys "
                f"{', '.join(self.by_key)}; pass a dict with an array for each key"
            )
        fitted = {}
        for key, (shape, dtype) in self._steps.items():
            if key not in observations:
                missing = ", ".join(key for key in self.by_key if key not in observations)
                raise SpecMismatchError(f"{name} lacks {missing}; the space has {', '.join(self.by_key)}")
            array = observations[key]
            # fast path: skip validation where shape and dtype already match
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                array = fit_observations(array, shape, dtype, f"{name}[{key!r}]" if self.is_dict else name)
            fitted[key] = array
        for key, dtype in self.narrowed.items():
            fitted[key] = narrow(fitted[key], dtype, f"{name}[{key!r}]" if self.is_dict else name)
        return fitted

    def erase(self, step: int) -> None:
        """Free what the stores hold for ``step``."""
        for view in self.stored.values():
            view.erase(step)

    def clear(self) -> None:
        """Make every observation unwritten; the chosen method stays."""
        for view in self.stored.values():
            view.store.clear()
        for array in self.dense.values():
            array[...] = 0

    # ---- memory ----

    def held_bytes(self) -> int:
        """Bytes held now, next observations in stores included; cheap enough to ask at every step."""
        return sum(view.store.held_bytes for view in self.stored.values()) + self.dense_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of the plain arrays."""
        return sum(array.nbytes for array in self.dense.values())

    @property
    def raw_bytes(self) -> int:
        """Bytes of the rows of stores that do not compress them; next observations are not counted."""
        return sum(view.store.spec.nbytes * math.prod(view.lead_shape) for view in self.raw.values())

    def memory_usage(self, n_copies: int, n_steps: int) -> MemoryUsage:
        """What observations take; ``n_copies`` is 2 with next observations, ``n_steps`` how many steps were written."""
        total = MemoryUsage()
        for key, view in self.by_key.items():
            if isinstance(view, StoreView):
                usage = view.memory_usage()
                total += replace(usage, codecs={key: usage.codecs[""]})
            else:
                total += MemoryUsage(n_copies * view[:n_steps].nbytes, codecs={key: "none"})
        return total

    def specs(self) -> dict[str, ObsSpec]:
        """Shape and dtype of one observation of each key."""
        return {key: ObsSpec(view.shape[2:], view.dtype) for key, view in self.by_key.items()}


def _is_raw(view: StoreView) -> bool:
    # not images: those are collected first, to find out how they are stacked, and `auto` may choose again
    return isinstance(view.store.inner, RawStore | TimelineStore) and view.store.keeps_method


def _make_view(
    key: str,
    space: spaces.Space[Any],
    obs_shape: tuple[int, ...],
    lead_shape: tuple[int, int],
    options: StorageOptions,
    with_next: bool,
) -> View:
    dtype: np.dtype[Any] = np.dtype(space.dtype)
    spec = ObsSpec(tuple(obs_shape), options.stored_dtype(key, ObsSpec(tuple(obs_shape), dtype)))
    method = options.method_for(key, spec)
    is_raw = method == "none" or (method == "auto" and choose_unseen(spec) is not None)
    if is_raw and spec.dtype == dtype and not (with_next and spec.nbytes and has_numba()):
        # a plain array is fastest for rollouts, and faster than a `TimelineStore` without compiled kernels
        return np.zeros((*lead_shape, *spec.shape), dtype)
    store = ObservationStore(
        spec,
        n_streams=lead_shape[1],
        method=method,
        options=codec_options(method, options.options_for(method), options.decompression_kwargs),
    )
    # a dense store cannot free what is evicted
    store.may_stay_dense = options.max_bytes is None
    store.copy_limit = options.evict_above if options.raise_above is None else options.raise_above
    return BufferView(store, lead_shape, dtype=dtype)
