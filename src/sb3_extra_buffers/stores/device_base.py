"""The interface of every store on a torch device: where it is, what it stores, and how a step is written."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from sb3_extra_buffers.kernels.launcher import TableLayout
    from sb3_extra_buffers.stores.observation import ObservationStore

__all__ = [
    "AttributeWrite",
    "Batch",
    "DevicePlace",
    "DeviceRing",
    "DeviceStore",
    "IndexBatch",
    "PlannedWrite",
    "finish_writes",
    "has_triton",
    "is_on",
    "newest_frames",
    "on_host",
    "put_in",
    "runs_kernels",
    "stays_on_host",
    "usable_device",
    "wait_before_freeing",
]

Array = npt.NDArray[Any]
#: Observations of all streams ``[n_streams, *shape]``: on the host, or on the store's device.
Batch = npt.NDArray[Any] | torch.Tensor


def has_triton() -> bool:
    """Return whether Triton 3 or newer is installed; torch before 2.5 comes with Triton 2, which lacks operations."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        return int(importlib.metadata.version("triton").partition(".")[0]) >= 3
    except importlib.metadata.PackageNotFoundError:
        return True  # builds under another distribution name are newer


def runs_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels can run on ``device``."""
    return device.type == "cuda" and has_triton()


def stays_on_host(device: torch.device) -> bool:
    """Return whether encoded observations for ``device`` are better kept by the host's stores."""
    return device.type != "cuda"


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is on ``device``; a device without a number is any of its type."""
    return _is_same(tensor.device, device)


@cache
def _is_same(device: torch.device, other: torch.device) -> bool:
    indices = device.index, other.index
    return device.type == other.type and (None in indices or indices[0] == indices[1])


def wait_before_freeing(owner: object, device: torch.device) -> None:
    """Let the device finish before ``owner``, whose pinned memory its kernels use, is freed."""
    if device.type == "cuda":
        # torch waits for copies from and to pinned memory, but not for kernels that use it
        weakref.finalize(owner, _wait_for, device).atexit = False


def _wait_for(device: torch.device) -> None:
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


def usable_device(device: str | torch.device) -> torch.device:
    """``device``, or the CPU in place of a GPU that this machine does not have."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device


