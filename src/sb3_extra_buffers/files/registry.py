"""Registry of everything that can be saved: a stable tag, its class, and the function that rebuilds it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

from sb3_extra_buffers.errors import FileFormatError, MissingExtraError, NotSaveableError
from sb3_extra_buffers.files.parts import LoadedParts, Parts
from sb3_extra_buffers.stores.checks import only_named_errors

__all__ = ["REGISTRY", "from_parts", "to_parts"]


class SavedType(NamedTuple):
    """Import paths of the code behind a tag. They are never read from a file, and tags never change."""

    cls: str
    """The class, as ``module:name``; subclasses are saved under its tag."""
    builder: str
    """Rebuilds an instance from `LoadedParts`, as ``module:function``.

    The same module may define ``to_parts(saved, tag)`` (see `registered_parts`) and ``cut`` (see `Cut`).
    """


_OURS = "sb3_extra_buffers"
_TORCHRL = f"{_OURS}._torchrl"
_STORAGE = f"{_OURS}.replay_buffers.compressed_storage"
_EXPERIENCE = f"{_OURS}.replay_buffers.experience_memory"
_EMBODIED = f"{_OURS}.replay_buffers.embodied"
_BUFFERS = f"{_OURS}.compressed.buffers"
_VARIANTS = f"{_OURS}.gpu_buffers.variants"
_CONTRIB = f"{_OURS}.compressed.contrib"
_SB3 = f"{_OURS}._sb3.parts:buffer_from_parts"

REGISTRY: dict[str, SavedType] = {
    "array": SavedType(f"{_OURS}.compressed.array:CompressedArray", f"{_OURS}.compressed.array:make_array"),
    "replay": SavedType(f"{_BUFFERS}:CompressedReplayBuffer", _SB3),
    "dict-replay": SavedType(f"{_BUFFERS}:CompressedDictReplayBuffer", _SB3),
    "n-step-replay": SavedType(f"{_BUFFERS}:CompressedNStepReplayBuffer", _SB3),
    "dict-n-step-replay": SavedType(f"{_BUFFERS}:CompressedDictNStepReplayBuffer", _SB3),
    "her-replay": SavedType(f"{_BUFFERS}:CompressedHerReplayBuffer", _SB3),
    "prioritized-replay": SavedType(f"{_OURS}.compressed.priorities:CompressedPrioritizedReplayBuffer", _SB3),
    "dict-prioritized-replay": SavedType(f"{_OURS}.compressed.priorities:CompressedDictPrioritizedReplayBuffer", _SB3),
    "sequence-replay": SavedType(f"{_OURS}.compressed.sequences:CompressedSequenceReplayBuffer", _SB3),
    "dict-sequence-replay": SavedType(f"{_OURS}.compressed.sequences:CompressedDictSequenceReplayBuffer", _SB3),
    "rollout": SavedType(f"{_BUFFERS}:CompressedRolloutBuffer", _SB3),
    "dict-rollout": SavedType(f"{_BUFFERS}:CompressedDictRolloutBuffer", _SB3),
    "maskable-rollout": SavedType(f"{_CONTRIB}:CompressedMaskableRolloutBuffer", _SB3),
    "maskable-dict-rollout": SavedType(f"{_CONTRIB}:CompressedMaskableDictRolloutBuffer", _SB3),
    "recurrent-rollout": SavedType(f"{_CONTRIB}:CompressedRecurrentRolloutBuffer", _SB3),
    "recurrent-dict-rollout": SavedType(f"{_CONTRIB}:CompressedRecurrentDictRolloutBuffer", _SB3),
    "torchrl-storage": SavedType(f"{_STORAGE}:CompressedStorage", f"{_TORCHRL}.checkpoint:restore_storage"),
    "experience": SavedType(f"{_EXPERIENCE}:ReplayBuffer", f"{_EXPERIENCE}:restore_buffer"),
    "embodied": SavedType(f"{_EMBODIED}:CompressedEmbodiedReplay", f"{_EMBODIED}:restore_replay"),
    "replay-service": SavedType(f"{_TORCHRL}.service_state:ServiceState", f"{_TORCHRL}.service_state:restore_state"),
    "gpu-replay": SavedType(f"{_OURS}.gpu_buffers.replay_buffer:GpuReplayBuffer", _SB3),
    "gpu-n-step-replay": SavedType(f"{_VARIANTS}:GpuNStepReplayBuffer", _SB3),
    "gpu-prioritized-replay": SavedType(f"{_VARIANTS}:GpuPrioritizedReplayBuffer", _SB3),
    "gpu-sequence-replay": SavedType(f"{_OURS}.gpu_buffers.sequences:GpuSequenceReplayBuffer", _SB3),
    "gpu-her-replay": SavedType(f"{_VARIANTS}:GpuHerReplayBuffer", _SB3),
    "gpu-rollout": SavedType(f"{_OURS}.gpu_buffers.rollout_buffer:GpuRolloutBuffer", _SB3),
    "recording": SavedType(f"{_OURS}.recording.base:BaseRecordBuffer", f"{_OURS}.recording.buffers:make_recording"),
}

_TAGS = {saved_type.cls: tag for tag, saved_type in REGISTRY.items()}


def tag_of(cls: type[Any]) -> str | None:
    """The tag that instances of ``cls`` are saved under."""
    tags = (_TAGS.get(f"{base.__module__}:{base.__qualname__}") for base in cls.__mro__)
    return next((tag for tag in tags if tag is not None), None)


def class_of(tag: str) -> type[Any]:
    """The class that ``tag`` stands for."""
    cls: type[Any] = _import(_look_up(tag).cls)
    return cls


def class_name(tag: str) -> str:
    """The name of the class that ``tag`` stands for, without importing it."""
    return _look_up(tag).cls.partition(":")[2]


def module_of(tag: str) -> ModuleType:
    """The module that rebuilds what is saved under ``tag``."""
    return importlib.import_module(_look_up(tag).builder.partition(":")[0])


def to_parts(saved: Any) -> Parts:
    """The parts of ``saved``: its own ``to_parts()``."""
    if not hasattr(saved, "to_parts"):
        raise NotSaveableError(f"a {type(saved).__name__} cannot be saved: it has no to_parts()")
    parts: Parts = saved.to_parts()
    if parts.kind not in REGISTRY:
        raise NotSaveableError(f"the tag {parts.kind!r} is not registered in sb3_extra_buffers.files.registry")
    return parts


def registered_parts(saved: Any) -> Parts:
    """The parts of ``saved`` by the ``to_parts(saved, tag)`` of the module that rebuilds it."""
    tag = tag_of(type(saved))
    if tag is None:
        raise NotSaveableError(f"a {type(saved).__name__} cannot be saved: none of its base classes is registered")
    parts: Parts = module_of(tag).to_parts(saved, tag)
    return parts


def from_parts(parts: LoadedParts) -> Any:
    """Rebuild what ``parts`` were taken from; anything wrong with them is a `FileFormatError`."""
    with only_named_errors(f"this {parts.kind}"):
        return _import(_look_up(parts.kind).builder)(parts)


def check_target(tag: Any, target: type[Any] | None) -> None:
    """Raise unless ``tag`` is known and its class can be loaded as a ``target``."""
    saved_type = _look_up(tag)
    if target is None or tag_of(target) == tag or issubclass(_import(saved_type.cls), target):
        return
    name = class_name(tag)
    raise FileFormatError(f"this holds a {name}, not a {target.__qualname__}; call {name}.load()")


def _look_up(tag: Any) -> SavedType:
    if not isinstance(tag, str) or tag not in REGISTRY:
        raise FileFormatError(f"unknown kind {tag!r}; a newer version may have written it: update sb3-extra-buffers")
    return REGISTRY[tag]


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingExtraError(f"loading a {name} needs a package that is not installed: {error}") from error
