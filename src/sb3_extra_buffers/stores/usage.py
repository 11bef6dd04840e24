"""The report of `memory_usage()`."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["NUMPY", "MemoryUsage", "format_bytes", "format_percent"]

#: The baseline of arrays.
NUMPY = "a NumPy array"


@dataclass(frozen=True, slots=True, repr=False)
class MemoryUsage:
    """The memory that a buffer holds, and what its uncompressed counterpart would hold for the same transitions.

    ``print()`` it for a summary of two or three lines.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> frames = CompressedArray(1000, (84, 84), compression_method="zstd-5")
        >>> frames[:] = 1
        >>> usage = frames.memory_usage()
        >>> usage.transitions, usage.dense, usage.baseline
        (1000, 7056000, 'a NumPy array')
        >>> usage.total < 0.02 * usage.dense
        True
    """

    payload: int = 0
    """Bytes of encoded observations, and of those that are not encoded yet."""
    index: int = 0
    """Bytes of the tables that say where each observation is."""
    keyframes: int = 0
    """Bytes of the whole frames that differences refer to, and of recent frames, to find repeats."""
    other: int = 0
    """Bytes of everything else, such as actions and rewards."""
    transitions: int = 0
    """Transitions held, of all environments; for an array, the observations that were written."""
    dense: int = 0
    """Bytes that ``baseline`` would hold for these transitions: every column, and both observations of a transition."""
    dense_observations: int = 0
    """The part of ``dense`` that is observations."""
    baseline: str = NUMPY
    """What ``dense`` is the size of, such as ``"SB3's ReplayBuffer"``."""
    codecs: Mapping[str, str] = field(default_factory=dict)
    """The method in use for each key, and why where it was chosen automatically."""
    decided: bool = True
    """Whether all methods are in use; False while observations are held uncompressed, to choose a method by them."""

    @property
    def total(self) -> int:
        """All bytes held; agrees with the growth of the resident set."""
        return self.payload + self.index + self.keyframes + self.other

    @property
    def observations(self) -> int:
        """Bytes held for observations."""
        return self.payload + self.index + self.keyframes

    @property
    def ratio(self) -> float | None:
        """``total`` as a fraction of ``dense``; None while nothing is stored or compressed yet."""
        return self.total / self.dense if self.decided and self.dense else None

    @property
    def observation_ratio(self) -> float | None:
        """``observations`` as a fraction of ``dense_observations``; None while nothing is stored or compressed yet."""
        return self.observations / self.dense_observations if self.decided and self.dense_observations else None

    def __add__(self, other: MemoryUsage) -> MemoryUsage:
        """The memory of two parts of the same transitions, such as two keys of a Dict."""
        return MemoryUsage(
            self.payload + other.payload,
            self.index + other.index,
            self.keyframes + other.keyframes,
            self.other + other.other,
            max(self.transitions, other.transitions),
            self.dense + other.dense,
            self.dense_observations + other.dense_observations,
            self.baseline,
            {**self.codecs, **other.codecs},
            self.decided and other.decided,
        )

    def as_dict(self) -> dict[str, Any]:
        """All figures as JSON-ready values."""
        figures = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        derived = ("total", "observations", "ratio", "observation_ratio")
        return figures | {"codecs": dict(self.codecs)} | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        return "\n".join([self.summary, *self._observation_summary(), *self._methods()])

    @property
    def summary(self) -> str:
        """The first line of the report."""
        what = "observations" if self.baseline == NUMPY else "transitions"
        summary = f"{format_bytes(self.total)} for {self.transitions:,} {what}"
        if self.ratio is not None:
            return f"{summary}: {format_percent(self.ratio)} of the {format_bytes(self.dense)} in {self.baseline}"
        if self.decided:
            return summary
        return f"{summary}, not compressed yet; {self.baseline} would hold {format_bytes(self.dense)}"

    def _observation_summary(self) -> list[str]:
        if self.observation_ratio is None or self.dense == self.dense_observations:
            return []
        percent, dense = format_percent(self.observation_ratio), format_bytes(self.dense_observations)
        return [f"observations alone: {format_bytes(self.observations)}, {percent} of {dense}"]

    def _methods(self) -> list[str]:
        return [f"{key}: {method}" if key else method for key, method in self.codecs.items()]

    def __repr__(self) -> str:
        return f"<MemoryUsage: {self.summary}>"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = [("", "bytes held", self.baseline, "ratio")]
        for name, held, dense, ratio in (
            ("observations", self.observations, self.dense_observations, self.observation_ratio),
            ("everything", self.total, self.dense, self.ratio),
        ):
            percent = "" if ratio is None else format_percent(ratio)
            rows.append((name, format_bytes(held), format_bytes(dense), percent))
        lines = "".join(
            "<tr>" + "".join(f"<td style='text-align: right'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        methods = "<br>".join(map(html.escape, self._methods()))
        return f"<table><caption>{html.escape(self.summary)}<br>{methods}</caption>{lines}</table>"


def format_bytes(count: float) -> str:
    """Format ``1234567`` as ``"1.23 MB"``."""
    if count < 1000:
        return f"{count:.0f} B"
    units = ["kB", "MB", "GB", "TB"]
    # 999,960 bytes are 1.0 MB rather than 1000.0 kB
    while count >= 999_950 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count / 1000:.{2 if count < 9_995 else 1}f} {units[0]}"


def format_percent(ratio: float) -> str:
    """Format ``0.0110`` as ``"1.10 %"``, with three significant digits."""
    percent = 100 * ratio
    return f"{percent:,.0f} %" if abs(percent) >= 99.95 else f"{percent:#.3g} %"
