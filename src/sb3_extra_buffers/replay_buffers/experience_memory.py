"""`ReplayBuffer`: experience as TensorDicts, sampled at random, by index or in epochs."""

from __future__ import annotations

import gc
import os
import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from sb3_extra_buffers import files
from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import (
    ArgumentError,
    DamagedFileError,
    EmptyBufferError,
    FileFormatError,
    IndexOutOfRangeError,
    MissingExtraError,
    SpecMismatchError,
    UnknownFieldError,
)
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.parts import LoadedParts, Parts

try:
    from tensordict import TensorDict, TensorDictBase
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

    from sb3_extra_buffers._torchrl.checkpoint import embedded_storage, tensor_column
    from sb3_extra_buffers._torchrl.indexing import as_indices, wrap_indices
    from sb3_extra_buffers._torchrl.memmaps import read_json, remove_saved, write_json
    from sb3_extra_buffers._torchrl.schema import (
        INDEX_KEY,
        Key,
        Spec,
        check_items,
        key_from_json,
        key_to_json,
        non_tensor_keys,
        specs_of,
    )
    from sb3_extra_buffers._torchrl.tensors import CPU, dtype_name, parse_tensor_dtype, to_numpy
    from sb3_extra_buffers._torchrl.transactions import get_cursor, set_cursor
    from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
except ImportError as error:
    raise MissingExtraError(
        f"ReplayBuffer needs 'torchrl' and 'tensordict': {MissingExtraError.hint('torchrl')}"
    ) from error

__all__ = ["ReplayBuffer", "restore_buffer"]

Indices = Sequence[int] | torch.Tensor | range

_KIND = "experience"
_FORMAT = "sb3-extra-buffers/experience"
_NUMBERS = ("buffer_size", "data_size", "pointer")
# tuples that are copied at a time when the capacity changes
_CHUNK = 1024


