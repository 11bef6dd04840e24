"""`CompressedStorage` with the names and arguments of TorchRL's storages, for TorchRL's own tests."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sb3_extra_buffers.replay_buffers import CompressedStorage

# options for files of a storage, which CompressedStorage does not have
FILES = {"scratch_dir", "existsok", "auto_cleanup", "cleanup_memmap", "consolidated"}
UNLIMITED = 1000


class _StandIn(CompressedStorage):
    def __init__(self, max_size: int | None = None, **options: Any) -> None:
        for name in ("shared_init", "compilable"):
            if options.pop(name, False):
                pytest.skip(f"CompressedStorage has no option {name}")
        method = "auto" if os.environ.get("CONFORMANCE_HOW") == "auto" else "delta"
        options = {name: value for name, value in options.items() if name not in FILES}
        # loading a file passes the method that was saved
        super().__init__(UNLIMITED if max_size is None else max_size, **{"compression_method": method, **options})


class LazyTensorStorage(_StandIn):
    """Has TorchRL's name, which is a part of test names."""


class LazyMemmapStorage(_StandIn):
    """See `LazyTensorStorage`."""


class ListStorage(_StandIn):
    """See `LazyTensorStorage`."""


STAND_INS = [LazyTensorStorage, LazyMemmapStorage, ListStorage]
