"""Shared types for GPU buffer compression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SlotMetadata", "arr_config_length"]


@dataclass
class SlotMetadata:
    """Where one observation is in a `SharedRawHeap`.

    Args:
        byte_start: Position of the payload in the heap.
        pos_runs: Position of the run lengths, relative to ``byte_start``.
        pos_elem: Position of the elements, relative to ``byte_start``.
        run_length: Number of runs; 0 for methods other than ``"rle"``.
        payload_bytes: Size of the payload.

    Examples:
        >>> from sb3_extra_buffers.gpu_buffers import SlotMetadata
        >>> SlotMetadata(byte_start=64, pos_runs=0, pos_elem=8, run_length=4, payload_bytes=12).payload_bytes
        12
    """

    byte_start: int
    pos_runs: int
    pos_elem: int
    run_length: int
    payload_bytes: int


def arr_config_length(arr_configs: Mapping[str, Any]) -> int:
    """Return the number of elements of an observation, from the key ``size`` or ``shape`` of ``arr_configs``.

    Examples:
        >>> from sb3_extra_buffers.gpu_buffers.metadata import arr_config_length
        >>> arr_config_length({"shape": (4, 84, 84)})
        28224
    """
    if arr_configs.get("size") is not None:
        return int(arr_configs["size"])
    if arr_configs.get("shape") is None:
        raise ValueError(f"expected a 'size' or a 'shape', got {sorted(arr_configs)}")
    shape = arr_configs["shape"]
    return int(shape) if isinstance(shape, int) else math.prod(shape)