class ReplayBuffer:
    """A fixed-size buffer of experience tuples; new tuples overwrite the oldest.

    Batches are moved to ``device``. Tuples are stored in memory-mapped files if ``storing_device`` is the CPU and in
    the memory of a GPU otherwise; with ``storage="compressed"`` they are in a `CompressedStorage`, where images take
    about a hundredth of the memory.

    Args:
        device: The device of sampled batches, usually the one to train on.
        storing_device: The device that experience is stored on.
        buffer_size: The maximum number of experience tuples.
        print_gc_warning: Warn when `reset` runs the garbage collector, which may take a while.
        storage: ``"auto"`` for TorchRL's own storage for ``storing_device``, or ``"compressed"``.
        n_envs: For ``"compressed"``: the number of environments that take turns; detected from the data by default.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from sb3_extra_buffers.replay_buffers import ReplayBuffer
        >>> cpu = torch.device("cpu")
        >>> buffer = ReplayBuffer(device=cpu, storing_device=cpu, buffer_size=100_000, storage="compressed")
        >>> buffer.add_batch(TensorDict({"obs": torch.zeros(64, 4, 84, 84, dtype=torch.uint8)}, [64]))
        >>> buffer.sample_batch(32)["obs"].shape
        torch.Size([32, 4, 84, 84])
    """

    def __init__(
        self,
        device: torch.device,
        storing_device: torch.device,
        buffer_size: int,
        print_gc_warning: bool = False,
        *,
        storage: Literal["auto", "compressed"] = "auto",
        n_envs: int | None = None,
    ) -> None:
        if storage not in ("auto", "compressed"):
            raise ArgumentError(f"storage must be 'auto' or 'compressed', got {storage!r}")
        if n_envs is not None and storage != "compressed":
            raise ArgumentError(f"n_envs={n_envs} needs storage='compressed', got storage={storage!r}")
        self.device = _as_device("device", device)
        self.storing_device = _as_device("storing_device", storing_device)
        self.print_gc_warning = print_gc_warning
        self.storage = storage
        self.n_envs = n_envs
        self.loaded_metadata: dict[str, int] | None = None
        self._create_memory(check_count(buffer_size, "buffer_size"))

    def _create_memory(self, buffer_size: int) -> None:
        self.buffer_size = buffer_size
        self.memory: Any = TensorDictReplayBuffer(storage=self._get_storage(buffer_size, self.storing_device))
        # of the first tuple, which all others must match
        self.specs: dict[Key, Spec] | None = None
        self._iterator: Iterator[TensorDict] | None = None

    def _get_storage(
        self, buffer_size: int, device: torch.device
    ) -> LazyMemmapStorage | LazyTensorStorage | CompressedStorage:
        if self.storage == "compressed":
            return CompressedStorage(buffer_size, device=device, n_envs=self.n_envs)
        if device.type == "cpu":
            return LazyMemmapStorage(buffer_size, device=device)
        return LazyTensorStorage(buffer_size, device=device)

    def reset(self, buffer_size: int | None = None) -> None:
        """Remove all experience, and change the capacity to ``buffer_size`` if given."""
        size = self.buffer_size if buffer_size is None else check_count(buffer_size, "buffer_size")
        self._create_memory(size)
        if self.print_gc_warning:
            warnings.warn("running the garbage collector to free the memory of the buffer", stacklevel=2)
        gc.collect()

    # ---- adding ----

    def add(self, experience: TensorDict) -> None:
        """Add one tuple, ``experience``, without a batch dimension."""
        self._store(self.memory.add, _as_tensordict(experience, 0), 0)

    def add_batch(self, batch: TensorDict) -> None:
        """Add the tuples of ``batch`` in the order of its first dimension."""
        batch = _as_tensordict(batch, 1)
        if len(batch):
            self._store(self.memory.extend, batch, 1)

    def _store(self, write: Callable[[Any], Any], data: TensorDict, n_batch: int) -> None:
        # TorchRL's own storages would cast silently, or mix shapes
        if self.specs is None:
            self.specs = _specs_behind(n_batch, data)
        else:
            check_items(self.specs, True, data, n_batch)
        try:
            write(data)
        finally:
            if not self.size:
                # nothing was stored that later tuples could differ from
                self.specs = None

    # ---- sampling ----

    def sample_batch(self, batch_size: int) -> TensorDict:
        """Return ``batch_size`` random tuples, drawn with replacement."""
        self._check_not_empty()
        return self._to_device(self.memory.sample(check_count(batch_size, "batch_size")))

    def sample_random(self, batch_size: int) -> TensorDict:
        """Alias of `sample_batch`: return ``batch_size`` random tuples."""
        return self.sample_batch(batch_size)

    def sample_by_index(self, indices: Indices) -> TensorDict:
        """Return the tuples at ``indices`` of the storage."""
        return self._to_device(self.memory.storage.get(self._check_indices(indices)))

    def sample_by_index_fields(self, indices: Indices, fields: Sequence[Key]) -> Any:
        """Return ``fields`` of the tuples at ``indices``: one tensor, or a tuple of tensors for several fields."""
        if not isinstance(fields, (list, tuple)) or not fields:
            raise UnknownFieldError(f"fields must be a list of at least one name, got {fields!r}")
        index, storage = self._check_indices(indices), self.memory.storage
        if isinstance(storage, CompressedStorage):
            tensors = storage.get_fields(index, list(fields))
        else:
            stored = storage.get(slice(None))
            known = list(stored.keys(True, True))
            unknown = [field for field in fields if field not in known]
            if unknown:
                raise UnknownFieldError(f"unknown fields {unknown}; the fields are {sorted(map(str, known))}")
            tensors = [stored.get(field)[index] for field in fields]
        moved = tuple(tensor.to(self.device) for tensor in tensors)
        return moved[0] if len(moved) == 1 else moved

    def sample_all(self) -> TensorDict:
        """Return all tuples in storage order."""
        self._check_not_empty()
        return self._to_device(self.memory.storage.get(torch.arange(self.size)))

    def _to_device(self, batch: Any) -> Any:
        return batch.to(self.device)

    def _check_not_empty(self) -> None:
        if not self.size:
            raise EmptyBufferError("the buffer is empty; add experience before sampling")

    def _check_indices(self, indices: Indices) -> torch.Tensor:
        self._check_not_empty()
        array = as_indices(list(indices) if isinstance(indices, tuple) else indices)
        if array is None or array.ndim > 1:
            raise IndexOutOfRangeError(f"indices must be a list of integers, got {indices!r}")
        index = torch.from_numpy(wrap_indices(array.reshape(-1), self.size))
        # a compressed storage looks up its rows on the host
        return index if self.storage == "compressed" else index.to(self.storing_device)

    # ---- size ----

    def __len__(self) -> int:
        return len(self.memory)

    def __bool__(self) -> bool:
        # as without __len__: an empty buffer is still a buffer
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size:,} of {self.buffer_size:,} tuples, storage={self.storage!r})"

    @property
    def size(self) -> int:
        """The number of tuples stored."""
        return len(self)

    @property
    def data_size(self) -> int:
        """Alias of `size`."""
        return len(self)

    @property
    def pointer(self) -> int:
        """The index that the next tuple will be stored at."""
        return get_cursor(self.memory.writer)

    @property
    def metadata(self) -> dict[str, int]:
        """What `save` writes: ``buffer_size``, ``data_size`` and ``pointer``."""
        return {name: getattr(self, name) for name in _NUMBERS}

    # ---- epochs ----

    def create_epoch_iterator(
        self, batch_size: int, n_epochs: int = 1, *, shuffle: bool = True, drop_last: bool = False
    ) -> Iterator[TensorDict]:
        """Return an iterator over ``n_epochs`` epochs of batches of ``batch_size``, each in a new random order.

        `get_next_batch` takes its batches from the newest iterator.

        Args:
            batch_size: The number of tuples in a batch.
            n_epochs: How often every tuple is yielded.
            shuffle: Whether to draw a random order; False for storage order.
            drop_last: Whether to leave out the last batch of an epoch if it is smaller than ``batch_size``.
        """
        batch_size = check_count(batch_size, "batch_size")
        n_epochs = check_count(n_epochs, "n_epochs", 0)
        self._iterator = self._epochs(self.memory, batch_size, n_epochs, shuffle, drop_last)
        return self._iterator

    def _epochs(
        self, memory: Any, batch_size: int, n_epochs: int, shuffle: bool, drop_last: bool
    ) -> Iterator[TensorDict]:
        for _ in range(n_epochs):
            size = len(memory)
            order = torch.randperm(size) if shuffle else torch.arange(size)
            for first in range(0, size - batch_size + 1 if drop_last else size, batch_size):
                if memory is not self.memory:
                    raise EmptyBufferError("the buffer was reset or loaded during an epoch; create a new iterator")
                yield self.sample_by_index(order[first : first + batch_size])

    def get_next_batch(self, batch_size: int) -> TensorDict:
        """Return the next batch of the current epochs, or ``batch_size`` random tuples if there are no epochs left."""
        if self._iterator is not None:
            for batch in self._iterator:
                return batch
            self._iterator = None
        return self.sample_batch(batch_size)

    def calculate_num_batches(self, batch_size: int, *, drop_last: bool = False) -> int:
        """Return the number of batches of ``batch_size`` in one epoch; with ``drop_last``, of full ones."""
        batch_size = check_count(batch_size, "batch_size")
        return self.size // batch_size if drop_last else -(-self.size // batch_size)

    def get_steps_and_iterator(self, n_epochs: int, max_iter: int, batch_size: int, *, drop_last: bool = False) -> int:
        """Return the number of training steps, and set up the iterator for `get_next_batch`.

        With ``n_epochs`` above 0, there is a step for each batch of ``batch_size`` in all epochs; with ``n_epochs=0``
        there are ``max_iter`` steps on random batches. ``drop_last`` is that of `create_epoch_iterator`.
        """
        if check_count(n_epochs, "n_epochs", 0) == 0:
            self._iterator = None
            return check_count(max_iter, "max_iter", 0)
        self.create_epoch_iterator(batch_size, n_epochs, drop_last=drop_last)
        return n_epochs * self.calculate_num_batches(batch_size, drop_last=drop_last)

    # ---- files ----

    def to_parts(self) -> Parts:
        """Return what `save` with ``contents`` stores."""
        description: dict[str, Any] = {**self.metadata, "storage": self.storage, "n_envs": self.n_envs}
        if self.storage == "compressed":
            held = self.memory.storage.to_parts()
            return Parts(_KIND, {**description, "held": held.description}, held.columns, held.stores)
        fields = list(self.memory.storage.get(torch.arange(self.size)).items(True, True)) if self.size else []
        fields = [(key, value) for key, value in fields if key != INDEX_KEY]
        description["fields"] = [[key_to_json(key), dtype_name(value.dtype)] for key, value in fields]
        columns = {f"field-{number}": to_numpy(value) for number, (_, value) in enumerate(fields)}
        return Parts(_KIND, description, columns, {})

    def save(self, path: str | os.PathLike[str], contents: bool = False) -> None:
        """Write capacity, number of tuples and next index to the file ``path`` with the suffix ``.metadata``.

        With ``contents``, the experience goes to a folder next to it, in the format of `files.save`. The metadata file
        is replaced last: until then the previous save stays valid.
        """
        target = _metadata_path(path)
        metadata: dict[str, Any] = {"format": _FORMAT, "version": 2, **self.metadata, "contents": None}
        with disk.named_errors(target, f"saving to {target}"):
            disk.make_folder(target.parent)
            if contents and self.size:
                metadata["contents"] = f"{target.stem}.contents-{uuid.uuid4().hex[:12]}"
                files.save(self, target.with_name(metadata["contents"]))
            write_json(target, metadata)
            for old in target.parent.iterdir():
                if _is_contents(old.name, target) and old.name != metadata["contents"]:
                    remove_saved(old)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what `save` wrote to ``path``, and the experience if it was saved with ``contents``.

        Without ``contents`` only `loaded_metadata` and the capacity are set. The experience in this buffer is kept, and
        so is its capacity if the experience would not fit the one in the file.
        """
        target = _metadata_path(path)
        metadata = _read_metadata(target)
        numbers = {name: metadata[name] for name in _NUMBERS}
        if metadata["contents"] is None:
            if self.size <= numbers["buffer_size"] != self.buffer_size:
                self._resize(numbers["buffer_size"])
            self.loaded_metadata = numbers
            return
        loaded = files.load(target.with_name(metadata["contents"]), ReplayBuffer)
        if loaded.metadata != numbers:
            raise DamagedFileError(f"{target} says {numbers}, but the experience has {loaded.metadata}")
        if loaded.storage != self.storage:
            raise FileFormatError(
                f"{target} holds storage={loaded.storage!r}, but this buffer has storage={self.storage!r}; "
                "load it into a buffer with the same storage"
            )
        if self.storing_device != loaded.storing_device:
            loaded = loaded.stored_on(self.storing_device)
        self.__dict__.update(
            buffer_size=loaded.buffer_size, memory=loaded.memory, specs=loaded.specs, _iterator=None,
            loaded_metadata=numbers,
        )  # fmt: skip

    def _resize(self, buffer_size: int) -> None:
        """Change the capacity; all tuples are kept, the oldest first."""
        resized = ReplayBuffer(self.device, self.storing_device, buffer_size, storage=self.storage, n_envs=self.n_envs)
        oldest = self.pointer if self.size == self.buffer_size else 0
        for first in range(0, self.size, _CHUNK):
            numbers = torch.arange(first, min(first + _CHUNK, self.size))
            indices = self._check_indices((oldest + numbers) % self.size)
            resized.memory.extend(self.memory.storage.get(indices).exclude(INDEX_KEY))
        self.__dict__.update(buffer_size=buffer_size, memory=resized.memory, _iterator=None)

    def stored_on(self, device: torch.device) -> ReplayBuffer:
        """Return a copy with another ``storing_device``; a compressed buffer must not be used afterwards."""
        copy = ReplayBuffer(self.device, device, self.buffer_size, storage=self.storage, n_envs=self.n_envs)
        if self.storage == "compressed":
            copy.memory.storage.take_over(self.memory.storage)
        elif self.size:
            copy.memory.extend(self.sample_all().exclude(INDEX_KEY).to(device))
        copy.set_position(get_cursor(self.memory.writer))
        return copy

    def set_position(self, pointer: int) -> None:
        """Store the next tuple at ``pointer``; later tuples must match those that are stored."""
        set_cursor(self.memory.writer, pointer)
        if self.size:
            self.specs = _specs_behind(1, self.memory.storage.get(slice(None)))


def restore_buffer(parts: LoadedParts) -> ReplayBuffer:
    """Return the buffer in ``parts``, which are not trusted, on the host."""
    storage = parts.entry("storage", kind=str)
    n_envs = None if parts.entry("n_envs") is None else parts.number("n_envs", low=1)
    buffer_size = parts.number("buffer_size", low=1)
    size, pointer = parts.number("data_size", stop=buffer_size + 1), parts.number("pointer", stop=buffer_size)
    buffer: ReplayBuffer = (parts.target or ReplayBuffer)(CPU, CPU, buffer_size, storage=storage, n_envs=n_envs)
    if storage == "compressed":
        buffer.memory.storage.take_over(embedded_storage(parts))
    else:
        fields: dict[Key, torch.Tensor] = {}
        for number, entry in enumerate(parts.entry("fields", kind=list)):
            name = f"field-{number}"
            if not isinstance(entry, list) or len(entry) != 2 or name not in parts.columns:
                raise FileFormatError(f"expected a field as [key, dtype] and its column {name!r}, got {entry!r}")
            shape = (size, *parts.columns[name].shape[1:])
            fields[key_from_json(entry[0])] = tensor_column(parts, name, parse_tensor_dtype(entry[1]), shape)
        if size:
            buffer.memory.extend(TensorDict(fields, batch_size=[size]))
    if len(buffer) != size:
        raise FileFormatError(f"the file holds {len(buffer)} tuples, but says {size}")
    buffer.set_position(pointer)
    return buffer


def _as_tensordict(data: Any, n_batch: int) -> TensorDict:
    if not isinstance(data, TensorDictBase):
        if not isinstance(data, Mapping):
            raise SpecMismatchError(f"experience must be a TensorDict, got a {type(data).__name__}")
        try:
            data = TensorDict(dict(data)).auto_batch_size_(n_batch)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise SpecMismatchError(f"experience must be a TensorDict or a dict of tensors: {error}") from None
    if n_batch and not data.ndim:
        raise SpecMismatchError("a batch needs a first dimension; use add() for a single experience")
    if not n_batch and data.ndim:
        raise SpecMismatchError(f"a single experience has no batch dimension, got {tuple(data.shape)}; use add_batch()")
    others = non_tensor_keys(data)
    if others:
        raise SpecMismatchError(f"experience must be tensors, but {others} hold something else; nothing was added")
    # TorchRL adds an "index" to the data it is given
    return data.copy()


def _specs_behind(n_batch: int, data: TensorDict) -> dict[Key, Spec]:
    """Return the shape and dtype of each field, without ``n_batch`` leading axes."""
    return {key: (shape[n_batch:], dtype) for key, (shape, dtype) in specs_of(data).items() if key != INDEX_KEY}


def _as_device(name: str, device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name}={device!r} is not a device: {error}") from None


def _metadata_path(path: str | os.PathLike[str]) -> Path:
    return Path(os.fspath(path) + ".metadata")


def _is_contents(name: Any, target: Path) -> bool:
    """Whether ``name`` is a folder name that `save` uses next to ``target``."""
    prefix = f"{target.stem}.contents-"
    return isinstance(name, str) and name.startswith(prefix) and bool(re.fullmatch("[0-9a-f]{12}", name[len(prefix) :]))


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileFormatError(f"{path} does not exist; pass the path without '.metadata'")
    metadata = read_json(path)
    if metadata.get("format") != _FORMAT:
        raise FileFormatError(f"{path} is not the metadata of a ReplayBuffer")
    if not all(type(metadata.get(name)) is int for name in _NUMBERS) or "contents" not in metadata:
        raise DamagedFileError(f"{path} lacks one of {', '.join(_NUMBERS)}, contents")
    capacity, size, pointer = (metadata[name] for name in _NUMBERS)
    if not (0 < capacity < 1 << 48 and 0 <= size <= capacity and 0 <= pointer < capacity):
        raise FileFormatError(f"{path}: a buffer of {capacity} cannot hold {size} tuples and continue at {pointer}")
    if metadata["contents"] is not None and not _is_contents(metadata["contents"], path):
        raise FileFormatError(f"{path}: {metadata['contents']!r} cannot be its folder of experience")
    return metadata
