"""`CompressedStorage` with the arguments of TorchRL's storages, to stand in for them in their own tests."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sb3_extra_buffers.replay_buffers import CompressedStorage

# where a storage keeps its files, or whether it does: nothing that ours has
FILES = {"scratch_dir", "existsok", "auto_cleanup", "cleanup_memmap", "consolidated"}
UNLIMITED = 1000


class _StandIn(CompressedStorage):
    def __init__(self, max_size: int | None = None, **options: Any) -> None:
        for name in ("shared_init", "compilable"):
            if options.pop(name, False):
                pytest.skip(f"{name} is not for CompressedStorage")
        method = "auto" if os.environ.get("CONFORMANCE_HOW") == "auto" else "delta"
        options = {name: value for name, value in options.items() if name not in FILES}
        super().__init__(UNLIMITED if max_size is None else max_size, compression_method=method, **options)


class LazyTensorStorage(_StandIn):
    """In the place of theirs, and under its name: it is a part of the names of their tests."""


class LazyMemmapStorage(_StandIn):
    """The same."""


class ListStorage(_StandIn):
    """The same."""


STAND_INS = [LazyTensorStorage, LazyMemmapStorage, ListStorage]
