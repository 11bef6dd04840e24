"""Buffers to and from the formats of others, through their own libraries; nothing is lost on the way."""

from __future__ import annotations

import inspect
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.cli.contents import Contents, DeviceLeaf, need, progress
from sb3_extra_buffers.errors import FileFormatError, LayoutError, UntrustedFileError
from sb3_extra_buffers.files.parts import views_of
from sb3_extra_buffers.files.saved_parts import SavedParts
from sb3_extra_buffers.files.saving import save
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

# steps that are decoded together
_SLAB = 64


# ---- from SB3 ----


def from_pickle(path: Path, target: Path, trust: bool, method: str = "auto") -> Any:
    """An SB3 buffer that was pickled, compressed and saved as ``target``."""
    if not trust:
        raise UntrustedFileError(
            f"{path} is a pickle: loading it runs whatever code it holds; pass --trust if you made it yourself"
        )
    from stable_baselines3.common.save_util import load_from_pkl

    buffer = compress(load_from_pkl(path), method)
    save(buffer, target)
    return buffer


def compress(buffer: Any, method: str = "auto") -> Any:
    """A compressed buffer that holds what one of SB3's holds."""
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
    from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

    from sb3_extra_buffers._sb3.base import CompressedBuffer
    from sb3_extra_buffers.compressed.factory import compressed

    if isinstance(buffer, CompressedBuffer):
        return buffer
    if not isinstance(buffer, BaseBuffer):
        raise LayoutError(f"a {type(buffer).__name__} is none of SB3's buffers")
    options: dict[str, Any] = {"device": "cpu", "n_envs": buffer.n_envs, "compression_method": method}
    size = buffer.buffer_size
    if isinstance(buffer, ReplayBuffer):
        size *= buffer.n_envs
        options |= {
            "optimize_memory_usage": buffer.optimize_memory_usage,
            "handle_timeout_termination": buffer.handle_timeout_termination,
        }
        if hasattr(buffer, "n_steps"):
            options |= {name: getattr(buffer, name) for name in ("n_steps", "gamma")}
        if isinstance(buffer, HerReplayBuffer):
            options |= {
                "env": None,
                "n_sampled_goal": buffer.n_sampled_goal,
                "goal_selection_strategy": buffer.goal_selection_strategy,
                "copy_info_dict": buffer.copy_info_dict,
            }
    else:
        options |= {"gae_lambda": getattr(buffer, "gae_lambda", 1), "gamma": getattr(buffer, "gamma", 0.99)}
        if hasattr(buffer, "hidden_state_shape"):
            options["hidden_state_shape"] = buffer.hidden_state_shape
    made = compressed(type(buffer))(size, buffer.observation_space, buffer.action_space, **options)
    _copy_columns(buffer, made)
    _copy_observations(buffer, made)
    return made


def _copy_columns(buffer: Any, made: Any) -> None:
    for name, value in vars(buffer).items():
        if name in ("observations", "next_observations", "device", "buffer_size", "env"):
            continue
        if isinstance(value, np.ndarray) or name in ("pos", "full", "generator_ready"):
            if isinstance(value, np.ndarray) and np.shape(vars(made).get(name)) != value.shape:
                raise LayoutError(f"{name} has shape {value.shape}, which the compressed buffer does not have")
            vars(made)[name] = value


def _copy_observations(buffer: Any, made: Any) -> None:
    first = buffer.observations
    keys: list[Any] = list(first) if isinstance(first, dict) else [None]
    has_next = getattr(buffer, "next_observations", None) is not None
    for key in keys:
        old = first if key is None else first[key]
        leaf = made.observations if key is None else made.observations[key]
        if not hasattr(made, "next_observations"):
            for step in progress(range(len(old)), "compressing"):
                leaf[step] = old[step]
            continue
        # without next observations, each is the observation one step on
        after = (buffer.next_observations if key is None else buffer.next_observations[key]) if has_next else None
        next_leaf = made.next_observations if key is None else made.next_observations[key]
        size = len(old)
        # in the order in which they were added, or frames would not find those they resemble
        order = (np.arange(size) + (buffer.pos if buffer.full else 0)) % size
        for step in progress(order[: size if buffer.full else buffer.pos].tolist(), "compressing", size):
            following = after[step] if after is not None else old[(step + 1) % size]
            if isinstance(leaf, StoreView):
                leaf.write_with(next_leaf, step, old[step], following)
            else:
                leaf[step], next_leaf[step] = old[step], following


# ---- to others ----


def to_hdf5(saved: SavedParts, buffer: Any, target: Path) -> None:
    """All columns and observations as an HDF5 file, laid out as the buffer has them."""
    h5py = need("h5py", "convert")
    with h5py.File(target, "w-") as file:
        file.attrs["manifest"] = _about(saved)
        _write_group(buffer, lambda name, array, chunks: file.create_dataset(
            name, array.shape, array.dtype, chunks=chunks, compression="gzip", shuffle=True
        ))  # fmt: skip


def to_zarr(saved: SavedParts, buffer: Any, target: Path) -> None:
    """All columns and observations as a zarr group, laid out as the buffer has them."""
    zarr = need("zarr", "convert")
    group = zarr.open_group(str(target), mode="w-")
    group.attrs["manifest"] = _about(saved)

    def create(name: str, array: Any, chunks: tuple[int, ...] | None) -> Any:
        make = getattr(group, "create_array", None) or group.create_dataset
        return make(name, shape=array.shape, dtype=array.dtype, chunks=chunks or array.shape or (1,))

    _write_group(buffer, create)


