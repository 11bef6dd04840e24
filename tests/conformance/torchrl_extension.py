"""TorchRL's compiled extension for the installed torch, built from the sources in TorchRL's wheel.

Prioritized samplers need it. A wheel of TorchRL contains the extension for a single release of torch; with another
release TorchRL runs without it. ``python -m tests.conformance.torchrl_extension`` builds it (a minute or two, with a
C++ compiler and ninja) into the cache of these tests; nothing is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.conformance.run import cache

NAME = "torchrl._torchrl"


def folder() -> Path:
    """Return the cache folder for this version of Python, torch and TorchRL."""
    versions = (
        f"torchrl-{importlib.metadata.version('torchrl')}-torch-{torch.__version__}-{sys.implementation.cache_tag}"
    )
    return cache() / versions


def build() -> Path:
    """Compile the extension unless it is in the cache."""
    from torch.utils import cpp_extension

    spec = importlib.util.find_spec("torchrl")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("TorchRL is not installed")
    sources = Path(spec.submodule_search_locations[0]) / "csrc"
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "_torchrl", [str(sources / name) for name in ("pybind.cpp", "utils.cpp")], build_directory=str(target)
    )
    return target / "_torchrl.so"


def load() -> bool:
    """Load the extension from the cache, if it is there; call this before TorchRL is imported."""
    path = folder() / "_torchrl.so"
    if NAME in sys.modules or not path.exists() or path.stat().st_uid != os.getuid():
        return NAME in sys.modules
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return True


if __name__ == "__main__":
    print(build())
