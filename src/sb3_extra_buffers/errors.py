"""Every error this library raises on purpose. Each is also a built-in error, so existing handlers catch it."""

from __future__ import annotations


class ExtraBuffersError(Exception):
    """Base class of all errors that this library raises on purpose."""


class MissingExtraError(ExtraBuffersError, ImportError):
    """An optional dependency is not installed."""

    @staticmethod
    def hint(extra: str) -> str:
        """How to install `extra`: from the clone, because the package of this name on PyPI is a different one."""
        return f"in your clone of sb3-extra-buffers, run pip install '.[{extra}]'"


class UnknownCodecError(ExtraBuffersError, ValueError):
    """There is no codec with this name."""


class CodecLevelError(ExtraBuffersError, ValueError):
    """The codec has no such compression level."""


class CodecOptionError(ExtraBuffersError, TypeError):
    """The codec has no such option."""


class SpecMismatchError(ExtraBuffersError, ValueError):
    """A value does not have the shape or dtype of its space."""


class CorruptPayloadError(ExtraBuffersError, ValueError):
    """A payload cannot be decoded: it is damaged, or was written for rows of another size."""


class HeapFullError(ExtraBuffersError, MemoryError):
    """A payload does not fit in the heap."""

    def __init__(self, needed: int, live: int, limit: int) -> None:
        super().__init__(
            f"a payload of {needed} bytes does not fit: {live} of {limit} heap bytes are in use; "
            f"pass heap_bytes>={live + needed} or a stronger compression_method"
        )
        self.needed, self.live, self.limit = needed, live, limit

    def __reduce__(self) -> tuple[type[HeapFullError], tuple[int, int, int]]:
        # pickle the arguments: by default it would pass the message to __init__
        return type(self), (self.needed, self.live, self.limit)


class OutOfMemoryError(ExtraBuffersError, MemoryError):
    """The system is out of memory; what was stored is unchanged."""


class AlgorithmMismatchError(ExtraBuffersError, ValueError):
    """A buffer is not configured as the algorithm that uses it expects."""


class ArgumentError(ExtraBuffersError, ValueError):
    """An argument has an invalid value or type."""


class ObservationSpaceError(ArgumentError, AssertionError):
    """A buffer is for another kind of observation space. SB3 raises `AssertionError` here."""


class BudgetExceededError(ExtraBuffersError, MemoryError):
    """A buffer would exceed its memory limit, ``max_bytes``."""


class EmptyBufferError(ExtraBuffersError, ValueError):
    """The buffer is empty, or does not hold enough data to sample from."""


class NoEpisodeError(EmptyBufferError, RuntimeError):
    """HER samples goals from finished episodes, and there are none yet."""


class UnsupportedVersionError(ExtraBuffersError, ValueError):
    """A file or record was written by a newer version of this library."""


class LayoutError(ExtraBuffersError, TypeError):
    """A buffer class does not lay out its observations like SB3's buffers."""


class UnknownEnvironmentError(ExtraBuffersError, ValueError):
    """There is no environment with this name, or it is of the wrong kind."""


class MissingRomError(ExtraBuffersError, FileNotFoundError):
    """ale-py knows the game but cannot find its ROM."""


class EnvironmentOptionError(ExtraBuffersError, ValueError):
    """An environment cannot be created or used with this option."""


class FileFormatError(ExtraBuffersError, ValueError):
    """Not a saved buffer, or not of the requested kind."""


class DamagedFileError(ExtraBuffersError, ValueError):
    """A saved buffer was truncated or changed after it was written."""


class FileWriteError(ExtraBuffersError, OSError):
    """A buffer could not be saved; the previous save is intact."""


class FolderInUseError(ExtraBuffersError, OSError):
    """The folder is open for writing in another process, or by another buffer of this one."""


class NotSaveableError(ExtraBuffersError, TypeError):
    """A buffer holds an object that cannot be saved without pickling code."""


class ReadOnlyBufferError(ExtraBuffersError, TypeError):
    """A buffer that was opened read-only cannot be changed."""


class UntrustedFileError(ExtraBuffersError, PermissionError):
    """Loading this file could run code, which must be allowed explicitly."""


class IndexOutOfRangeError(ExtraBuffersError, IndexError):
    """An index is out of range."""


class UnknownFieldError(ExtraBuffersError, KeyError):
    """There is no field with this name."""

    def __str__(self) -> str:
        # KeyError would print the repr of its message
        return str(self.args[0]) if self.args else ""


class SharingError(ExtraBuffersError, RuntimeError):
    """An object cannot be shared with another process in this way."""


class OwnerEndedError(SharingError, EOFError):
    """The process that shared a buffer has ended, or has stopped sharing it."""


class InterruptedChangeError(SharingError, EOFError):
    """A change of a shared buffer was interrupted, so the buffer cannot be read."""


class ReentrantCallError(ExtraBuffersError, RuntimeError):
    """A signal handler or a callback used an object in the middle of a call that changes it or reads it."""


class PriorityError(ExtraBuffersError, ValueError):
    """A TD error is not a valid priority."""


class StaleIndexError(ExtraBuffersError, IndexError):
    """An index refers to a transition that is not, or no longer, in the buffer."""


class ExportError(ExtraBuffersError, ValueError):
    """A recording cannot be exported in this format."""


class GraphCaptureError(ExtraBuffersError, RuntimeError):
    """An operation cannot be part of a CUDA graph."""


class RateLimitError(ExtraBuffersError, TimeoutError):
    """A collector or learner waited too long for the other side of a rate limiter."""


class ServiceLostError(ExtraBuffersError, ConnectionError):
    """The process that holds a served buffer has ended or cannot be reached."""
