"""Shared types for GPU buffer compression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SlotMetadata", "arr_config_length"]


@dataclass
class SlotMetadata:
    """Where one observation is in the raw heap; positions are relative to ``byte_start``."""

    byte_start: int
    pos_runs: int
    pos_elem: int
    run_length: int
    payload_bytes: int


def arr_config_length(arr_configs: Mapping[str, Any]) -> int:
    """Return flattened observation length from ``size`` or ``shape`` keys."""
    if arr_configs.get("size") is not None:
        return int(arr_configs["size"])
    if arr_configs.get("shape") is None:
        raise ValueError(f"expected a 'size' or a 'shape', got {sorted(arr_configs)}")
    shape = arr_configs["shape"]
    return int(shape) if isinstance(shape, int) else math.prod(shape)
