"""Put this folder on PYTHONPATH and Python finds none of the optional packages."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HIDDEN = {
    "ale_py",
    "cv2",
    "h5py",
    "isal",
    "lz4",
    "minari",
    "numba",
    "ray",
    "sb3_contrib",
    "tensordict",
    "torchrl",
    "triton",
    "vizdoom",
    "zarr",
    "zstandard",
}


class FinderWithoutExtras(PathFinder):
    """Says of an optional package what it would say were it not installed: nothing."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = FinderWithoutExtras
