"""The documented imports and signatures of `sb3_extra_buffers.recording`."""

from __future__ import annotations

import inspect
import subprocess
import sys

import sb3_extra_buffers.recording as module
from sb3_extra_buffers.recording import BaseRecordBuffer, DummyRecordBuffer, FramelessRecordBuffer, RecordBuffer


def test_all_names_exist() -> None:
    assert sorted(module.__all__) == list(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{name} says nothing of itself"


def test_signatures() -> None:
    parameters = inspect.signature(RecordBuffer).parameters
    assert list(parameters)[:3] == ["res", "ch_num", "size"]
    assert parameters["compression_method"].default == "auto"
    assert list(inspect.signature(RecordBuffer.add).parameters)[1:5] == ["frame", "reward", "action", "features"]
    for each in (RecordBuffer, FramelessRecordBuffer, DummyRecordBuffer):
        assert issubclass(each, BaseRecordBuffer)


def test_recording_needs_neither_sb3_nor_pillow() -> None:
    code = (
        "import sys, numpy, sb3_extra_buffers.recording as r\n"
        "b = r.RecordBuffer(size=3); b.add(numpy.zeros((4, 84, 84), 'uint8'), 0, 0)\n"
        "print(*({'stable_baselines3', 'gymnasium', 'PIL', 'cv2'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (ran.stdout.strip(), ran.stderr) == ("", "")
