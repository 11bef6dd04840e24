"""A saved buffer as people think of it: episodes of environments, with pictures, actions and rewards."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import FileFormatError, MissingExtraError
from sb3_extra_buffers.files.parts import views_of
from sb3_extra_buffers.files.saved_parts import SavedParts
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Each = TypeVar("Each")


def need(module: str, extra: str) -> Any:
    """An optional package, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(f"this needs {module!r}: pip install 'sb3-extra-buffers[{extra}]'") from None


def progress(each: Iterable[Each], what: str, total: int | None = None) -> Iterator[Each]:
    """``each``, with a bar on a terminal's standard error."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield from each
        return
    yield from tqdm(each, desc=what, total=total, disable=None, leave=False)


def open_any(path: str | os.PathLike[str]) -> tuple[SavedParts, Any]:
    """A saved buffer to look at."""
    saved = SavedParts.of_folder(Path(path))
    buffer = saved.load(read_only=True)
    if not isinstance(buffer, StoreView) and not hasattr(buffer, "buffer_size"):
        raise FileFormatError(f"{path} holds a {saved.kind!r}, which has no steps to look at")
    stores = vars(buffer).get("_stores")
    if stores:
        for place, name in enumerate(("observations", "next_observations")[: next(iter(stores.values())).n_sets]):
            leaves = {key: DeviceLeaf(store, place) for key, store in stores.items()}
            vars(buffer)[name] = leaves.get("", leaves)
    return saved, buffer


class DeviceLeaf:
    """Observations of a GPU buffer, read as an array is."""

    def __init__(self, store: Any, place: int) -> None:
        self.store, self._place = store, place
        self.shape, self.dtype = store.shape, store.dtype
        self.ndim = len(self.shape)
        inner = store._inner
        found = getattr(inner, "layout", None) or getattr(getattr(inner, "store", None), "layout", None)
        self.layout: StackLayout | None = found

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, where: Any) -> Array:
        from sb3_extra_buffers.stores.device_observation import IndexBatch

        indices = np.arange(self._place * self.store.n_obs, (self._place + 1) * self.store.n_obs)
        wanted = indices.reshape(self.shape[:2])[where]
        found: Array = self.store.read(IndexBatch(wanted.reshape(1, -1))).cpu().numpy()
        return found.reshape(*wanted.shape, *self.shape[2:])


@dataclass(frozen=True, slots=True)
class Episode:
    """Successive steps of one environment."""

    env: int
    steps: npt.NDArray[np.int64]  # where they are in the buffer
    rewards: Array
    ended: bool

    @property
    def total(self) -> float:
        return float(self.rewards.sum(dtype=np.float64))


class Contents:
    """What a buffer holds, in the order in which it happened."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.is_array = isinstance(buffer, StoreView)
        if self.is_array:
            lead = buffer.lead_shape
            self.n_steps = lead[0] if lead else 0
            self.n_envs = int(np.prod(lead[1:], dtype=np.int64))
            self.order = np.arange(self.n_steps)
            return
        self.n_envs, size = int(buffer.n_envs), int(buffer.buffer_size)
        full, pos = bool(buffer.full), int(buffer.pos)
        ring = not hasattr(buffer, "advantages")
        evicted = int(getattr(buffer, "n_evicted", 0))
        oldest = pos if full and ring else 0
        count = (size if full else pos) - evicted
        self.order = (oldest + evicted + np.arange(count)) % size
        self.n_steps = count

    @property
    def n_transitions(self) -> int:
        return self.n_steps * self.n_envs

    def column(self, name: str) -> Array | None:
        """A column as ``(steps, environments, ...)``, oldest first."""
        column = getattr(self.buffer, name, None)
        if not isinstance(column, np.ndarray) or self.is_array:
            return None
        size = int(self.buffer.buffer_size)
        if column.shape[:2] != (size, self.n_envs):
            return None
        return column[self.order]

    def ends(self) -> npt.NDArray[np.bool_]:
        """Where episodes end, as ``(steps, environments)``."""
        dones = self.column("dones")
        if dones is not None:
            return dones.astype(np.bool_)
        out = np.zeros((self.n_steps, self.n_envs), np.bool_)
        starts = self.column("episode_starts")
        if starts is not None:
            out[:-1] = starts[1:].astype(np.bool_)
        return out

    def episodes(self) -> list[Episode]:
        """Episodes of all environments, by the step at which they begin."""
        ends = self.ends()
        rewards = self.column("rewards")
        if rewards is None:
            rewards = np.zeros(ends.shape, np.float32)
        found = []
        for env in range(self.n_envs):
            cuts = np.flatnonzero(ends[:, env]) + 1
            bounds = np.unique(np.concatenate([[0], cuts, [self.n_steps]]))
            for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                span = slice(begin, end)
                found.append((begin, Episode(env, np.arange(begin, end), rewards[span, env], bool(ends[end - 1, env]))))
        found.sort(key=lambda pair: (pair[0], pair[1].env))
        return [episode for _, episode in found]

    # ---- pictures ----

    def pictures(self, key: str | None = None) -> Pictures:
        """The observations that can be looked at; ``key`` names them in a Dict."""
        leaves: dict[str, Any] = {}
        observed = self.buffer if self.is_array else self.buffer.observations
        for name, leaf in observed.items() if isinstance(observed, dict) else [("", observed)]:
            if len(leaf.shape) >= 4:
                leaves[name] = leaf
        if key is not None and key not in leaves:
            raise FileFormatError(f"there are no pictures under {key!r}; there are some under {sorted(leaves)}")
        if not leaves:
            raise FileFormatError("the observations are no pictures: they have fewer than two axes")
        return Pictures(leaves[key if key is not None else next(iter(leaves))], self)


