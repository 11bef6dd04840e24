"""`ReplayBuffer`: experience as TensorDicts, sampled at random, by index or epoch by epoch."""

from __future__ import annotations

import gc
import os
import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sb3_extra_buffers import files
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
    from tensordict import TensorDict, TensorDictBase, is_non_tensor
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
except ImportError as error:
    raise MissingExtraError(
        "ReplayBuffer needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

from sb3_extra_buffers._torchrl.checkpoint import make_storage, move
from sb3_extra_buffers._torchrl.memmaps import read_json, remove_saved, write_json
from sb3_extra_buffers._torchrl.schema import at_least, key_from_json, key_to_json, parse_dtype
from sb3_extra_buffers._torchrl.stored_tensor import bits_of, to_numpy, to_torch
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage

__all__ = ["ReplayBuffer", "restore_buffer"]

Indices = Sequence[int] | torch.Tensor | range
Key = Any
Specs = dict[Key, tuple[torch.Size, torch.dtype]]

_KIND = "experience"
_FORMAT = "sb3-extra-buffers/experience"
_NUMBERS = ("buffer_size", "data_size", "pointer")


class ReplayBuffer:
    """A fixed-size buffer of experience; the oldest makes room for the newest.

    What is sampled is moved to ``device``. On the CPU experience lies in memory-mapped files, on a GPU in its memory,
    and with ``storage="compressed"`` in a `CompressedStorage` there, images in about a hundredth of the memory.

    Args:
        device: Where sampled batches are put, usually to be trained on.
        storing_device: Where experience is kept.
        buffer_size: The most experience tuples it holds.
        print_gc_warning: Warn when the garbage collector is run, which `reset` does and which may take a while.
        storage: ``"auto"`` for TorchRL's storage that suits ``storing_device``, or ``"compressed"``.
        n_envs: For ``"compressed"``: how many environments take turns; found from the data if it is not given.

    Example:
        >>> cpu = torch.device("cpu")
        >>> buffer = ReplayBuffer(device=cpu, storing_device=cpu, buffer_size=100_000, storage="compressed")
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
            raise ArgumentError(f"n_envs={n_envs} is for storage='compressed'")
        self.device = _as_device("device", device)
        self.storing_device = _as_device("storing_device", storing_device)
        self.print_gc_warning = print_gc_warning
        self.storage = storage
        self.n_envs = n_envs
        self.loaded_metadata: dict[str, int] | None = None
        self._make(at_least("buffer_size", buffer_size, 1))

    def _make(self, buffer_size: int) -> None:
        self.buffer_size = buffer_size
        self.memory: Any = TensorDictReplayBuffer(storage=self._get_storage(buffer_size, self.storing_device))
        self._specs: Specs | None = None
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
        """Forget all experience; ``buffer_size`` is the new capacity, if it is to change."""
        size = self.buffer_size if buffer_size is None else at_least("buffer_size", buffer_size, 1)
        self._make(size)
        if self.print_gc_warning:
            warnings.warn("running the garbage collector to give back what the buffer held", stacklevel=2)
        gc.collect()

    # ---- adding ----

    def add(self, experience: TensorDict) -> None:
        """Add one experience tuple, without a batch dimension."""
        experience = _as_tensordict(experience, 0)
        self._store(self.memory.add, experience, self._checked_specs(experience, 0))

    def add_batch(self, batch: TensorDict) -> None:
        """Add the tuples of ``batch``, in the order of its first dimension."""
        batch = _as_tensordict(batch, 1)
        if not len(batch):
            return
        self._store(self.memory.extend, batch, self._checked_specs(batch, 1))

    def _store(self, write: Callable[[Any], Any], data: TensorDict, specs: Specs) -> None:
        self._specs = specs
        try:
            write(data)
        finally:
            if not self.size:
                # still nothing that others could differ from
                self._specs = None

    def _checked_specs(self, data: TensorDict, n_batch: int) -> Specs:
        """What ``data`` is made of, or an error unless what was added first is made of the same.

        TorchRL would cast, or mix shapes.
        """
        found = {
            key: (value.shape[n_batch:], value.dtype)
            for key, value in data.items(include_nested=True, leaves_only=True)
            if isinstance(value, torch.Tensor) and key != "index"
        }
        if self._specs is None or found == self._specs:
            return found
        for key in sorted(found.keys() | self._specs.keys(), key=str):
            expected, got = self._specs.get(key), found.get(key)
            if expected != got:
                raise SpecMismatchError(
                    f"field {key!r} is {_described(got)}, but in what was added first it is {_described(expected)}; "
                    "nothing was added"
                )
        return found

    # ---- sampling ----

    def sample_batch(self, batch_size: int) -> TensorDict:
        """``batch_size`` tuples drawn at random, with replacement."""
        self._need_some()
        return self._moved(self.memory.sample(at_least("batch_size", batch_size, 1)))

    def sample_random(self, batch_size: int) -> TensorDict:
        """`sample_batch` by its other name."""
        return self.sample_batch(batch_size)

    def sample_by_index(self, indices: Indices) -> TensorDict:
        """The tuples at ``indices``, counted from the first slot of the storage."""
        return self._moved(self.memory.storage.get(self._checked(indices)))

    def sample_by_index_fields(self, indices: Indices, fields: Sequence[Key]) -> Any:
        """Some fields of the tuples at ``indices``: a tensor for one field, a tuple of tensors for several."""
        if not isinstance(fields, (list, tuple)) or not fields:
            raise UnknownFieldError(f"fields must list at least one name, got {fields!r}")
        index, storage = self._checked(indices), self.memory.storage
        if isinstance(storage, CompressedStorage):
            found = storage.get_fields(index, list(fields))
        else:
            stored = storage.get(slice(None))
            known = list(stored.keys(True, True))
            unknown = [field for field in fields if field not in known]
            if unknown:
                raise UnknownFieldError(f"no field {unknown}; there are {sorted(map(str, known))}")
            found = [stored.get(field)[index] for field in fields]
        tensors = tuple(tensor.to(self.device) for tensor in found)
        return tensors[0] if len(tensors) == 1 else tensors

    def sample_all(self) -> TensorDict:
        """Everything that is stored, in the order of the slots."""
        self._need_some()
        return self._moved(self.memory.storage.get(torch.arange(self.size)))

    def _moved(self, batch: Any) -> Any:
        return batch.to(self.device)

    def _need_some(self) -> None:
        if not self.size:
            raise EmptyBufferError("the buffer is empty; add experience before sampling")

    def _checked(self, indices: Indices) -> torch.Tensor:
        self._need_some()
        # a compressed storage finds rows from the host, wherever they lie
        where = torch.device("cpu") if self.storage == "compressed" else self.storing_device
        try:
            index = torch.as_tensor(list(indices) if isinstance(indices, range) else indices).to(where)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise IndexOutOfRangeError(f"indices must be a list of integers: {error}") from None
        if not index.numel():
            index = index.long()
        if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool or index.ndim > 1:
            raise IndexOutOfRangeError(f"indices must be a list of integers, got {index.dtype} of {tuple(index.shape)}")
        index = index.reshape(-1).long()
        outside = index[(index < -self.size) | (index >= self.size)]
        if outside.numel():
            raise IndexOutOfRangeError(f"index {int(outside[0])} is out of range: {self.size} tuples are stored")
        return torch.where(index < 0, index + self.size, index)

    # ---- how much there is ----

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def size(self) -> int:
        """Tuples that are stored now."""
        return len(self)

    @property
    def metadata(self) -> dict[str, int]:
        """Capacity, tuples stored and the slot that the next one goes to."""
        cursor = int(self.memory.writer._cursor)
        return {"buffer_size": self.buffer_size, "data_size": self.size, "pointer": cursor}

    # ---- epochs ----

    def create_epoch_iterator(
        self, batch_size: int, n_epochs: int = 1, *, shuffle: bool = True
    ) -> Iterator[TensorDict]:
        """Batches that go through the buffer ``n_epochs`` times, each time in a new order.

        Only full batches are yielded, `calculate_num_batches` of them an epoch; with ``shuffle=False`` in the order
        of the slots. `get_next_batch` takes from the newest iterator.
        """
        batch_size = at_least("batch_size", batch_size, 1)
        n_epochs = at_least("n_epochs", n_epochs, 0)
        self._iterator = self._epochs(self.memory, batch_size, n_epochs, shuffle)
        return self._iterator

    def _epochs(self, memory: Any, batch_size: int, n_epochs: int, shuffle: bool) -> Iterator[TensorDict]:
        for _ in range(n_epochs):
            size = len(memory)
            order = torch.randperm(size) if shuffle else torch.arange(size)
            for first in range(0, size - batch_size + 1, batch_size):
                if memory is not self.memory:
                    raise EmptyBufferError("the buffer was reset during an epoch; create a new iterator")
                yield self.sample_by_index(order[first : first + batch_size])

    def get_next_batch(self, batch_size: int) -> TensorDict:
        """The next batch of the current epochs; ``batch_size`` tuples at random where there are none, or no more."""
        if self._iterator is not None:
            for batch in self._iterator:
                return batch
            self._iterator = None
        return self.sample_batch(batch_size)

    def calculate_num_batches(self, batch_size: int) -> int:
        """Full batches of ``batch_size`` that the stored tuples make."""
        return self.size // at_least("batch_size", batch_size, 1)

    def get_steps_and_iterator(self, n_epochs: int, max_iter: int, batch_size: int) -> int:
        """Training steps to take, and the iterator that `get_next_batch` takes them from.

        With ``n_epochs=0`` there are ``max_iter`` steps, on batches drawn at random.
        """
        if at_least("n_epochs", n_epochs, 0) == 0:
            self._iterator = None
            return at_least("max_iter", max_iter, 0)
        self.create_epoch_iterator(batch_size, n_epochs)
        return n_epochs * self.calculate_num_batches(batch_size)

    # ---- files ----

    def to_parts(self) -> Parts:
        """What `save` with ``contents`` writes."""
        description: dict[str, Any] = {**self.metadata, "storage": self.storage, "n_envs": self.n_envs}
        if self.storage == "compressed":
            held = self.memory.storage.to_parts()
            return Parts(_KIND, {**description, "held": held.description}, held.columns, held.stores)
        fields = list(self.memory.storage.get(torch.arange(self.size)).items(True, True)) if self.size else []
        fields = [(key, value) for key, value in fields if key != "index"]
        description["fields"] = [[key_to_json(key), str(value.dtype).removeprefix("torch.")] for key, value in fields]
        columns = {f"field-{place}": to_numpy(value) for place, (_, value) in enumerate(fields)}
        return Parts(_KIND, description, columns, {})

    def save(self, path: str | os.PathLike[str], contents: bool = False) -> None:
        """Write ``PATH.metadata``: capacity, tuples stored, next slot. With ``contents`` the experience as well.

        The experience goes to a folder beside it, as `files.save` writes it. The metadata is replaced last, so that
        what was saved before stays until the new is complete.
        """
        target = _metadata_path(path)
        note: dict[str, Any] = {"format": _FORMAT, "version": 2, **self.metadata, "contents": None}
        with disk.named_errors(target, f"saving to {target}"):
            disk.make_folder(target.parent)
            if contents and self.size:
                note["contents"] = f"{target.stem}.contents-{uuid.uuid4().hex[:12]}"
                files.save(self, target.with_name(note["contents"]))
            write_json(target, note)
            for old in target.parent.iterdir():
                if _is_contents(old.name, target) and old.name != note["contents"]:
                    remove_saved(old)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read ``PATH.metadata``, and the experience if it was saved with ``contents``.

        Without that only the metadata is recovered: `loaded_metadata` and the capacity. Experience that is here stays,
        unless the capacity changes.
        """
        target = _metadata_path(path)
        note = _read_metadata(target)
        numbers = {name: note[name] for name in _NUMBERS}
        if note["contents"] is None:
            if numbers["buffer_size"] != self.buffer_size:
                self.reset(numbers["buffer_size"])
            self.loaded_metadata = numbers
            return
        loaded = files.load(target.with_name(note["contents"]), ReplayBuffer)
        if loaded.metadata != numbers:
            raise DamagedFileError(f"{target} speaks of {numbers}, but {loaded.metadata} was saved")
        if loaded.storage != self.storage:
            raise FileFormatError(
                f"{target} holds storage={loaded.storage!r}, but this buffer has storage={self.storage!r}; make one of "
                "the same kind"
            )
        if self.storing_device != loaded.storing_device:
            loaded = loaded._moved_to(self.storing_device)
        self.__dict__.update(
            buffer_size=loaded.buffer_size, memory=loaded.memory, _specs=loaded._specs, _iterator=None,
            loaded_metadata=numbers,
        )  # fmt: skip

    def _moved_to(self, device: torch.device) -> ReplayBuffer:
        """The same, stored on another device."""
        other = ReplayBuffer(self.device, device, self.buffer_size, storage=self.storage, n_envs=self.n_envs)
        if self.storage == "compressed":
            move(self.memory.storage, other.memory.storage)
        elif self.size:
            other.memory.extend(self.sample_all().exclude("index").to(device))
        other.memory.writer._cursor = self.memory.writer._cursor
        other._specs = self._specs
        return other


def restore_buffer(parts: LoadedParts) -> ReplayBuffer:
    """The buffer that ``parts`` were taken from, on the host."""
    cpu, kind = torch.device("cpu"), parts.entry("storage", kind=str)
    n_envs = None if parts.entry("n_envs") is None else parts.number("n_envs", low=1)
    buffer_size = parts.number("buffer_size", low=1)
    size, pointer = parts.number("data_size", stop=buffer_size + 1), parts.number("pointer", stop=buffer_size)
    buffer = (parts.target or ReplayBuffer)(cpu, cpu, buffer_size, storage=kind, n_envs=n_envs)
    if kind == "compressed":
        held = parts.entry("held", kind=dict)
        move(make_storage(LoadedParts("torchrl-storage", held, parts.columns, parts.stores)), buffer.memory.storage)
    else:
        fields: dict[Key, torch.Tensor] = {}
        for place, about in enumerate(parts.entry("fields", kind=list)):
            if not isinstance(about, list) or len(about) != 2 or f"field-{place}" not in parts.columns:
                raise FileFormatError(f"{about!r} is no field of experience")
            dtype, column = parse_dtype(about[1]), parts.columns[f"field-{place}"]
            bits = torch.empty(0, dtype=bits_of(dtype)).numpy().dtype
            fields[key_from_json(about[0])] = to_torch(
                np.array(parts.column(f"field-{place}", bits, (size, *column.shape[1:]))), dtype, cpu
            )
        if size:
            buffer.memory.extend(TensorDict(fields, batch_size=[size]))
    if len(buffer) != size:
        raise FileFormatError(f"{len(buffer)} tuples are there where {size} were saved")
    if size:
        buffer._specs = {
            key: (value.shape[1:], value.dtype)
            for key, value in buffer.memory.storage.get(slice(None)).items(include_nested=True, leaves_only=True)
            if key != "index"
        }
    buffer.memory.writer._cursor = pointer
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
    others = [key for key, value in data.items(include_nested=True) if is_non_tensor(value)]
    if others:
        raise SpecMismatchError(f"experience is made of tensors, but {others} hold something else; nothing was added")
    # TorchRL writes the slots into what it is given
    return data.copy()


def _as_device(name: str, device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name}={device!r} is no device: {error}") from None


def _described(spec: tuple[torch.Size, torch.dtype] | None) -> str:
    return "missing" if spec is None else f"{tuple(spec[0])} of {spec[1]}"


def _metadata_path(path: str | os.PathLike[str]) -> Path:
    return Path(os.fspath(path) + ".metadata")


def _is_contents(name: Any, target: Path) -> bool:
    """Whether ``name`` is one that `save` gives to a folder beside ``target``."""
    begin = f"{target.stem}.contents-"
    return isinstance(name, str) and name.startswith(begin) and bool(re.fullmatch("[0-9a-f]{12}", name[len(begin) :]))


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileFormatError(f"there is no {path}; give the path without '.metadata'")
    note = read_json(path)
    if note.get("format") != _FORMAT:
        raise FileFormatError(f"{path} is no metadata of a ReplayBuffer")
    if not all(type(note.get(name)) is int for name in _NUMBERS) or "contents" not in note:
        raise DamagedFileError(f"{path} lacks one of {', '.join(_NUMBERS)}")
    size, held, pointer = (note[name] for name in _NUMBERS)
    if not (0 < size < 1 << 48 and 0 <= held <= size and 0 <= pointer < size):
        raise FileFormatError(f"{path} speaks of {held} of {size} tuples and slot {pointer}")
    if note["contents"] is not None and not _is_contents(note["contents"], path):
        raise FileFormatError(f"{path}: {note['contents']!r} is no folder of experience")
    return note
