"""The documented names, signatures and defaults of the compressed SB3 buffers."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common import buffers as sb3_buffers

import sb3_extra_buffers.compressed as module
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer, find_buffer_dtypes
from tests.contracts.store import method_params

# beyond those of SB3's, in this order
OPTIONS: dict[str, Any] = {
    "dtypes": None,
    "normalize_images": False,
    "compression_method": "auto",
    "compression_kwargs": None,
    "decompression_kwargs": None,
    "output_dtype": "raw",
}
KINDS = ["ReplayBuffer", "DictReplayBuffer", "RolloutBuffer", "DictRolloutBuffer"]


def parameters(cls: type[Any]) -> dict[str, Any]:
    found = inspect.signature(cls).parameters
    return {name: each.default for name, each in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_constructors(kind: str) -> None:
    ours, theirs = parameters(getattr(module, f"Compressed{kind}")), parameters(getattr(sb3_buffers, kind))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: ours[name] for name in theirs} == theirs
    assert list(ours)[len(theirs) : len(theirs) + len(OPTIONS)] == list(OPTIONS)
    assert {name: ours[name] for name in OPTIONS} == OPTIONS


@pytest.mark.parametrize("name", [name for name in module.__all__ if name.endswith("Buffer")])
def test_classes_are_subclasses_of_sb3s(name: str) -> None:
    if "Maskable" in name or "Recurrent" in name:
        pytest.importorskip("sb3_contrib")
    cls = getattr(module, name)
    assert issubclass(cls, sb3_buffers.RolloutBuffer if "Rollout" in name else sb3_buffers.ReplayBuffer)
    assert issubclass(cls, sb3_buffers.BaseBuffer)
    if "Dict" in name and "Prioritized" not in name:
        assert issubclass(cls, (sb3_buffers.DictReplayBuffer, sb3_buffers.DictRolloutBuffer))
    assert (cls.__doc__ or "").strip()


@pytest.mark.parametrize("method", method_params("zstd-5", "rle-jit", "igzip1", "rle", "gzip9"))
@pytest.mark.parametrize("cls", [CompressedReplayBuffer, CompressedRolloutBuffer])
def test_the_documented_constructor_call(cls: Any, method: str) -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    dtypes = find_buffer_dtypes(obs_shape=space.shape, elem_dtype=space.dtype, compression_method=method)
    options = {"dtypes": dtypes, "normalize_images": False, "compression_method": method}
    buffer = cls(16, space, spaces.Discrete(6), device="cpu", n_envs=2, **options)
    assert buffer.observations.shape[1:] == (2, 4, 84, 84)
    assert buffer.observations.dtype == np.uint8
