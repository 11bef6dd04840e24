"""What observations of a real game take, by method and level.

The figures are fitted to the committed benchmark by ``scripts/fit_heap_heuristic.py``, which prints the table below.
"""

from __future__ import annotations

from sb3_extra_buffers.codecs.registry import get_codec, parse_method
from sb3_extra_buffers.errors import CodecLevelError

__all__ = ["BARE_LEVELS", "LEVELS", "RATIOS", "save_ratio"]

# family: coefficients of a polynomial in the level, lowest first, and the smallest and largest ratio measured
RATIOS: dict[str, tuple[tuple[float, ...], float, float]] = {
    # fitted: begin
    "delta": ((0.007873, -0.000613), 0.006034, 0.006647),
    "gzip": ((0.050765,), 0.050765, 0.050765),
    "igzip": ((0.04989,), 0.04989, 0.04989),
    "lz4-block": ((0.05452,), 0.05452, 0.05452),
    "lz4-frame": ((0.074195,), 0.074195, 0.074195),
    "rle": ((0.239488,), 0.239488, 0.239488),
    "zstd": ((0.048983, -0.002994, -1.5e-05), 0.042126, 0.201611),
    # fitted: end
}

# the documented levels; a bare zstd is level -3
LEVELS: dict[str, tuple[range, ...]] = {
    "gzip": (range(10),),
    "igzip": (range(4),),
    "zstd": (range(1, 23), range(-100, 0)),
    "lz4-frame": (range(-(1 << 31), 17),),
    "lz4-block": (range(-(1 << 31), 13),),
    "delta": (range(1, 4),),
}
BARE_LEVELS = {"gzip": 6, "igzip": 2, "zstd": -3, "lz4-frame": 0, "lz4-block": 0, "delta": 1}


def save_ratio(compression_method: str, compresslevel: int | None = None) -> float:
    """Bytes for an observation, as a fraction of the observation's own."""
    family, level = parse_method(compression_method)
    family = "rle" if family == "rle-jit" else family
    if compresslevel is not None:
        level = compresslevel
    if family in ("none", "auto"):
        return 1.0
    if family in LEVELS:
        level = BARE_LEVELS[family] if level is None else level
        if not any(level in levels for levels in LEVELS[family]):
            raise CodecLevelError(f"{family} has no level {level}")
    elif level is not None:
        raise CodecLevelError(f"{family} has no levels, got {level}")
    if family not in RATIOS:
        get_codec(family)  # an unknown name is an error; what was not measured counts in full
        return 1.0
    coefficients, least, most = RATIOS[family]
    ratio = sum(factor * float(level or 0) ** power for power, factor in enumerate(coefficients))
    return float(min(max(ratio, least), most))
