"""The one table of what can be in a file: stable tags, and the code that they stand for."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from sb3_extra_buffers.errors import FileFormatError, MissingExtraError, NotSaveableError
from sb3_extra_buffers.files.parts import LoadedParts, Parts

__all__ = ["KINDS", "make", "parts_of"]


class Kind(NamedTuple):
    """Where code is found; these strings are never read from a file, and tags never change."""

    cls: str
    """The class, ``module:name``; what derives from it is saved under its tag."""
    maker: str
    """Makes one from `LoadedParts`, ``module:function``."""


_OURS = "sb3_extra_buffers"
_TORCHRL = f"{_OURS}._torchrl"
_STORAGE = f"{_OURS}.replay_buffers.compressed_storage"
_EXPERIENCE = f"{_OURS}.replay_buffers.experience_memory"
_BUFFERS = f"{_OURS}.compressed.buffers"
_CONTRIB = f"{_OURS}.compressed.contrib"
_SB3 = f"{_OURS}._sb3.parts:make_buffer"

KINDS: dict[str, Kind] = {
    "array": Kind(f"{_OURS}.compressed.array:CompressedArray", f"{_OURS}.compressed.array:make_array"),
    "replay": Kind(f"{_BUFFERS}:CompressedReplayBuffer", _SB3),
    "dict-replay": Kind(f"{_BUFFERS}:CompressedDictReplayBuffer", _SB3),
    "n-step-replay": Kind(f"{_BUFFERS}:CompressedNStepReplayBuffer", _SB3),
    "dict-n-step-replay": Kind(f"{_BUFFERS}:CompressedDictNStepReplayBuffer", _SB3),
    "her-replay": Kind(f"{_BUFFERS}:CompressedHerReplayBuffer", _SB3),
    "prioritized-replay": Kind(f"{_OURS}.compressed.priorities:CompressedPrioritizedReplayBuffer", _SB3),
    "dict-prioritized-replay": Kind(f"{_OURS}.compressed.priorities:CompressedDictPrioritizedReplayBuffer", _SB3),
    "rollout": Kind(f"{_BUFFERS}:CompressedRolloutBuffer", _SB3),
    "dict-rollout": Kind(f"{_BUFFERS}:CompressedDictRolloutBuffer", _SB3),
    "maskable-rollout": Kind(f"{_CONTRIB}:CompressedMaskableRolloutBuffer", _SB3),
    "maskable-dict-rollout": Kind(f"{_CONTRIB}:CompressedMaskableDictRolloutBuffer", _SB3),
    "recurrent-rollout": Kind(f"{_CONTRIB}:CompressedRecurrentRolloutBuffer", _SB3),
    "recurrent-dict-rollout": Kind(f"{_CONTRIB}:CompressedRecurrentDictRolloutBuffer", _SB3),
    "torchrl-storage": Kind(f"{_STORAGE}:CompressedStorage", f"{_TORCHRL}.checkpoint:restore_storage"),
    "experience": Kind(f"{_EXPERIENCE}:ReplayBuffer", f"{_EXPERIENCE}:restore_buffer"),
    "replay-service": Kind(f"{_TORCHRL}.service_state:ServiceState", f"{_TORCHRL}.service_state:restore_state"),
    "gpu-replay": Kind(f"{_OURS}.gpu_buffers.replay_buffer:GpuReplayBuffer", _SB3),
    "gpu-rollout": Kind(f"{_OURS}.gpu_buffers.rollout_buffer:GpuRolloutBuffer", _SB3),
    "recording": Kind(f"{_OURS}.recording.buffers:BaseRecordBuffer", f"{_OURS}.recording.files:make"),
}

_TAGS = {kind.cls: tag for tag, kind in KINDS.items()}


def tag_of(cls: type[Any]) -> str | None:
    """The tag that objects of ``cls`` are saved under."""
    for base in cls.__mro__:
        tag = _TAGS.get(f"{base.__module__}:{base.__qualname__}")
        if tag is not None:
            return tag
    return None


def class_of(tag: str) -> type[Any]:
    """The class that ``tag`` stands for."""
    found: type[Any] = _find(_kind(tag).cls)
    return found


def parts_of(saved: Any) -> Parts:
    """What ``saved`` is made of: what its `to_parts` says."""
    if not hasattr(saved, "to_parts"):
        raise NotSaveableError(f"a {type(saved).__name__} cannot be saved: it has no to_parts()")
    parts: Parts = saved.to_parts()
    if parts.kind not in KINDS:
        raise NotSaveableError(f"{parts.kind!r} is no kind that files know")
    return parts


def take_parts(saved: Any) -> Parts:
    """`to_parts` for objects whose class is in the table: that of the maker's module."""
    tag = tag_of(type(saved))
    if tag is None:
        raise NotSaveableError(f"a {type(saved).__name__} cannot be saved: it derives from no class that files know")
    parts: Parts = importlib.import_module(KINDS[tag].maker.partition(":")[0]).to_parts(saved, tag)
    return parts


def make(parts: LoadedParts) -> Any:
    """What ``parts`` were taken from."""
    return _find(_kind(parts.kind).maker)(parts)


def check_target(tag: Any, target: type[Any] | None) -> None:
    """Raise unless ``tag`` is known, and what it stands for can be made as a ``target``."""
    kind = _kind(tag)
    if target is None or tag_of(target) == tag or issubclass(_find(kind.cls), target):
        return
    name = kind.cls.partition(":")[2]
    raise FileFormatError(f"this holds a {name}, not a {target.__qualname__}; call {name}.load()")


def _kind(tag: Any) -> Kind:
    if not isinstance(tag, str) or tag not in KINDS:
        raise FileFormatError(f"{tag!r} is a kind that is unknown here; update sb3-extra-buffers")
    return KINDS[tag]


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as problem:
        raise MissingExtraError(f"what was saved needs a package that is not installed: {problem}") from problem