def _about(saved: SavedParts) -> str:
    kept = ("format", "version", "library", "saved", "kind", "description")
    return json.dumps({name: saved.record[name] for name in kept if name in saved.record})


def _write_group(buffer: Any, create: Any) -> None:
    arrays: dict[str, Any] = {name.replace(".", "/"): view for name, view in views_of(buffer)}
    if not isinstance(buffer, StoreView):
        for name, value in vars(buffer).items():
            for key, part in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(part, DeviceLeaf) or (isinstance(part, np.ndarray) and part.dtype != object):
                    arrays[f"{name}/{key}" if key else name] = part
    arrays = {name: array for name, array in arrays.items() if not name.startswith("_leaves")}
    for name, array in arrays.items():
        per_step = max(int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize, 1)
        slab = max(min(_SLAB, len(array) if array.ndim else 1, (1 << 20) // per_step), 1)
        chunks = (slab, *array.shape[1:]) if array.ndim and all(array.shape) else None
        dataset = create(name, array, chunks)
        for first in progress(range(0, len(array) if array.ndim else 0, slab), name):
            dataset[first : first + slab] = array[first : first + slab]


def to_minari(buffer: Any, target: Path) -> None:
    """Episodes as a Minari dataset, which ``minari.load_dataset(target.name)`` finds under ``target``'s folder."""
    minari = need("minari", "convert")
    from minari.data_collector import EpisodeBuffer

    if not hasattr(buffer, "next_observations"):
        raise FileFormatError("Minari keeps transitions; only replay buffers have these")
    contents = Contents(buffer)
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(target.parent.absolute())
    options: dict[str, Any] = {}
    if "jpeg_encoding" in inspect.signature(minari.create_dataset_from_buffers).parameters:
        options["jpeg_encoding"] = False  # or pictures would lose something
    try:
        dataset = minari.create_dataset_from_buffers(
            target.name,
            [EpisodeBuffer(**episode) for episode in _minari_episodes(contents, buffer)],
            observation_space=buffer.observation_space,
            action_space=buffer.action_space,
            **options,
        )
        _check_minari(dataset, contents, buffer)
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before


def _minari_episodes(contents: Contents, buffer: Any) -> Iterator[dict[str, Any]]:
    dones, timeouts = contents.column("dones"), contents.column("timeouts")
    actions = contents.column("actions")
    if dones is None or actions is None:
        raise FileFormatError("Minari wants actions and dones, and the buffer has none")
    number = 0
    for episode in progress(contents.episodes(), "episodes"):
        rows = contents.order[episode.steps]
        pieces = list(_unbroken(buffer, rows, episode.env))
        for first, stop in pieces:
            steps, env = episode.steps[first:stop], episode.env
            ended = dones[steps, env].astype(bool)
            late = timeouts[steps, env].astype(bool) if timeouts is not None else np.zeros(len(steps), bool)
            truncated = ended & late
            truncated[-1] |= not ended[-1]
            yield {
                "id": number,
                "observations": _trajectory(buffer, rows[first:stop], env),
                "actions": _fit_actions(actions[steps, env], buffer.action_space),
                "rewards": episode.rewards[first:stop].astype(np.float64),
                "terminations": ended & ~late,
                "truncations": truncated,
            }
            number += 1


def _leaf_pairs(buffer: Any) -> Iterator[tuple[str | None, Any, Any]]:
    leaves, following = buffer.observations, buffer.next_observations
    if isinstance(leaves, dict):
        for key, leaf in leaves.items():
            yield key, leaf, following[key]
    else:
        yield None, leaves, following


def _unbroken(buffer: Any, rows: Array, env: int) -> Iterator[tuple[int, int]]:
    """Pieces of an episode in which every next observation is the observation that follows."""
    breaks = []
    for place in range(len(rows) - 1):
        here, there = rows[place : place + 1], rows[place + 1 : place + 2]
        column = np.array([env])
        for _, leaf, following in _leaf_pairs(buffer):
            if not np.array_equal(following[here, column], leaf[there, column]):
                breaks.append(place + 1)
                break
    bounds = [0, *breaks, len(rows)]
    yield from itertools.pairwise(bounds)


def _trajectory(buffer: Any, rows: Array, env: int) -> Any:
    """The observations of an episode and the one that it ended with."""
    found = {}
    for key, leaf, following in _leaf_pairs(buffer):
        envs = np.full(len(rows), env)
        found[key] = np.concatenate([leaf[rows, envs], following[rows[-1:], envs[-1:]]])
    return found[None] if set(found) == {None} else found


def _fit_actions(actions: Array, space: Any) -> Array:
    """SB3 keeps every action as a row; the space may say that it is a number."""
    return actions.reshape(len(actions), *space.shape).astype(space.dtype, copy=False)


def _check_minari(dataset: Any, contents: Contents, buffer: Any) -> None:
    """Refuse to leave a dataset behind that is not what the buffer holds."""
    for written, episode in zip(dataset.iterate_episodes(), _minari_episodes(contents, buffer), strict=True):
        mine, theirs = episode["observations"], written.observations
        pairs = [(mine[key], theirs[key]) for key in mine] if isinstance(mine, dict) else [(mine, theirs)]
        if not all(np.array_equal(left, right) for left, right in pairs):
            raise FileFormatError("Minari changed the observations; its version may know only lossy pictures")
