"""Convert SB3's pickles to saved buffers, and saved buffers to HDF5, zarr and Minari; all of it is lossless."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._extras import import_extra
from sb3_extra_buffers.cli.reader import BufferReader, with_progress
from sb3_extra_buffers.cli.saved_buffer import SavedBuffer
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.errors import ArgumentError, ExtraBuffersError, FileFormatError, LayoutError, UntrustedFileError
from sb3_extra_buffers.files.saved_parts import SavedParts
from sb3_extra_buffers.files.saving import save
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

# steps to decode at a time, at most
_BLOCK = 64


# ---- from SB3 ----


def from_pickle(path: Path, target: Path, trust: bool, method: str = "auto") -> str:
    """Compress a pickled SB3 buffer and save it as ``target``; return the name of its class."""
    if not path.is_file():
        raise FileFormatError(f"{path}: no such file")
    check_method(method)
    if not trust:
        raise UntrustedFileError(
            f"{path} is a pickle: loading it runs any code it contains; pass --trust if you created it"
        )
    from stable_baselines3.common.save_util import load_from_pkl

    try:
        with path.open("rb") as file:
            pickled = load_from_pkl(file)
    except Exception as problem:  # a pickle can raise anything
        raise FileFormatError(f"{path} cannot be unpickled: {type(problem).__name__}: {problem}") from problem
    try:
        buffer = compress(pickled, method)
    except ExtraBuffersError as problem:
        raise FileFormatError(f"{path} cannot be converted: {problem}") from problem
    save(buffer, target)
    return type(buffer).__name__


def check_method(method: str) -> None:
    """Raise a named error unless ``method`` is a compression method that can be used here."""
    if method != "auto":
        get_codec(method)


def compress(buffer: Any, method: str = "auto") -> Any:
    """Return a compressed buffer with the contents of an SB3 buffer."""
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer

    from sb3_extra_buffers._sb3.base import CompressedBuffer
    from sb3_extra_buffers.compressed.factory import compressed

    if isinstance(buffer, CompressedBuffer):
        return buffer
    if not isinstance(buffer, BaseBuffer):
        raise LayoutError(f"it holds a {type(buffer).__name__}, not an SB3 buffer")
    size = buffer.buffer_size
    if isinstance(buffer, ReplayBuffer):
        size *= buffer.n_envs
    options = _constructor_options(buffer) | {"n_envs": buffer.n_envs, "device": "cpu", "compression_method": method}
    copy = compressed(type(buffer))(size, buffer.observation_space, buffer.action_space, **options)
    _copy_columns(buffer, copy)
    _copy_observations(buffer, copy)
    return copy


def _constructor_options(buffer: Any) -> dict[str, Any]:
    """Return the arguments that ``buffer`` was created with, as far as it remembers them."""
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

    if not isinstance(buffer, ReplayBuffer):
        options = {"gae_lambda": getattr(buffer, "gae_lambda", 1), "gamma": getattr(buffer, "gamma", 0.99)}
        if hasattr(buffer, "hidden_state_shape"):
            options["hidden_state_shape"] = buffer.hidden_state_shape
        return options
    names = ["optimize_memory_usage", "handle_timeout_termination"]
    if hasattr(buffer, "n_steps"):
        names += ["n_steps", "gamma"]
    if not isinstance(buffer, HerReplayBuffer):
        return {name: getattr(buffer, name) for name in names}
    names += ["n_sampled_goal", "goal_selection_strategy", "copy_info_dict"]
    return {"env": None} | {name: getattr(buffer, name) for name in names}


def _copy_columns(source: Any, copy: Any) -> None:
    for name, value in vars(source).items():
        if name in ("observations", "next_observations", "device", "buffer_size", "env"):
            continue
        if isinstance(value, np.ndarray) or name in ("pos", "full", "generator_ready"):
            expected = np.shape(vars(copy).get(name))
            if isinstance(value, np.ndarray) and expected != value.shape:
                raise LayoutError(f"{name} has shape {value.shape}, but the compressed buffer expects {expected}")
            vars(copy)[name] = value


def _copy_observations(source: Any, copy: Any) -> None:
    """Compress the observations in the order they were added, so that each frame resembles the one before it."""
    if not hasattr(copy, "next_observations"):
        for (old,), (new,) in zip(_leaves(source, "observations"), _leaves(copy, "observations"), strict=True):
            for step in with_progress(range(len(old)), "compressing"):
                new[step] = old[step]
        return
    has_next = getattr(source, "next_observations", None) is not None
    names = ["observations", "next_observations"]
    for old, new in zip(_leaves(source, *names[: 1 + has_next]), _leaves(copy, *names), strict=True):
        size = len(old[0])
        count = size if source.full else source.pos
        for step in with_progress((source.pos - count + np.arange(count)) % size, "compressing", count):
            # without next observations, the next one is the observation of the following step
            obs, next_obs = old[0][step], old[1][step] if has_next else old[0][(step + 1) % size]
            if isinstance(new[0], StoreView):
                new[0].write_with(new[1], int(step), obs, next_obs)
            else:
                new[0][step], new[1][step] = obs, next_obs


def _leaves(buffer: Any, *names: str) -> Iterator[list[Any]]:
    """Yield the arrays of each key of Dict observations, one for each of ``names``; once for Box observations."""
    arrays = [getattr(buffer, name) for name in names]
    yield from ([array[key] for array in arrays] for key in arrays[0]) if isinstance(arrays[0], dict) else [arrays]


# ---- to HDF5 and zarr ----


def to_hdf5(saved: SavedParts, buffer: Any, target: Path) -> None:
    """Write all columns and observations to an HDF5 file, in the buffer's own layout."""
    h5py = import_extra("h5py", "convert", "converting to HDF5")
    with h5py.File(target, "w-") as file:
        file.attrs["manifest"] = _manifest(saved)

        def create(name: str, array: Any, chunks: tuple[int, ...] | None) -> Any:
            return file.create_dataset(name, array.shape, array.dtype, chunks=chunks, compression="gzip", shuffle=True)

        _write_arrays(buffer, create)