class Pictures:
    """The newest frame of each observation, as RGB."""

    def __init__(self, leaf: Any, contents: Contents) -> None:
        self._leaf, self._contents = leaf, contents
        layout = leaf.store.layout if isinstance(leaf, StoreView) else getattr(leaf, "layout", None)
        n_lead = len(leaf.shape) - len(_obs_shape(leaf, contents))
        self._shape = leaf.shape[n_lead:]
        self._layout: StackLayout | None = layout

    def __getitem__(self, where: tuple[Array, Array]) -> npt.NDArray[np.uint8]:
        """Pictures ``[n, height, width, 3]`` of pairs of step (oldest first) and environment."""
        steps, envs = (np.asarray(part, np.int64) for part in where)
        rows = self._contents.order[steps]
        if self._contents.is_array and len(self._leaf.lead_shape) != 2:
            table = self._leaf._table().reshape(self._contents.n_steps, self._contents.n_envs)
            batch = self._leaf._read(table[rows, envs])
        else:
            batch = self._leaf[rows, envs]
        return to_rgb(batch, self._layout)


def _obs_shape(leaf: Any, contents: Contents) -> tuple[int, ...]:
    return leaf.obs_shape if isinstance(leaf, StoreView) else leaf.shape[2:]


def to_rgb(batch: Array, layout: StackLayout | None = None) -> npt.NDArray[np.uint8]:
    """Observations ``[n, ...]`` as pictures: the last frame of a stack, grey or coloured."""
    if batch.ndim == 3:
        batch = batch[..., None]
    if batch.ndim != 4:
        batch = batch.reshape(len(batch), *batch.shape[-3:])
    if layout is not None and layout.stack > 1:
        if layout.axis == "first":
            batch = batch[:, -(batch.shape[1] // layout.stack) :]
        else:
            batch = batch[..., -(batch.shape[-1] // layout.stack) :]
    # channels are the short axis
    if batch.shape[1] < batch.shape[-1] and batch.shape[1] <= 16:
        batch = np.moveaxis(batch, 1, -1)
    channels = batch.shape[-1]
    if channels not in (1, 3, 4):
        batch = batch[..., -3:] if channels % 3 == 0 else batch[..., -1:]
    batch = _to_bytes(batch[..., :3])
    return np.ascontiguousarray(np.repeat(batch, 3, axis=-1) if batch.shape[-1] == 1 else batch)


def _to_bytes(batch: Array) -> npt.NDArray[np.uint8]:
    if batch.dtype == np.uint8:
        return batch
    values = np.nan_to_num(batch.astype(np.float64))
    low, high = (values.min(), values.max()) if values.size else (0.0, 1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    return np.asarray((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)


def memory_of(buffer: Any) -> Any:
    """The memory report, whoever wrote the class."""
    if hasattr(buffer, "memory_usage"):
        return buffer.memory_usage()
    usages = {id(view.store): view.memory_usage() for _, view in views_of(buffer)}
    total = None
    for usage in usages.values():
        total = usage if total is None else total + usage
    return total