@dataclass(frozen=True)
class DevicePlace:
    """Where observations are kept: on ``device``, or in pinned host memory that it reads.

    A place that was pickled on a machine with a GPU is main memory where there is none.
    """

    device: torch.device
    pinned: bool = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New, uninitialised memory at this place."""
        if self.pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_place, (str(self.device), self.pinned)


def _restore_place(device: str, pinned: bool) -> DevicePlace:
    usable = usable_device(device)
    return DevicePlace(usable, pinned and usable.type == "cuda")


@dataclass(frozen=True)
class DeviceRing:
    """A ring of ``n_steps`` steps, each with an observation per stream and set (``obs``, ``next_obs``).

    The observation of ``stream`` at ``step`` in ``set`` has the index ``(set * n_steps + step) * n_streams + stream``.
    Steps are written in order; the oldest is overwritten.
    """

    spec: ObsSpec
    n_steps: int
    n_streams: int
    n_sets: int
    place: DevicePlace
    #: the most that encoded observations may take
    heap_bytes: int | None = None

    @property
    def n_obs(self) -> int:
        """Observations of one set."""
        return self.n_steps * self.n_streams


class IndexBatch:
    """Indices to read, int64 ``[set, n]``: an array on the host, a tensor on a device, or both.

    The one that is missing is made when a store asks for it.
    """

    __slots__ = ("_host", "_uploaded", "shape")

    def __init__(self, host: npt.NDArray[np.int64] | None, uploaded: torch.Tensor | None = None) -> None:
        self._host, self._uploaded = host, uploaded
        if host is not None:
            self.shape: tuple[int, ...] = host.shape
        elif uploaded is not None:
            self.shape = tuple(uploaded.shape)
        else:
            raise ValueError("indices are an array, a tensor or both, got neither")

    def as_one_set(self) -> IndexBatch:
        """The same indices as ``[1, n]``."""
        host = None if self._host is None else self._host.reshape(1, -1)
        return IndexBatch(host, None if self._uploaded is None else self._uploaded.reshape(1, -1))

    @property
    def host(self) -> npt.NDArray[np.int64]:
        """The indices on the host; waits for the device if only a tensor was given."""
        if self._host is None:
            assert self._uploaded is not None
            self._host = self._uploaded.cpu().numpy()
        return self._host

    def on(self, device: torch.device) -> torch.Tensor:
        """The indices as a tensor on ``device``."""
        if self._uploaded is None:
            self._uploaded = torch.from_numpy(self._host).to(device)
        elif self._uploaded.device.type != device.type:
            self._uploaded = self._uploaded.to(device)
        return self._uploaded


def on_host(batch: Batch) -> Array:
    """``batch`` as an array; waits for the device if it is there."""
    if isinstance(batch, torch.Tensor):
        array: Array = batch.cpu().numpy()
        return array
    return batch


def put_in(out: torch.Tensor | None, observations: torch.Tensor) -> torch.Tensor:
    """``observations``, copied to ``out`` if it is given."""
    return observations if out is None else out.copy_(observations)


def newest_frames(observations: torch.Tensor, layout: StackLayout) -> torch.Tensor:
    """The newest frame of each observation, ``[set, n, *layout.frame_spec.shape]``, of ``[set, n, *shape]``."""
    lead, spec = observations.shape[:2], layout.frame_spec
    if layout.axis == "first":
        n_newest = layout.spec.shape[0] // layout.stack
        return observations[:, :, -n_newest:].reshape(*lead, *spec.shape)
    n_newest = layout.spec.shape[-1] // layout.stack
    return observations[..., -n_newest:].reshape(*lead, *spec.shape)


class PlannedWrite:
    """A step that is checked, staged and sure to fit; nothing that can be read has changed yet.

    A write with ``may_fail`` can still raise in `commit`, and be cancelled. It is committed before all others.
    """

    __slots__ = ()
    may_fail = False

    def take_columns(self, columns: Any) -> bool:
        """Write ``columns`` of the step (`StagedColumns`) in the same launch; return whether `commit` will do so."""
        return False

    def commit(self) -> None:
        """Write the step."""
        raise NotImplementedError

    def finish(self) -> None:
        """Complete a `commit` that was interrupted anywhere, or did not begin."""
        self.commit()


class CancellableWrite(PlannedWrite):
    """A write that can be undone; `written` says whether it was committed."""

    __slots__ = ("written",)
    may_fail = True
    written: bool

    def finish(self) -> None:
        """Nothing is left to do once it is written."""

    def cancel(self) -> None:
        """Restore the state before the write, whether it was committed or not."""
        raise NotImplementedError


class AttributeWrite(PlannedWrite):
    """A write that is one assignment: new values for attributes of ``owner``."""

    __slots__ = ("after", "owner")

    def __init__(self, owner: Any, after: dict[str, Any]) -> None:
        self.owner, self.after = owner, after

    def commit(self) -> None:
        # one call, which no signal can interrupt
        self.owner.__dict__.update(self.after)


def finish_writes(plans: Sequence[PlannedWrite]) -> bool:
    """Recover from an exception while ``plans`` were committed: complete all, or cancel all; return whether all are.

    May be interrupted and run again.
    """
    cancellable = [plan for plan in plans if isinstance(plan, CancellableWrite)]
    if not all(write.written for write in cancellable):
        for write in cancellable:
            write.cancel()
        return False
    for plan in plans:
        plan.finish()
    return True


class DeviceStore(ABC):
    """Observations of a `DeviceRing`, read as tensors on its device.

    Reading and writing never wait for the device unless they must. A write is planned, then committed: `plan` does
    everything that can fail, and `PlannedWrite.commit` makes the step visible. After an exception in between,
    `finish_writes` either completes the step or restores the state before it.
    """

    #: How observations are cut into frames; None if they are kept whole.
    layout: StackLayout | None = None

    #: The method that the store has chosen itself, if it does that.
    choice: Choice | None = None
    #: Where observations are encoded and decoded, for the memory report, if not on the device.
    location = ""

    @abstractmethod
    def __init__(
        self, ring: DeviceRing, layout: StackLayout, codec: Codec, method: str, options: Mapping[str, Any]
    ) -> None:
        """Create an empty store.

        Args:
            ring: How many observations, and where.
            layout: How an observation is cut into frames.
            codec: Encodes frames; bound to ``layout.frame_spec``.
            method: The string that names ``codec``.
            options: The options of ``codec``.
        """

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        """Whether such a store can hold frames of ``layout`` encoded by ``codec``."""
        return True

    def use_columns(self, table: TableLayout | None) -> None:  # noqa: B027  # most stores write observations only
        """Be ready to write the columns of ``table``, which is on the device, with every step."""

    def train(self, rows: ByteRows) -> None:  # noqa: B027  # most stores have nothing to learn
        """Learn from the first observations, before any is written."""

    @abstractmethod
    def plan(self, step: int, batches: Sequence[Batch]) -> PlannedWrite:
        """Prepare to write ``step``, one checked batch of ``n_streams`` observations per set; or raise.

        Batches are all arrays, or all contiguous tensors on the device. The device has read tensors, in the order of
        its stream, once the write is committed: the caller may then overwrite them.
        """

    def write(self, step: int, batches: Sequence[Batch]) -> None:
        """Plan and commit a step: afterwards all of it is stored or, if this raises, nothing."""
        plan = self.plan(step, batches)
        try:
            plan.commit()
        except BaseException:
            finish_writes([plan])
            raise

    @abstractmethod
    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """Observations ``[set, n, *shape]`` on the device: in ``out``, which is contiguous, or in new memory."""

    def read_windows(
        self, indices: IndexBatch, newest_only: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Observations ``[batch, length, *shape]`` on the device: in ``out``, which is contiguous, or in new memory.

        Each row of ``indices [batch, length]`` is a window, consecutive observations of one stream. ``newest_only``
        returns the newest frame of each stack, ``[batch, length, *layout.frame_spec.shape]``; a store without stacks
        ignores it.
        """
        flat, layout = indices.as_one_set(), self.layout
        if newest_only and layout is not None and layout.stack > 1:
            return put_in(out, newest_frames(self.read(flat), layout).reshape(*indices.shape, *layout.frame_spec.shape))
        if out is not None:
            self.read(flat, out.view(1, -1, *out.shape[2:]))
            return out
        observations = self.read(flat)
        return observations.view(*indices.shape, *observations.shape[2:])

    @abstractmethod
    def clear(self) -> None:
        """Make every index unwritten. May be interrupted and run again."""

    def compact(self) -> None:  # noqa: B027  # most stores have nothing to pack
        """Pack the heap, where there is one."""

    @abstractmethod
    def memory_usage(self) -> MemoryUsage:
        """Bytes in use, by purpose; all else is left to the caller."""

    @abstractmethod
    def check(self) -> None:
        """Raise `AssertionError` if the tables contradict each other."""

    @abstractmethod
    def frozen(self) -> DeviceStore:
        """A copy in host memory, to be pickled, that later writes do not change."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph may contain `read` with indices on the device, and stays right while writes follow."""
        return False

    @property
    def can_read_batch(self) -> bool:
        """Whether the store decodes observations and copies columns in one launch (`DeviceFrameStore.read_batch`)."""
        return False

    def to_host(self) -> ObservationStore | list[Array] | None:
        """The observations as a host store, or an array ``[step, stream, ...]`` per set; None if it has neither."""
        return None

    def adopt(self, store: ObservationStore) -> bool:
        """Use ``store`` from now on, if this store is a wrapper of one like it; return whether it does."""
        return False
