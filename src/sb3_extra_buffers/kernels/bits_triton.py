"""Bit operations for Triton kernels on 64-bit words, and what else takes an instruction of its own."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = [
    "after_stores",
    "jit_rule",
    "load_word",
    "low_bits",
    "pick_bytes",
    "popcount",
    "popcount64",
    "prefetch",
    "spread_bits",
]

# inline PTX where Triton has no operation for a single instruction; its interpreter takes the portable path
_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")


def jit_rule(rule):
    """A plain function of numbers for use in kernels; the interpreter calls it as it is."""
    return triton.jit(rule) if _COMPILED.value else rule


@triton.jit
def popcount(mask):
    """Set bits of a byte."""
    if _COMPILED:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], tl.int32, is_pure=True, pack=1)
    mask = mask - ((mask >> 1) & 0x55)
    mask = (mask & 0x33) + ((mask >> 2) & 0x33)
    return (mask + (mask >> 4)) & 0x0F


@triton.jit
def popcount64(mask):
    """Set bits of an unsigned 64-bit word."""
    if _COMPILED:
        return tl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [mask], tl.int32, is_pure=True, pack=1)
    mask = mask - ((mask >> 1) & 0x5555555555555555)
    mask = (mask & 0x3333333333333333) + ((mask >> 2) & 0x3333333333333333)
    mask = (mask + (mask >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((mask * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def low_bits(count):
    """A word with its lowest ``count`` bits set; ``count`` is clamped to 0..64."""
    count = tl.minimum(tl.maximum(count, 0), 64)
    if _COMPILED:
        # PTX clamps shifts: a shift by 64 gives 0
        return tl.inline_asm_elementwise(
            "{ .reg .b64 t; shl.b64 t, 0xFFFFFFFFFFFFFFFF, $1; not.b64 $0, t; }",
            "=l,r", [count], tl.uint64, is_pure=True, pack=1,
        )  # fmt: skip
    half = (count >> 1).to(tl.uint64)
    nothing = half ^ half
    return ~((~nothing << half) << (count.to(tl.uint64) - half))


@triton.jit
def load_word(words_ptr, at, mask):
    """The eight bytes at ``at``, which need not be aligned."""
    low = tl.load(words_ptr + (at >> 3), mask=mask, other=0).to(tl.uint64, bitcast=True)
    high = tl.load(words_ptr + (at >> 3) + 1, mask=mask, other=0).to(tl.uint64, bitcast=True)
    shift = (at & 7).to(tl.int32) * 8
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{ .reg .b64 a, b; .reg .u32 s; shr.b64 a, $1, $3; sub.u32 s, 64, $3; shl.b64 b, $2, s;
            or.b64 $0, a, b; }""",
            "=l,l,l,r", [low, high, shift], tl.uint64, is_pure=True, pack=1,
        )  # fmt: skip
    return (low >> shift.to(tl.uint64)) | ((high << 1) << (63 - shift).to(tl.uint64))


@triton.jit
def pick_bytes(values, picks):
    """Permute bytes: byte ``b`` of the result is the byte of ``values`` that nibble ``b`` of ``picks`` names."""
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 l, h, p, q; mov.b64 {l, h}, $1; shr.u32 q, $2, 16; prmt.b32 p, l, h, $2;
            prmt.b32 q, l, h, q; mov.b64 $0, {p, q}; }""",
            "=l,l,r", [values, picks], tl.uint64, is_pure=True, pack=1,
        )  # fmt: skip
    word = values ^ values
    for byte in tl.static_range(8):
        source = ((picks >> (4 * byte)) & 7).to(tl.uint64)
        word |= ((values >> (8 * source)) & 255) << (8 * byte)
    return word


@triton.jit
def spread_bits(mask):
    """A word whose byte ``b`` is 255 where bit ``b`` of ``mask`` is set, else 0."""
    word = (mask.to(tl.uint64) * 0x0101010101010101) & 0x8040201008040201
    word = ((word + 0x7F7F7F7F7F7F7F7F) >> 7) & 0x0101010101010101
    return word * 255


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines at ``pointers``, without waiting for them."""
    if _COMPILED:
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l",
            [pointers.to(tl.int64)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def after_stores(value):
    """``value``, a 64-bit number: when the host sees it, it sees everything that was stored before."""
    if _COMPILED:
        value = tl.inline_asm_elementwise(
            "{ fence.acq_rel.sys; mov.b64 $0, $1; }", "=l,l", [value], tl.int64, is_pure=False, pack=1
        )
    return value