def to_zarr(saved: SavedParts, buffer: Any, target: Path) -> None:
    """Write all columns and observations to a zarr group, in the buffer's own layout."""
    group = import_extra("zarr", "convert", "converting to zarr").open_group(str(target), mode="w-")
    group.attrs["manifest"] = _manifest(saved)

    def create(name: str, array: Any, chunks: tuple[int, ...] | None) -> Any:
        create_array = getattr(group, "create_array", None) or group.create_dataset  # zarr 3, zarr 2
        return create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks or array.shape or (1,))

    _write_arrays(buffer, create)


def _manifest(saved: SavedParts) -> str:
    names = ("format", "version", "library", "saved", "kind", "description")
    return json.dumps({name: saved.record[name] for name in names if name in saved.record})


def _write_arrays(buffer: Any, create: Callable[..., Any]) -> None:
    for name, array in _named_arrays(buffer):
        step_bytes = max(int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize, 1)
        length = len(array) if array.ndim else 0
        block = max(min(_BLOCK, length, (1 << 20) // step_bytes), 1)
        try:
            dataset = create(name, array, (block, *array.shape[1:]) if array.ndim and all(array.shape) else None)
        except (TypeError, ValueError) as problem:
            raise FileFormatError(f"an array cannot be written under the name {name!r}: {problem}") from problem
        for start in with_progress(range(0, length, block), name):
            dataset[start : start + block] = array[start : start + block]


def _named_arrays(buffer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns and observations of a buffer, by their paths in a group."""
    if isinstance(buffer, StoreView):
        yield "array", buffer
        return
    names, columns = ["frames", "rewards", "actions", "dones", "features"], {}
    if isinstance(buffer, SavedBuffer):
        names, columns = ["observations", "next_observations"], buffer.columns
    for name, value in [*((name, getattr(buffer, name, None)) for name in names), *columns.items()]:
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(part, StoreView | np.ndarray):
                yield f"{name}/{key}" if key else name, part


# ---- to Minari ----


def to_minari(buffer: Any, target: Path) -> None:
    """Write episodes as a Minari dataset: ``minari.load_dataset(target.name)`` finds it in ``target``'s folder."""
    minari = import_extra("minari", "convert", "converting to Minari")
    from minari.data_collector import EpisodeBuffer

    if not hasattr(buffer, "next_observations"):
        raise FileFormatError("Minari datasets consist of transitions, which only replay buffers have")
    if not re.search(r"-v\d+$", target.name):
        raise ArgumentError(f"{target.name!r}: the name of a Minari dataset must end in a version, as {target.name}-v0")
    reader = BufferReader(buffer)
    options: dict[str, Any] = {}
    if "jpeg_encoding" in inspect.signature(minari.create_dataset_from_buffers).parameters:
        options["jpeg_encoding"] = False  # JPEG is lossy
    previous = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(target.parent.absolute())
    try:
        with warnings.catch_warnings():
            # it asks for an author, a description and the like
            warnings.simplefilter("ignore", UserWarning)
            dataset = minari.create_dataset_from_buffers(
                target.name,
                [EpisodeBuffer(**episode) for episode in _minari_episodes(reader)],
                observation_space=buffer.observation_space,
                action_space=buffer.action_space,
                **options,
            )
        _check_minari(dataset, reader)
    except (AssertionError, KeyError, TypeError, ValueError) as problem:
        if isinstance(problem, ExtraBuffersError):
            raise
        raise FileFormatError(f"Minari cannot write {target}: {problem}") from problem
    finally:
        if previous is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = previous


def _minari_episodes(reader: BufferReader) -> Iterator[dict[str, Any]]:
    buffer, space = reader.buffer, reader.buffer.action_space
    dones, timeouts, actions = (reader.column(name) for name in ("dones", "timeouts", "actions"))
    if dones is None or actions is None:
        raise FileFormatError("Minari datasets need actions and dones, which this buffer does not have")
    number = itertools.count()
    for episode in with_progress(reader.episodes(), "episodes"):
        rows, env = reader.order[episode.steps], episode.env
        for start, stop in _unbroken(buffer, rows, env):
            steps = episode.steps[start:stop]
            ended = dones[steps, env].astype(bool)
            timed_out = ended & (timeouts[steps, env].astype(bool) if timeouts is not None else False)
            truncated = timed_out.copy()
            truncated[-1] |= not ended[-1]
            yield {
                "id": next(number),
                "observations": _trajectory(buffer, rows[start:stop], env),
                # SB3 stores every action as a vector, also those that are single numbers in their space
                "actions": actions[steps, env].reshape(len(steps), *space.shape).astype(space.dtype, copy=False),
                "rewards": episode.rewards[start:stop].astype(np.float64),
                "terminations": ended & ~timed_out,
                "truncations": truncated,
            }


def _unbroken(buffer: Any, rows: Array, env: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of an episode in which each next observation is the observation of the following step."""
    breaks = [
        index
        for index in range(1, len(rows))
        if any(
            not np.array_equal(next_obs[rows[index - 1 : index], [env]], obs[rows[index : index + 1], [env]])
            for obs, next_obs in _leaves(buffer, "observations", "next_observations")
        )
    ]
    yield from itertools.pairwise([0, *breaks, len(rows)])


def _trajectory(buffer: Any, rows: Array, env: int) -> Any:
    """Return the observations of ``rows`` and the last next observation."""
    envs = np.full(len(rows), env)
    arrays = [
        np.concatenate([obs[rows, envs], next_obs[rows[-1:], envs[-1:]]])
        for obs, next_obs in _leaves(buffer, "observations", "next_observations")
    ]
    is_dict = isinstance(buffer.observations, dict)
    return dict(zip(buffer.observations, arrays, strict=True)) if is_dict else arrays[0]


def _check_minari(dataset: Any, reader: BufferReader) -> None:
    """Raise if the observations of ``dataset`` are not those of the buffer."""
    for written, episode in zip(dataset.iterate_episodes(), _minari_episodes(reader), strict=True):
        expected, actual = episode["observations"], written.observations
        pairs = (
            [(expected[key], actual[key]) for key in expected] if isinstance(expected, dict) else [(expected, actual)]
        )
        if not all(np.array_equal(left, right, equal_nan=left.dtype.kind == "f") for left, right in pairs):
            raise FileFormatError("Minari changed the observations; this version may only support lossy images")
