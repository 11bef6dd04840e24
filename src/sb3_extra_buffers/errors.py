"""Every error this library raises on purpose, and the built-in each one also is."""

from __future__ import annotations

__all__ = [
    "AlgorithmMismatchError",
    "ArgumentError",
    "BudgetExceededError",
    "CodecLevelError",
    "CodecOptionError",
    "CorruptPayloadError",
    "DamagedFileError",
    "EmptyBufferError",
    "EnvironmentOptionError",
    "ExportError",
    "ExtraBuffersError",
    "FileFormatError",
    "FileWriteError",
    "FolderInUseError",
    "HeapFullError",
    "IndexOutOfRangeError",
    "LayoutError",
    "MissingExtraError",
    "MissingRomError",
    "NoEpisodeError",
    "NotSaveableError",
    "OutOfMemoryError",
    "PriorityError",
    "ReadOnlyBufferError",
    "SharingError",
    "SpecMismatchError",
    "StaleIndexError",
    "UnknownCodecError",
    "UnknownEnvironmentError",
    "UnknownFieldError",
    "UnsupportedVersionError",
    "UntrustedFileError",
]


class ExtraBuffersError(Exception):
    """Base class; catch this to catch everything raised here on purpose."""


class MissingExtraError(ExtraBuffersError, ImportError):
    """The codec is known but its optional dependency is not installed."""


class UnknownCodecError(ExtraBuffersError, ValueError):
    """No codec goes by this name."""


class CodecLevelError(ExtraBuffersError, ValueError):
    """The codec has no such compression level."""


class CodecOptionError(ExtraBuffersError, TypeError):
    """The codec has no such option."""


class SpecMismatchError(ExtraBuffersError, ValueError):
    """An observation has another shape or dtype than the space promised."""


class CorruptPayloadError(ExtraBuffersError, ValueError):
    """A payload is not what its codec wrote for a row of this size."""


class HeapFullError(ExtraBuffersError, MemoryError):
    """A payload does not fit in the heap."""

    def __init__(self, needed: int, live: int, limit: int) -> None:
        super().__init__(
            f"a payload of {needed} bytes does not fit: {live} of {limit} heap bytes are live; "
            f"pass heap_bytes>={live + needed} or a stronger compression_method"
        )
        self.needed, self.live, self.limit = needed, live, limit

    def __reduce__(self) -> tuple[type[HeapFullError], tuple[int, int, int]]:
        # the numbers are the arguments; the message is made from them again
        return type(self), (self.needed, self.live, self.limit)


class OutOfMemoryError(ExtraBuffersError, MemoryError):
    """The system has no memory for what was asked; nothing that was stored is changed."""


class AlgorithmMismatchError(ExtraBuffersError, ValueError):
    """The buffer is not set up as the algorithm that uses it expects."""


class ArgumentError(ExtraBuffersError, ValueError):
    """An argument has a value or a type that it cannot have."""


class BudgetExceededError(ExtraBuffersError, MemoryError):
    """The buffer holds more bytes than it may."""


class EmptyBufferError(ExtraBuffersError, ValueError):
    """There is nothing, or not yet enough, to read."""


class NoEpisodeError(EmptyBufferError, RuntimeError):
    """Goals are taken from finished episodes, and there is none."""


class UnsupportedVersionError(ExtraBuffersError, ValueError):
    """Something was saved by a newer version of this library."""


class LayoutError(ExtraBuffersError, TypeError):
    """A buffer class does not keep its observations as SB3's buffers do."""


class UnknownEnvironmentError(ExtraBuffersError, ValueError):
    """No environment goes by this name, or it is of another kind."""


class MissingRomError(ExtraBuffersError, FileNotFoundError):
    """The game is known but its ROM is not where ale-py looks for it."""


class EnvironmentOptionError(ExtraBuffersError, ValueError):
    """Environments cannot be made or used with this option."""


class FileFormatError(ExtraBuffersError, ValueError):
    """This is no saved buffer, or not one of the kind that was asked for."""


class DamagedFileError(ExtraBuffersError, ValueError):
    """A saved buffer was cut short or changed after it was written."""


class FileWriteError(ExtraBuffersError, OSError):
    """A buffer could not be saved; what was saved before is still there."""


class FolderInUseError(ExtraBuffersError, OSError):
    """Another process, or another buffer of this one, is writing to the folder."""


class NotSaveableError(ExtraBuffersError, TypeError):
    """A buffer holds something that has no place in a file without code."""


class ReadOnlyBufferError(ExtraBuffersError, TypeError):
    """A buffer that was opened to be read cannot be changed."""


class UntrustedFileError(ExtraBuffersError, PermissionError):
    """Reading this file could run code; that needs an explicit word."""


class IndexOutOfRangeError(ExtraBuffersError, IndexError):
    """Something was asked for that is not there."""


class UnknownFieldError(ExtraBuffersError, KeyError):
    """No field goes by this name."""

    def __str__(self) -> str:
        # a KeyError would print the representation of its message
        return str(self.args[0]) if self.args else ""


class SharingError(ExtraBuffersError, RuntimeError):
    """Another process cannot have this the way it was about to."""


class PriorityError(ExtraBuffersError, ValueError):
    """A TD error cannot become a priority."""


class StaleIndexError(ExtraBuffersError, IndexError):
    """An index names a transition that is not in the buffer, or not any more."""


class ExportError(ExtraBuffersError, ValueError):
    """A recording cannot be written in this form."""
