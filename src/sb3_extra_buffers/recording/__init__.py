"""Buffers that record what an agent sees and does, and what puts them beside an agent."""

import importlib
from typing import TYPE_CHECKING, Any

from sb3_extra_buffers.recording.buffers import (
    BaseRecordBuffer,
    DummyRecordBuffer,
    Episode,
    FramelessRecordBuffer,
    Record,
    RecordBuffer,
)

if TYPE_CHECKING:
    from sb3_extra_buffers.recording.agent import record_agent
    from sb3_extra_buffers.recording.callback import RecordCallback
    from sb3_extra_buffers.recording.wrapper import RecordWrapper

__all__ = [
    "BaseRecordBuffer",
    "DummyRecordBuffer",
    "Episode",
    "FramelessRecordBuffer",
    "Record",
    "RecordBuffer",
    "RecordCallback",
    "RecordWrapper",
    "record_agent",
]

# imported when they are asked for: recording itself needs neither Gymnasium nor SB3
_MODULES = {"RecordCallback": "callback", "RecordWrapper": "wrapper", "record_agent": "agent"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
