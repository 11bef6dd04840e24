"""Buffers that record what an agent sees and does, and ways to attach them to an agent."""

from typing import TYPE_CHECKING

from sb3_extra_buffers._lazy import attach

if TYPE_CHECKING:
    from sb3_extra_buffers.recording.agent import record_agent
    from sb3_extra_buffers.recording.base import BaseRecordBuffer
    from sb3_extra_buffers.recording.buffers import DummyRecordBuffer, FramelessRecordBuffer, RecordBuffer
    from sb3_extra_buffers.recording.callback import RecordCallback
    from sb3_extra_buffers.recording.records import Episode, Record
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

# imported on first use: the buffers themselves need neither Gymnasium nor SB3
__getattr__, __dir__ = attach(
    __name__,
    {
        "agent": ["record_agent"],
        "base": ["BaseRecordBuffer"],
        "buffers": ["DummyRecordBuffer", "FramelessRecordBuffer", "RecordBuffer"],
        "callback": ["RecordCallback"],
        "records": ["Episode", "Record"],
        "wrapper": ["RecordWrapper"],
    },
)
