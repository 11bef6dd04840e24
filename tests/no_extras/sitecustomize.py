"""Put this folder on PYTHONPATH and Python finds none of the optional packages."""

from __future__ import annotations

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


_find_spec = PathFinder.find_spec


def find_spec(_: type, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    """Say of an optional package what would be said were it not installed: nothing."""
    if fullname.partition(".")[0] in HIDDEN:
        return None
    return _find_spec(fullname, path, target)


# in its place, and not before it: pytest asks this class too
PathFinder.find_spec = classmethod(find_spec)  # type: ignore[assignment,method-assign]
