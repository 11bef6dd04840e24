"""`CompressedEmbodiedReplay`: the replay of DreamerV3's ``embodied`` package, with compressed images."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._embodied.chunks import ID_BYTES, NONE, Change, ChunkTable
from sb3_extra_buffers._embodied.steps import StepStore, parse_step
from sb3_extra_buffers._embodied.windows import WindowStore
from sb3_extra_buffers.arguments import as_array, cast, check_count
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import (
    ArgumentError,
    ExtraBuffersError,
    NotSaveableError,
    OutOfMemoryError,
    PriorityError,
    SpecMismatchError,
    StaleIndexError,
    UnknownFieldError,
)
from sb3_extra_buffers.replay_buffers.selectors import Selector, Uniform
from sb3_extra_buffers.stores.checks import require
from sb3_extra_buffers.stores.choice import MethodChoice
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.reentry import writes
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from sb3_extra_buffers.files.parts import LoadedParts, Parts

__all__ = ["CompressedEmbodiedReplay"]

Array = npt.NDArray[Any]
Batch = dict[str, Array]

_KIND, _BASELINE = "embodied", "embodied's Replay"
_ANY_IMAGE = ObsSpec((64, 64, 3), np.dtype(np.uint8))
_MODES = ("train", "report", "eval")
_logger = logging.getLogger("sb3_extra_buffers")


class CompressedEmbodiedReplay(WindowStore):
    """A replay for DreamerV3 with the interface of ``embodied.replay.Replay``: same arguments, methods and batches.

    An item is a window of ``length`` consecutive steps of one worker; windows may span episodes. Once there are
    ``capacity`` windows, each new one replaces the oldest. Images are compressed losslessly, all other keys are stored
    as arrays. Any number of threads may add, sample and update. After any exception, a step was added completely or not
    at all.

    Args:
        length: Steps of a window.
        capacity: Maximum number of windows; None for no limit.
        directory: The folder that `save` writes to, which must not contain other files.
        chunksize: Number of consecutive steps whose memory is freed together; less if ``capacity`` is small.
        online: Whether `sample` returns new steps once, in windows that do not overlap, before it draws at random.
        selector: Draws windows: one of `replay_buffers.selectors` or of ``embodied.selectors``; None for uniform.
        save_wait: Whether `save` waits until everything is on the disk. Otherwise, a save survives the end of the
            process but not a power cut.
        name: Name in messages.
        seed: Seed of the uniform selector.
        compressed_keys: Keys to compress; None for all uint8 arrays of at least two axes.
        compression_method: Method for these keys, see [Choosing a method](choosing.md).
        compression_kwargs: Options of the method.

    Examples:
        >>> import numpy as np
        >>> from sb3_extra_buffers.replay_buffers import CompressedEmbodiedReplay
        >>> replay = CompressedEmbodiedReplay(length=8, capacity=1000)
        >>> for step in range(100):
        ...     image = np.full((64, 64, 3), step, np.uint8)
        ...     replay.add({"image": image, "reward": np.float32(1), "is_first": step == 0}, worker=0)
        >>> len(replay)
        93
        >>> batch = replay.sample(16)
        >>> batch["image"].shape, batch["stepid"].shape
        ((16, 8, 64, 64, 3), (16, 8, 20))
    """

    def __init__(
        self,
        length: int,
        capacity: float | None = None,
        directory: str | os.PathLike[str] | None = None,
        chunksize: int = 1024,
        online: bool = False,
        selector: Selector | None = None,
        save_wait: bool = False,
        name: str = "unnamed",
        seed: int = 0,
        *,
        compressed_keys: Sequence[str] | None = None,
        compression_method: str = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(compressed_keys, str) or not isinstance(compressed_keys, (Iterable, type(None))):
            raise ArgumentError(f"compressed_keys must be a list of keys, got {compressed_keys!r}")
        options = dict(compression_kwargs or {})
        MethodChoice(_ANY_IMAGE, compression_method, options)  # raises if there is no such method
        # DreamerV3's configuration has 5e6, a float
        whole = isinstance(capacity, float) and capacity.is_integer()
        super().__init__(
            check_count(length, "length"),
            None if capacity is None else check_count(int(capacity) if whole else capacity, "capacity"),
            check_count(chunksize, "chunksize"),
            bool(online),
            compressed_keys,
            compression_method,
            options,
        )
        self.directory = _as_folder(directory)
        self.save_wait, self.name = bool(save_wait), str(name)
        self.sampler: Any = Uniform(seed) if selector is None else selector
        has_items = all(hasattr(self.sampler, name) for name in ("__setitem__", "__delitem__"))
        if not callable(self.sampler) or not has_items:
            raise ArgumentError(
                f"selector must have the methods of those in replay_buffers.selectors, got {selector!r}"
            )
        # windows that the selector has been told about: from the first to before the next
        self._first_known = self._next_known = 0
        self.metrics = {"samples": 0, "inserts": 0, "updates": 0}

    # ---- size ----

    def __bool__(self) -> bool:
        # as without __len__: an empty replay is still a replay
        return True

    def __reduce__(self) -> Any:
        raise NotSaveableError(
            f"a {type(self).__name__} cannot be copied or pickled; save() it, and load() it in another one"
        )

    def __repr__(self) -> str:
        limit = "" if self.capacity is None else f" of {self.capacity:,}"
        return f"{type(self).__name__}({len(self):,}{limit} windows of {self.length} steps)"

    def stats(self) -> dict[str, float]:
        """Return sizes, and the numbers of windows added and sampled and steps updated since the last call."""
        with self._lock:
            self._ensure_recovered()
            counts, self.metrics = self.metrics, dict.fromkeys(self.metrics, 0)
            in_use, held = len(self._table.by_serial), 0
            if self._steps is not None:
                held = self._steps.held_bytes + in_use * self._table.size * self._steps.step_bytes(columns_only=True)
            ratio = self.length * counts["samples"] / counts["inserts"] if counts["inserts"] else float("nan")
            return {
                "items": len(self), "chunks": in_use, "streams": len(self._streams), "ram_gb": held / 1024**3,
                "inserts": counts["inserts"], "samples": counts["samples"], "updates": counts["updates"],
                "replay_ratio": ratio,
            }  # fmt: skip

    def memory_usage(self) -> MemoryUsage:
        """Return the memory in use, compared with ``embodied``'s own replay for the same steps."""
        with self._lock:
            self._ensure_recovered()
            if self._steps is None:
                return MemoryUsage(baseline=_BASELINE)
            n_steps, table = self._table.count_steps(), self._table
            usage = self._steps.memory_usage(n_steps)
            index = n_steps * 16 + 40 * len(table)  # numbers of steps, windows and chunks
            return replace(usage, index=usage.index + index, baseline=_BASELINE)

    # ---- adding ----

    def add(self, step: Mapping[str, Any], worker: Hashable = 0) -> None:
        """Add the next step of a worker.

        Args:
            step: Arrays by key; the first step sets keys, shapes and dtypes. Keys that start with ``log/`` are ignored.
            worker: The worker that made the step: a number, a name or anything else that is hashable.
        """
        self._check_writable()
        parsed = parse_step(step)
        try:
            hash(worker)
        except TypeError:
            raise ArgumentError(f"worker must be hashable, such as a number or a name, got {worker!r}") from None
        self._add_step(parsed, worker)

    def _window_added(self) -> None:
        self.metrics["inserts"] += 1
        self._tell_selector()

    def _tell_selector(self) -> None:
        """Tell the selector which windows were added and removed."""
        while self._next_known < self._next_window:
            window, ids = self._next_known, None
            if getattr(self.sampler, "needs_step_ids", True):
                ids = self._table.step_ids(self._slots_of([window])[0], self.replay_id)
            self.sampler[window] = ids
            self._next_known += 1
        while self._first_known < self._first_window:
            del self.sampler[self._first_known]
            self._first_known += 1

    # ---- sampling ----

    def sample(self, batch: int, mode: str = "train") -> Batch:
        """Return ``batch`` windows: every key ``[batch, length, ...]``, and ``stepid`` for `update`.

        Waits until there is a window. ``is_first`` is set at the first step of each window and of each episode, and
        ``is_last`` at every step that is followed by an ``is_first``.

        Args:
            batch: Number of windows.
            mode: ``"train"``, ``"report"`` or ``"eval"``; the last two do not use the online queue.
        """
        return self._sample(batch, mode, self._annotate)

    def _sample(self, batch: int, mode: str, finish: Callable[[Batch], Batch]) -> Batch:
        batch = check_count(batch, "batch")
        if mode not in _MODES:
            raise ArgumentError(f"mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
        self._wait()
        online: list[int] = []
        try:
            return finish(self._read_windows(batch, mode, online))
        except BaseException as problem:
            with self._lock:
                # windows that were not returned come first next time; the queue is in order
                self._queue = deque(sorted({*self._queue, *online}))
            if isinstance(problem, MemoryError) and not isinstance(problem, ExtraBuffersError):
                raise OutOfMemoryError(f"not enough memory for {batch} windows: {problem}") from problem
            raise

    def _read_windows(self, batch: int, mode: str, online: list[int]) -> Batch:
        """Draw and read ``batch`` windows; ``online`` receives those that were taken from the online queue."""
        data: Batch = {}
        rows = np.arange(batch)
        while len(rows):
            with self._lock:
                self._ensure_recovered()
                windows = self._draw(len(rows), mode, online)
                slots, steps = self._slots_of(windows), self._steps
                ids = self._table.step_ids(slots, self.replay_id)
            assert steps is not None
            drawn = steps.read(slots) | {"stepid": ids}
            if not data:
                data = drawn
            else:
                for key, values in drawn.items():
                    data[key][rows] = values
            # with the lock: an eviction frees steps before it changes `_first_window`
            with self._lock:
                self._ensure_recovered()
                # windows that were evicted while they were read are drawn again
                rows = rows[np.asarray(windows) < self._first_window]
                if not len(rows) and mode == "train":
                    self.metrics["samples"] += batch
        return data

    def _wait(self) -> None:
        began = warned = time.monotonic()
        while not len(self):
            time.sleep(0.01)
            if time.monotonic() - warned > 60:
                warned = time.monotonic()
                _logger.warning("replay %s has been empty for %.0f s", self.name, warned - began)

    def _draw(self, count: int, mode: str, online: list[int]) -> list[int]:
        """Draw windows: from the online queue first, then by the selector."""
        drawn: list[int] = []
        while mode == "train" and self._queue and len(drawn) < count:
            # noted before it is removed: an interrupt between the two must not lose it
            window = self._queue[0]
            if window >= self._first_window:
                drawn.append(window)
                online.append(window)
            self._queue.popleft()
        self._tell_selector()
        count -= len(drawn)
        if count and hasattr(self.sampler, "draw"):
            drawn += self.sampler.draw(count)
        else:
            drawn += [int(self.sampler()) for _ in range(count)]
        if drawn and not (min(drawn) >= self._first_window and max(drawn) < self._next_window):
            raise StaleIndexError(f"{type(self.sampler).__name__} drew a window that is not in the replay: {drawn}")
        return drawn

    @staticmethod
    def _annotate(data: Batch, begins: bool = True) -> Batch:
        if "is_first" in data:
            if begins:
                data["is_first"][:, 0] = True
            if "is_last" in data:
                # abandoned episodes have no is_last of their own
                data["is_last"][:, :-1][data["is_first"][:, 1:] != 0] = True
        return data

    def dataset(
        self, batch: int, length: int | None = None, consec: int | None = None, prefix: int = 0, report: bool = False
    ) -> Iterator[Batch]:
        """Yield batches endlessly; each batch of windows is cut into ``consec`` consecutive parts.

        Args:
            batch: Number of windows.
            length: Steps of a part; by default the whole window after ``prefix``.
            consec: Number of parts; by default as many as fit. ``data["consec"]`` is the number of a part.
            prefix: Steps before each part that are returned with it, as context.
            report: Whether to draw batches without the online queue.
        """
        prefix = check_count(prefix, "prefix", 0)
        length = self.length - prefix if length is None else length
        length = check_count(length, "length")
        n_parts = (self.length - prefix) // length
        consec = n_parts if consec is None else check_count(consec, "consec")
        if not 1 <= consec <= n_parts:
            raise ArgumentError(
                f"{consec} parts of {length} steps after {prefix} do not fit into windows of {self.length} steps"
            )
        return self._parts(batch, length, consec, prefix, "report" if report else "train")

    def _parts(self, batch: int, length: int, consec: int, prefix: int, mode: str) -> Iterator[Batch]:
        while True:
            data = self._sample(batch, mode, lambda whole: whole)
            for number in range(consec):
                steps = slice(number * length, (number + 1) * length + prefix)
                part = self._annotate({key: values[:, steps].copy() for key, values in data.items()}, number == 0)
                part["consec"] = np.full(part["stepid"].shape[:2], number, np.int32)
                yield part

    # ---- writing back ----

    @writes
    def update(self, data: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
        """Replace values of stored steps, such as latent states after training.

        Args:
            data: ``stepid [batch, n, 20]`` as sampled, new values ``[batch, n, ...]`` of any keys that are not
                compressed, and optionally ``priority [batch, n]`` for the selector.

        Returns:
            Which steps were written, ``[batch, n]``; steps that have been evicted since are skipped.
        """
        self._check_writable()
        if not isinstance(data, Mapping) or "stepid" not in data:
            raise ArgumentError("update() takes a dict with 'stepid', as sample() returned it")
        ids = as_array(data["stepid"], "stepid")
        if ids.dtype != np.uint8 or ids.ndim != 3 or ids.shape[2] != ID_BYTES:
            raise SpecMismatchError(
                f"stepid must be uint8 of shape (batch, n, {ID_BYTES}), got {ids.dtype} {ids.shape}"
            )
        lead, flat = ids.shape[:2], ids.reshape(-1, ID_BYTES)
        priority = data.get("priority")
        if priority is not None:
            priority = cast(as_array(priority, "priority"), np.dtype(np.float64), "priority")
            if priority.shape != lead:
                raise SpecMismatchError(f"priority has shape {priority.shape}, expected {lead}")
            if not (priority >= 0).all():
                raise PriorityError("priorities must be at least 0, and not NaN")
            if not hasattr(self.sampler, "prioritize"):
                name = type(self.sampler).__name__
                raise ArgumentError(f"{name} does not use priorities; pass selector=Prioritized() to the constructor")
        values = {key: value for key, value in data.items() if key not in ("stepid", "priority")}
        with self._lock:
            self._ensure_recovered()
            checked = self._check_values(values, lead)
            slots = self._table.locate(flat, self.replay_id)
            held = slots != NONE
            change = Change(attributes={"_unfinished": None})
            for column, rows in checked:
                change.set(column, slots[held], rows[held])
            try:
                self._unfinished = change
                self._finish_step(change)
            except BaseException:
                self._recover()
                raise
            self.metrics["updates"] += len(flat)
            if priority is not None:
                self._tell_selector()
                self.sampler.prioritize(flat[held], priority.reshape(-1)[held])
        written: npt.NDArray[np.bool_] = held.reshape(lead)
        return written

    def _check_values(self, values: Mapping[str, Any], lead: tuple[int, ...]) -> list[tuple[Array, Array]]:
        """Return the column of each key and its new rows."""
        checked = []
        columns = {} if self._steps is None else self._steps.columns
        for key, value in values.items():
            if key not in columns:
                is_image = self._steps is not None and key in self._steps.stores
                raise UnknownFieldError(
                    f"{key!r} is compressed and cannot be updated; leave it out of compressed_keys"
                    if is_image
                    else f"steps have no key {key!r}, only {', '.join(columns)}"
                )
            column, array = columns[key], as_array(value, key)
            if array.shape != (*lead, *column.shape[1:]):
                raise SpecMismatchError(f"{key} has shape {array.shape}, expected {(*lead, *column.shape[1:])}")
            array = array if array.dtype == column.dtype else cast(array, column.dtype, key)
            checked.append((column, array.reshape(math.prod(lead), *column.shape[1:])))
        return checked

    # ---- files ----

    def save(self) -> None:
        """Save to ``directory``, writing only what is new since the last save; does nothing without a directory."""
        if self.directory is not None:
            from sb3_extra_buffers import files

            files.save(self, self.directory, sync=self.save_wait)

    def load(
        self, data: Any = None, directory: str | os.PathLike[str] | None = None, amount: int | None = None
    ) -> None:
        """Load what was saved in ``directory``; does nothing if nothing was saved there.

        A complete save whose manifest is missing is loaded too: the process was killed at the end of its first save, or
        the manifest was deleted, and the next `save` would delete the rest.

        Workers begin new streams: no window contains steps from both before and after the load. A replay that already
        has windows keeps them, and the loaded windows are added as the newest. Steps that were added or loaded before
        are not loaded again, so a folder that another process saves to can be loaded again and again; streams that one
        load has added to a replay with steps are continued by the next one.

        Args:
            data: Ignored; ``embodied``'s checkpoint passes it.
            directory: The folder; by default that of this replay.
            amount: Load only the newest windows, at most this many.
        """
        from sb3_extra_buffers import files
        from sb3_extra_buffers.files import manifest
        from sb3_extra_buffers.files.last_save import get_last_save, set_last_save
        from sb3_extra_buffers.files.saved_parts import SavedParts

        self._check_writable()
        folder = _as_folder(directory) or self.directory
        amount = None if amount is None else check_count(amount, "amount", 0)
        if folder is None:
            return
        if os.path.lexists(folder / manifest.NAME):
            loaded = files.load(folder, CompressedEmbodiedReplay)
        else:
            record = manifest.newest_copy(folder)
            if record is None:
                return
            loaded = SavedParts.of_folder(folder, record).load(CompressedEmbodiedReplay)
        with self._lock:
            self._ensure_recovered()
            if self._table.by_serial:
                loaded._evict(amount)
                self._copy(loaded)
                return
            self._take_over(loaded, amount)
            last = get_last_save(loaded)
            if last is not None:
                set_last_save(self, last)

    def _take_over(self, loaded: WindowStore, amount: int | None = None) -> None:
        super()._take_over(loaded, amount)
        self._first_known = self._next_known = self._first_window
        self._tell_selector()

    def to_parts(self) -> Parts:
        """Return what `save` stores."""
        from sb3_extra_buffers.files.parts import Parts

        with self._lock:
            self._ensure_recovered()
            chunks, columns = self._table.to_parts()
            description: dict[str, Any] = {
                "length": self.length, "capacity": self.capacity, "chunksize": self.chunksize, "online": self.online,
                "name": self.name, "replay_id": self.replay_id.hex(), "n_added": self._n_added, "chunks": chunks,
                "keys": None, "compression": [self.compression_method, self._saved_options()],
                "compressed_keys": None if self.compressed_keys is None else list(self.compressed_keys),
            }  # fmt: skip
            stores: dict[str, ObservationStore] = {}
            if self._steps is not None:
                description["keys"], arrays = self._steps.to_parts(self._table.n_saved * self._table.size)
                columns = columns | arrays
                numbers = {key: number for number, key in enumerate(self._steps.specs)}
                stores = {f"key-{numbers[key]}": store for key, store in self._steps.stores.items()}
            return Parts(_KIND, description, columns, stores)

    def _saved_options(self) -> Any:
        from sb3_extra_buffers.files.values import value_to_json

        return value_to_json(self.compression_kwargs, "compression_kwargs")


def restore_replay(parts: LoadedParts) -> CompressedEmbodiedReplay:
    """Return the replay in ``parts``, which are not trusted; all streams have ended."""
    from sb3_extra_buffers.files.values import value_from_json

    compression = parts.entry("compression", kind=list)
    require(len(compression) == 2 and isinstance(compression[0], str), f"invalid compression: {compression!r}")
    keys, options = parts.entry("compressed_keys"), value_from_json(compression[1])
    require(keys is None or (isinstance(keys, list) and all(isinstance(key, str) for key in keys)), "invalid keys")
    require(isinstance(options, dict), f"invalid options of a method: {options!r}")
    cls = parts.target or CompressedEmbodiedReplay
    replay: CompressedEmbodiedReplay = cls(
        parts.number("length", low=1),
        None if parts.entry("capacity") is None else parts.number("capacity", low=1),
        chunksize=parts.number("chunksize", low=1, stop=1 << 31),
        online=parts.entry("online", kind=bool),
        name=parts.entry("name", kind=str),
        compressed_keys=keys,
        compression_method=compression[0],
        compression_kwargs=options,
    )
    saved = CompressedEmbodiedReplay(replay.length)
    saved.read_only = parts.read_only
    saved.replay_id = bytes.fromhex(parts.entry("replay_id", kind=str))
    require(len(saved.replay_id) == 8, "the id of a replay has 8 bytes")
    saved._n_added = parts.number("n_added", stop=1 << 62)
    replay.replay_id, replay._n_added = saved.replay_id, saved._n_added
    size = parts.number("chunks", "size", low=1, stop=1 << 31)
    saved._table = ChunkTable.from_parts(parts, 0 if parts.read_only else replay._n_chunks(size))
    if parts.entry("keys") is not None:
        saved._steps = StepStore.from_parts(parts, parts.number("chunks", "n_chunks") * size, saved._table.n_slots)
    else:
        require(not saved._table.by_serial, "chunks without keys")
    replay._take_over(saved)
    replay.read_only = parts.read_only
    return replay


def _as_folder(directory: Any) -> Path | None:
    """Return a local folder; ``elements.Path`` is not an ``os.PathLike``."""
    if not directory:
        return None
    text = os.fspath(directory) if hasattr(directory, "__fspath__") else str(directory)
    if "://" in text:
        raise ArgumentError(f"directory must be a local folder, got {text!r}")
    return Path(text)
