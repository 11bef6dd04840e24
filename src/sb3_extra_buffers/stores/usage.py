"""The report of `memory_usage()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes in use, by purpose; ``total`` agrees with the growth of the resident set.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> usage = CompressedArray((1000, 4), (4, 84, 84)).memory_usage()
        >>> usage.total == usage.payload + usage.index + usage.keyframes + usage.other
        True
    """

    payload: int = 0
    """Encoded observations, and those that are not encoded yet."""
    index: int = 0
    """Tables that say where each observation is."""
    keyframes: int = 0
    """Whole frames that differences refer to, and recent frames, to find repeats."""
    other: int = 0
    """Everything else, such as actions and rewards."""
    dense: int = 0
    """The size of the same observations as a plain array."""
    codecs: Mapping[str, str] = field(default_factory=dict)
    """The method in use for each key, and why where it was chosen automatically."""

    @property
    def total(self) -> int:
        return self.payload + self.index + self.keyframes + self.other

    @property
    def ratio(self) -> float:
        """``total`` as a fraction of ``dense``."""
        return self.total / self.dense if self.dense else 0.0

    def __add__(self, other: MemoryUsage) -> MemoryUsage:
        return MemoryUsage(
            self.payload + other.payload,
            self.index + other.index,
            self.keyframes + other.keyframes,
            self.other + other.other,
            self.dense + other.dense,
            {**self.codecs, **other.codecs},
        )

    def as_dict(self) -> dict[str, Any]:
        """All figures as JSON-ready values."""
        return {**asdict(self), "codecs": dict(self.codecs), "total": self.total, "ratio": self.ratio}

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {format_bytes(getattr(self, name))}" for name in ("payload", "index", "keyframes", "other")
        )
        methods = "; ".join(f"{key}: {method}" if key else method for key, method in self.codecs.items())
        return f"{format_bytes(self.total)} ({self.ratio:.2%} of {format_bytes(self.dense)} dense): {parts} [{methods}]"


def format_bytes(count: float) -> str:
    """Format ``1234567`` as ``"1.23 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
