"""Compression ratios of a real game's observations, by method and level.

``scripts/fit_heap_heuristic.py`` fits the table below to the committed benchmark and prints it.
"""

from __future__ import annotations

from sb3_extra_buffers.codecs.registry import get_codec, parse_method
from sb3_extra_buffers.errors import CodecLevelError

__all__ = ["BARE_LEVELS", "LEVELS", "RATIOS", "save_ratio"]

# fmt: off
RATIOS: dict[str, tuple[dict[int, float], tuple[float, ...]]] = {
    # fitted: begin
    "delta": ({1: 0.008964, 2: 0.006097, 3: 0.005818}, (0.014419, -0.006749, 0.001294)),
    "gzip": ({0: 0.251333, 1: 0.050548, 3: 0.045873}, (0.052886, -0.002338)),
    "igzip": ({0: 0.058739, 1: 0.049662, 3: 0.050664}, (0.049161, 0.000501)),
    "lz4-block": ({1: 0.054286, 5: 0.051876, 9: 0.05094, 12: 0.050515}, (0.054971, -0.000757, 3.3e-05)),
    "lz4-frame": ({1: 0.073992, 5: 0.052402, 9: 0.051462, 12: 0.051041}, (0.079773, -0.006925, 0.000386)),
    "rle": ({0: 0.239299}, (0.239299,)),
    "zstd": ({-100: 0.201417, -50: 0.175254, -20: 0.11289, -5: 0.065377, -3: 0.056891, -1: 0.048283, 1:
        0.044951, 3: 0.041906, 5: 0.039504, 10: 0.037903, 15: 0.034144, 22: 0.033958}, (0.059907, -0.002171,
        -7e-06)),
    # fitted: end
}
# fmt: on
"""Measured sizes of each method by level, and the coefficients of a polynomial for the levels between."""

LEVELS: dict[str, tuple[range, ...]] = {
    "gzip": (range(10),),
    "igzip": (range(4),),
    "zstd": (range(1, 23), range(-100, 0)),
    "lz4-frame": (range(-(1 << 31), 17),),
    "lz4-block": (range(-(1 << 31), 13),),
    "delta": (range(1, 4),),
}
"""Valid levels of each method; other levels raise `CodecLevelError`."""

BARE_LEVELS = {"gzip": 6, "igzip": 2, "zstd": -3, "lz4-frame": 0, "lz4-block": 0, "delta": 1}
"""Level of a method that is named without one."""


def save_ratio(compression_method: str, compresslevel: int | None = None) -> float:
    """Return the bytes of an encoded observation, as a fraction of its size, measured on MsPacman.

    Args:
        compression_method: A method such as ``"rle"`` or ``"zstd-5"``.
        compresslevel: Overrides the level in ``compression_method``.

    Examples:
        >>> from sb3_extra_buffers.gpu_buffers.size_estimation import save_ratio
        >>> save_ratio("zstd22") < save_ratio("zstd-5") < save_ratio("rle") < 1
        True
    """
    family, level = parse_method(compression_method)
    family = "rle" if family == "rle-jit" else family
    if compresslevel is not None:
        level = compresslevel
    if family in LEVELS:
        level = BARE_LEVELS[family] if level is None else level
        if not any(level in levels for levels in LEVELS[family]):
            valid = " or ".join(f"{levels[0]} to {levels[-1]}" for levels in LEVELS[family])
            raise CodecLevelError(f"{family} level must be {valid}, got {level}")
    elif level is not None:
        raise CodecLevelError(f"{family} has no levels, got {level}")
    if family == "auto":
        return 1.0
    if family not in RATIOS:
        get_codec(family)  # raises if there is no such method; one that was not measured counts in full
        return 1.0
    measured, coefficients = RATIOS[family]
    level = level or 0
    if level in measured:
        return measured[level]
    ratio = sum(factor * float(level) ** power for power, factor in enumerate(coefficients))
    return float(min(max(ratio, min(measured.values())), max(measured.values())))
