"""Units of an observation (pixels or numbers) as indices into a table of at most 256 of them, and back.

A *unit* is 2, 3, 4 or 8 bytes: a number, or the channels of a pixel. Its *code* is those bytes as an integer, the first
byte lowest. Units follow each other, unless ``plane`` is set: then the bytes of a unit are ``plane`` bytes apart, as in
images with channels first, and a row consists of blocks of ``unit * plane`` bytes.

`map_rows` looks codes up in a hash table without collisions: a code has one slot, so a lookup is one comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.kernels.dispatch import compiled_kernels, has_numba

#: Entries of a table: an index is one byte.
ENTRIES = 256
#: Bytes of an entry in the array that `expand_rows` reads.
ENTRY_BYTES = 8
# bits of a slot number, and how many factors to try with each number of bits. With 14 bits, about one factor in ten has
# no collisions among 256 codes
_SLOT_BITS = range(6, 17)
_ATTEMPTS = 64

#: Bytes of a `line_hash`, and how many matrices to try for it.
LINE_HASH_BYTES = 2 * ENTRIES + 6 * 8 + 1
_LINE_ATTEMPTS = 16

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint64]


class CodeHash(NamedTuple):
    """A hash table of codes: the slot of a code is its product with ``factor``, shifted right by ``shift``.

    Every slot holds the index of some entry in use; a code is known if it equals the code of that entry.
    """

    indices: Bytes  # [slot], then a `line_hash`
    factor: np.uint64
    shift: np.uint64


class Lookup(NamedTuple):
    """How to expand bytes: to entries of ``table`` of ``unit`` bytes each, as `expand_rows` does."""

    table: Bytes
    unit: int
    plane: int


class TableKernels(NamedTuple):
    """The kernels of tables, compiled or not."""

    map_rows: Callable[..., int]
    map_step: Callable[..., bool]
    expand_rows: Callable[..., None]
    compiled: bool


@cache
def table_kernels(compiled: bool | None = None) -> TableKernels:
    """Return the kernels: compiled, reference, or (``None``) compiled if numba is installed."""
    if compiled is None:
        return table_kernels(has_numba())
    if not compiled:
        return TableKernels(map_rows, map_step, expand_rows, False)
    module: Any = compiled_kernels("tables")
    return TableKernels(module.map_rows, module.map_step, module.expand_rows, True)


def hash_codes(codes: Codes, indices: Bytes) -> CodeHash:
    """Build a hash table of distinct ``codes``, at least one, without collisions.

    If every factor has collisions, the codes that lost their slot stay unknown, and rows with them are stored outside.
    """
    factors = np.random.default_rng(0).integers(1 << 63, (1 << 64) - 1, _ATTEMPTS, dtype=np.uint64) | np.uint64(1)
    # with fewer slots than half the pairs of codes, a collision is likely
    least = max(2 * len(codes).bit_length() - 4, _SLOT_BITS[0])
    for bits in range(min(least, _SLOT_BITS[-1]), _SLOT_BITS.stop):
        shift = np.uint64(64 - bits)
        slots = np.sort((codes * factors[:, None]) >> shift, axis=1)
        free = (slots[:, 1:] != slots[:, :-1]).all(axis=1)
        if free.any():
            break
    factor = factors[int(free.argmax())]
    found = np.full((1 << bits) + LINE_HASH_BYTES, indices[0], np.uint8)
    found[((codes * factor) >> shift).astype(np.intp)] = indices
    found[1 << bits :] = line_hash(codes, indices)
    return CodeHash(found, factor, shift)


def has_line_hashes() -> bool:
    """Whether there is a kernel for `line_hash`, and a processor with the instructions."""
    return has_numba() and bool(compiled_kernels("tables").HAS_MATRICES)


def line_hash(codes: Codes, indices: Bytes) -> Bytes:
    """Build a second hash table, for processors that look 64 codes of three bytes up at once.

    Two hashes of a byte each are sums (modulo 2) of products of the code's bytes with 8x8 matrices of bits. The first
    one selects a displacement; the second one plus the displacement is the slot, without collisions. Consists of the
    displacements, the indices by slot, three matrices for each hash, and a byte that is 1 if the table can be used.
    """
    space = np.zeros(LINE_HASH_BYTES, np.uint8)
    if int(codes.max()) >> 24 or not has_line_hashes():
        return space
    parts = [(codes >> np.uint64(8 * k)).astype(np.uint8) for k in range(3)]
    draw = np.random.default_rng(0)
    for _ in range(_LINE_ATTEMPTS):
        rows = draw.integers(0, 256, (2, 3, 8), np.uint8)  # [hash, byte, bit]
        first, second = (_bit_products(rows[k], parts) for k in range(2))
        displacements = _separate(first, second)
        if displacements is not None:
            space[:ENTRIES] = displacements
            space[ENTRIES : 2 * ENTRIES] = indices[0]
            space[ENTRIES + (second ^ displacements[first]).astype(np.intp)] = indices
            # the processor takes the last row first
            space[2 * ENTRIES : -1] = rows[:, :, ::-1].reshape(-1)
            space[-1] = 1
            break
    return space


def _bit_products(rows: Bytes, parts: list[Bytes]) -> Bytes:
    """A hash of codes: bit ``i`` is the parity of the bits of each byte of the code that its ``rows[byte, i]`` has."""
    total = np.zeros(len(parts[0]), np.uint8)
    for matrix, part in zip(rows, parts, strict=True):
        selected = np.unpackbits(matrix[:, None] & part, axis=0).reshape(8, 8, -1)  # [row, bit, code]
        total ^= np.packbits(selected.sum(axis=1) & 1, axis=0, bitorder="little")[0]
    return total


def _separate(first: Bytes, second: Bytes) -> Bytes | None:
    """Displacements, by ``first``, with which all slots differ; None if none were found."""
    taken = np.zeros(ENTRIES, np.bool_)
    displacements = np.zeros(ENTRIES, np.uint8)
    counts = np.bincount(first, minlength=ENTRIES)
    # the largest groups first, while most slots are free
    for group in np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist():
        members = second[first == group]
        slots = members ^ np.arange(ENTRIES, dtype=np.uint8)[:, None]  # [displacement, member]
        free = ~taken[slots].any(axis=1)
        if len(np.unique(members)) < len(members) or not free.any():
            return None
        displacements[group] = free.argmax()
        taken[slots[displacements[group]]] = True
    return displacements


def codes_of(rows: Bytes, unit: int, plane: int) -> Codes:
    """Return the codes of rows, ``[row, unit]``."""
    n_rows, n_units = len(rows), rows.shape[1] // unit
    columns = rows.reshape(n_rows, -1, unit, plane) if plane else rows.reshape(n_rows, -1, unit, 1)
    codes = np.zeros((n_rows, columns.shape[1], columns.shape[3]), np.uint64)
    for byte in range(unit):
        codes |= columns[:, :, byte].astype(np.uint64) << np.uint64(8 * byte)
    return codes.reshape(n_rows, n_units)


def map_rows(
    rows: Bytes, found: Bytes, factor: np.uint64, shift: np.uint64, table: Bytes, unit: int, plane: int, first: int,
    closed: bool, out: Bytes, outside: Bytes,
) -> int:  # fmt: skip
    """Set ``out`` to the indices of the units of ``rows``, from row ``first`` on.

    ``found``, ``factor`` and ``shift`` are a `CodeHash`; ``table`` has `ENTRY_BYTES` for each index.

    Returns the number of the first row with an unknown unit, or the number of rows. If ``closed``, such rows are
    flagged in ``outside`` instead, and their indices are set to zeros.
    """
    entries = table.view("<u8")
    for row in range(first, len(rows)):
        codes = codes_of(rows[row : row + 1], unit, plane)[0]
        indices = found[((codes * factor) >> shift).astype(np.intp)]
        if np.array_equal(entries[indices], codes):
            out[row] = indices
        elif closed:
            out[row] = 0
            outside[row] = 1
        else:
            return row
    return len(rows)


def map_step(
    rows: Bytes, next_rows: Bytes, found: Bytes, factor: np.uint64, shift: np.uint64, table: Bytes, unit: int,
    plane: int, guess: Bytes, guessed: bool, out: Bytes,
) -> bool:  # fmt: skip
    """Set the first half of ``out`` to the indices of ``rows``, and the second to those of ``next_rows``.

    Returns False if a unit is unknown; the contents of ``out`` and ``guess`` are then undefined. Otherwise ``guess``,
    unless it has no rows, is set to the second half. If ``guessed``, it holds that of the last step, which ``rows`` are
    likely to repeat: kernels may compare before they look up.
    """
    n_rows, outside = len(rows), np.zeros(len(rows), np.uint8)
    for part, half in ((rows, out[:n_rows]), (next_rows, out[n_rows:])):
        if map_rows(part, found, factor, shift, table, unit, plane, 0, False, half, outside) < n_rows:
            return False
    if len(guess):
        guess[...] = out[n_rows:]
    return True


def expand_rows(indices: Bytes, table: Bytes, unit: int, plane: int, first: int, stop: int, out: Bytes) -> None:
    """Set rows ``first`` to ``stop`` of ``out`` to the units that ``indices`` name.

    ``table`` has `ENTRY_BYTES` for each index.
    """
    entries = table.reshape(ENTRIES, ENTRY_BYTES)
    wanted, rows = indices[first:stop], out[first:stop]
    for byte in range(unit):
        plain = entries[:, byte].take(wanted)
        if plane:
            rows.reshape(len(rows), -1, unit, plane)[:, :, byte] = plain.reshape(len(rows), -1, plane)
        else:
            rows.reshape(len(rows), -1, unit)[:, :, byte] = plain
