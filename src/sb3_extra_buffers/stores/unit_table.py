"""The table of a `TableStore`: at most 256 colours or numbers, compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.codecs.table import find_unit
from sb3_extra_buffers.kernels import as_contiguous
from sb3_extra_buffers.kernels.tables import (
    ENTRIES,
    ENTRY_BYTES,
    CodeHash,
    Codes,
    Lookup,
    TableKernels,
    codes_of,
    hash_codes,
    table_kernels,
)
from sb3_extra_buffers.stores.base import Array
from sb3_extra_buffers.stores.checks import column, require, whole
from sb3_extra_buffers.stores.layout import StackLayout

Flags = npt.NDArray[np.bool_]

# after this many rows with unknown units that did not fit, no more entries are added: such a row takes a hundred times
# as long as others
_MAX_MISFITS = 16
# usual grids of images as numbers, likeliest first: the lowest number and the spacing
_GRIDS = (
    (0.0, 1 / 255), (0.0, 1.0), (-1.0, 1 / 127.5), (-1.0, 1 / 128), (0.0, 1 / 256), (-0.5, 1 / 255), (-0.5, 1 / 256),
    (-128.0, 1.0),
)  # fmt: skip


class Grid(NamedTuple):
    """Equally spaced numbers: ``origin + index * step``."""

    origin: float
    step: float


class _Entries(NamedTuple):
    """The entries and everything derived from them; replaced as a whole, so an interrupt leaves the old or the new."""

    codes: Codes  # [entry]
    used: Flags  # [entry]
    expanded: npt.NDArray[np.uint8]  # [entry * ENTRY_BYTES]: what `expand_rows` reads
    hashed: CodeHash | None  # None if there are none


class UnitTable:
    """Colours or numbers behind indices of one byte. Entries are added, and never changed or removed.

    Numbers that are close have indices that are close, so that indices compress as well as the numbers. If those of
    the first observations are on an evenly spaced grid, such as the multiples of 1/255, the index of a number is its
    position on the grid. Otherwise they are sorted, and later numbers are appended. Entry 0 of a palette is black, so
    that frames of zeros have indices of zeros.
    """

    def __init__(self, dtype: np.dtype[Any], unit: int, plane: int = 0, compiled: bool | None = None) -> None:
        self.dtype, self.unit, self.plane = dtype, unit, plane
        self._compiled = compiled
        self._kernels: TableKernels = table_kernels(compiled)
        self.is_palette = dtype.itemsize == 1
        self.grid: Grid | None = None
        #: Number of rows with unknown units that did not fit into the table.
        self.n_misfits = 0
        #: Whether `learn` is still to be called.
        self.is_empty = True
        used = np.zeros(ENTRIES, np.bool_)
        used[0] = self.is_palette
        self._entries = self._build(np.zeros(ENTRIES, np.uint64), used)

    # ---- entries ----

    @property
    def n_used(self) -> int:
        """The number of entries in use."""
        return int(np.count_nonzero(self._entries.used))

    @property
    def expanded(self) -> npt.NDArray[np.uint8]:
        """The bytes of each entry, padded to `ENTRY_BYTES`."""
        return self._entries.expanded

    @property
    def nbytes(self) -> int:
        """The memory of the table and its hash table."""
        codes, used, expanded, hashed = self._entries
        return codes.nbytes + used.nbytes + expanded.nbytes + (0 if hashed is None else hashed.indices.nbytes)

    @property
    def is_closed(self) -> bool:
        """Whether no more entries are added."""
        return self.n_misfits >= _MAX_MISFITS or bool(self._entries.used.all())

    @staticmethod
    def _build(codes: Codes, used: Flags) -> _Entries:
        indices = np.flatnonzero(used)
        hashed = hash_codes(codes[indices], indices.astype(np.uint8)) if len(indices) else None
        return _Entries(codes, used, codes.astype("<u8").view(np.uint8).copy(), hashed)

    def _add(self, codes: Codes) -> bool:
        """Add entries for ``codes``, which are distinct and unknown; return False if they do not all fit."""
        entries = self._entries
        new_codes, used = entries.codes.copy(), entries.used.copy()
        if len(codes) > ENTRIES - np.count_nonzero(used):
            return False
        rest = codes
        if self.grid is not None:
            positions = self._positions(codes, self.grid)
            fits = positions >= 0
            fits[fits] = ~used[positions[fits]]
            # if two numbers have the same position, the first one takes it
            first = np.zeros(len(codes), np.bool_)
            first[np.unique(positions, return_index=True)[1]] = True
            fits &= first
            new_codes[positions[fits]] = codes[fits]
            used[positions[fits]] = True
            rest = codes[~fits]
        free = np.flatnonzero(~used)
        # numbers that are not on the grid take free entries from the end
        free = free[: len(rest)] if self.grid is None else free[::-1][: len(rest)]
        new_codes[free] = rest
        used[free] = True
        self._entries = self._build(new_codes, used)
        return True

    def _positions(self, codes: Codes, grid: Grid) -> npt.NDArray[np.int64]:
        """The positions of numbers on ``grid``; -1 for those that are not on it."""
        with np.errstate(all="ignore"):
            numbers = self._numbers(codes).astype(np.float64)
            places = (numbers - grid.origin) / grid.step
            nearest = np.rint(places)
            on_grid = (np.abs(places - nearest) <= self._tolerance) & (nearest >= 0) & (nearest < ENTRIES)
            # minus zero has the position of zero, but other bits
            on_grid &= ~(np.signbit(numbers) & (numbers == 0))
            return np.where(on_grid, nearest, -1).astype(np.int64)

    @property
    def _tolerance(self) -> float:
        # in steps of the grid: near 1, a float16 is off by up to an eighth of 1/255
        return 0.25 if self.unit == 2 and self.dtype.kind == "f" else 0.02

    def _numbers(self, codes: Codes) -> Array:
        return codes.astype(f"<u{self.unit}").view(self.dtype)

    # ---- learning ----

    def learn(self, rows: ByteRows) -> None:
        """Add the units of ``rows`` and sort the entries; to be called before anything is mapped."""
        out = np.empty((len(rows), rows.shape[1] // self.unit), np.uint8)
        self.map(rows, out)
        known = self._entries.codes[self._entries.used]
        if not len(known):
            return
        learnt = UnitTable(self.dtype, self.unit, self.plane, self._compiled)
        if self.is_palette:
            known = known[known > 0]
            channels = known.astype("<u8").view(np.uint8).reshape(-1, 8).sum(axis=1, dtype=np.int64)
            ordered = known[np.lexsort((known, channels))]
        else:
            learnt.grid = self._find_grid(known)
            ordered = known[np.argsort(self._numbers(known), kind="stable")]
        if learnt._add(ordered):
            # the entries last: until they are replaced, the table maps as before
            self.grid, self.n_misfits = learnt.grid, 0
            self._entries = learnt._entries
        self.is_empty = False

    def _find_grid(self, codes: Codes) -> Grid | None:
        if self.dtype.kind not in "fiu":
            return None
        numbers = self._numbers(codes)
        # first, because converting a signalling NaN is a RuntimeWarning
        numbers = np.unique(numbers[np.isfinite(numbers)].astype(np.float64))
        if not len(numbers):
            return None
        for grid in (*(Grid(*known) for known in _GRIDS), _even_grid(numbers)):
            if grid is not None and self._is_on(numbers, grid):
                return grid
        return None

    def _is_on(self, numbers: npt.NDArray[np.float64], grid: Grid) -> bool:
        with np.errstate(all="ignore"):  # the largest floats overflow: they are on no grid
            places = (numbers - grid.origin) / grid.step
            nearest = np.rint(places)
            is_near = bool((np.abs(places - nearest) <= self._tolerance).all())
        return is_near and nearest[0] >= 0 and nearest[-1] < ENTRIES and len(np.unique(nearest)) == len(numbers)

    # ---- rows ----

    def map(self, rows: ByteRows, out: npt.NDArray[np.uint8]) -> Flags | None:
        """Set ``out`` to the indices of the units of ``rows``, ``[row, unit]``, and add unknown units to the table.

        Returns flags of the rows with units that do not fit into the table, whose indices are set to zeros; None if all
        fit.
        """
        rows = as_contiguous(rows)
        outside: npt.NDArray[np.uint8] = np.zeros(len(rows), np.uint8)
        done, closed = 0, self.is_closed
        while True:
            hashed, table = self._entries.hashed, self._entries.expanded
            if hashed is not None:
                done = self._kernels.map_rows(rows, *hashed, table, self.unit, self.plane, done, closed, out, outside)
            if done == len(rows):
                return outside.view(np.bool_) if outside.any() else None
            codes = np.unique(codes_of(rows[done : done + 1], self.unit, self.plane))
            new = np.setdiff1d(codes, self._entries.codes[self._entries.used])
            if not len(new) or not self._add(new):
                self.n_misfits += 1
                out[done] = 0
                outside[done] = 1
                done += 1
            closed = self.is_closed

    def map_step(
        self, rows: ByteRows, next_rows: ByteRows, guess: npt.NDArray[np.uint8], guessed: bool
    ) -> npt.NDArray[np.uint8] | None:
        """`map` the rows of a step, then their successors; None if a unit is unknown.

        ``guess`` is set to the indices of the successors, unless it has no rows. ``guessed`` says that it holds those
        of the last step, which the rows of this step are likely to repeat.
        """
        entries = self._entries
        if entries.hashed is None:
            return None
        out = np.empty((2 * len(rows), rows.shape[1] // self.unit), np.uint8)
        known = self._kernels.map_step(
            as_contiguous(rows), as_contiguous(next_rows), *entries.hashed, entries.expanded, self.unit, self.plane,
            guess, guessed, out,
        )  # fmt: skip
        return out if known else None

    def expand(self, indices: npt.NDArray[np.uint8], out: ByteRows, first: int, stop: int) -> None:
        """Set rows ``first`` to ``stop`` of ``out`` to the units of ``indices``, ``[row, unit]``."""
        self._kernels.expand_rows(indices, *self.lookup, first, stop, out)

    @property
    def lookup(self) -> Lookup:
        """What kernels need to expand indices."""
        return Lookup(self._entries.expanded, self.unit, self.plane)

    # ---- saving ----

    def check(self) -> None:
        """Raise `AssertionError` if the hash table does not find every entry."""
        codes, used, expanded, hashed = self._entries
        rows = codes[used].astype("<u8").view(np.uint8).reshape(-1, ENTRY_BYTES)[:, : self.unit]
        if hashed is not None:
            out, outside = np.empty((len(rows), 1), np.uint8), np.zeros(len(rows), np.uint8)
            rows = np.ascontiguousarray(rows)
            self._kernels.map_rows(rows, *hashed, expanded, self.unit, 0, 0, True, out, outside)
            if outside.any() or not np.array_equal(out[:, 0], np.flatnonzero(used)):
                raise AssertionError("an entry of the table is not found")
        if not np.array_equal(expanded.view("<u8"), codes):
            raise AssertionError("the table for reading differs from the one for writing")

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return a JSON-ready record and the arrays to save."""
        record = {
            "unit": self.unit,
            "plane": self.plane,
            "grid": None if self.grid is None else list(self.grid),
            "n_misfits": self.n_misfits,
            "is_empty": self.is_empty,
        }
        return record, {"table": self._entries.codes, "table_used": self._entries.used}

    def restore(self, record: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Hold what `to_parts` returned, in a new table; raise `FileFormatError` if anything about it is wrong."""
        geometry = record["unit"], record["plane"]
        require(geometry == (self.unit, self.plane), f"a table of units {geometry} does not fit the observations")
        codes = column(arrays, "table", np.uint64, (ENTRIES,)).copy()
        used = column(arrays, "table_used", np.bool_, (ENTRIES,)).copy()
        require(codes[~used] == 0, "an unused entry of the table is not zero")
        require(self.unit == 8 or bool((codes >> np.uint64(8 * self.unit) == 0).all()), "an entry has too many bytes")
        require(len(np.unique(codes[used])) == np.count_nonzero(used), "two entries of the table are equal")
        require(not self.is_palette or bool(used[0] and codes[0] == 0), "entry 0 of a palette is not black")
        grid, is_empty = record["grid"], record["is_empty"]
        if grid is not None:
            require(not self.is_palette, "a palette has no grid")
            require(isinstance(grid, list) and [*map(type, grid)] == [float, float], f"invalid grid {grid!r}")
            require(bool(np.isfinite(grid).all()) and grid[1] > 0, f"invalid grid {grid!r}")
            grid = Grid(*grid)
        require(isinstance(is_empty, bool), f"invalid flag {is_empty!r}")
        entries = self._build(codes, used)
        self.grid, self.n_misfits, self.is_empty = grid, whole(record["n_misfits"], "n_misfits", stop=1 << 31), is_empty
        self._entries = entries

    def copy(self) -> UnitTable:
        """A table that changes of this one do not change."""
        copied = object.__new__(UnitTable)
        copied.__setstate__(self.__getstate__())  # entries are replaced, never changed
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_kernels"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kernels = table_kernels(self._compiled)


def _even_grid(numbers: npt.NDArray[np.float64]) -> Grid | None:
    """A grid of the smallest distance between two of the sorted numbers, with as much space below them as above."""
    if len(numbers) < 2:
        return None
    with np.errstate(all="ignore"):
        span = numbers[-1] - numbers[0]
        n_steps = np.rint(span / np.diff(numbers).min())
    if not 1 <= n_steps < ENTRIES:
        return None
    step = float(span / n_steps)
    space = 0 if numbers[0] == 0 else (ENTRIES - 1 - int(n_steps)) // 2
    return Grid(float(numbers[0]) - space * step, step)


class Geometry(NamedTuple):
    """How observations consist of units, and the layout of their indices."""

    unit: int
    plane: int
    inner: StackLayout


def find_geometry(layout: StackLayout) -> Geometry | None:
    """How observations of ``layout`` consist of units; None if a table is not for them."""
    spec, frame, stack = layout.spec, layout.frame_spec, layout.stack
    found = find_unit(frame)
    if found is None:
        return None
    unit, planar = found
    plane, shape = 0, list(spec.shape)
    if spec.dtype.itemsize == 1:
        if stack == 1 or layout.axis == "first":
            shape = _index_shape(frame.shape, unit, planar)
            shape = shape if stack == 1 else [stack, *shape]
            plane = math.prod(frame.shape[1:]) if planar else 0
        elif planar or shape[-1] % (stack * unit) == 0:
            shape = _index_shape(spec.shape, unit, planar)
            plane = math.prod(spec.shape[1:]) if planar else 0
        else:
            return None  # the channels of a pixel are not together
    return Geometry(unit, plane, StackLayout(ObsSpec(tuple(shape), np.dtype(np.uint8)), stack, layout.axis))


def _index_shape(shape: tuple[int, ...], unit: int, planar: bool) -> list[int]:
    """The shape of one index per pixel; an axis of length one is dropped."""
    axis = 0 if planar else len(shape) - 1
    n_images = shape[axis] // unit
    return [*shape[:axis], *([n_images] if n_images > 1 else []), *shape[axis + 1 :]]
