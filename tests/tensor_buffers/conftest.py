"""Fixtures for tests of tensor buffers."""

from __future__ import annotations

import pytest

from sb3_extra_buffers.stores import device_base


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store observations as on a GPU, with reference kernels."""
    monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
    monkeypatch.setattr(device_base, "has_triton", lambda: True)
