"""Compiled kernels are kept between runs, and never longer than the sources they were compiled from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sb3_extra_buffers

PACK = """
import numpy as np
from sb3_extra_buffers.kernels.loading import frame_kernels
kernels = frame_kernels()
kernels.pack_block(np.zeros(64, np.uint8), 64, np.empty(128, np.uint8), np.zeros(1 << 12, np.int32))
print("kept" if kernels.pack_block.stats.cache_hits else "compiled")
"""


def pack(where: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(where)}
    environment.pop("NUMBA_CACHE_DIR", None)
    ran = subprocess.run(
        [sys.executable, "-c", PACK], cwd=where, env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def test_a_change_of_an_imported_source_compiles_anew(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    package = tmp_path / "sb3_extra_buffers"
    shutil.copytree(Path(sb3_extra_buffers.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert pack(tmp_path) == "compiled"
    assert pack(tmp_path) == "kept"
    os.utime(package / "kernels" / "lz4_block.py")
    assert pack(tmp_path) == "compiled"
    assert pack(tmp_path) == "kept"
