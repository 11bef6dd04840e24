"""Set up for all tests."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# the contracts assert on behalf of the tests that call them
pytest.register_assert_rewrite("tests.contracts")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import speed_up

    with contextlib.suppress(ImportError, AttributeError, TypeError):
        speed_up()


@pytest.fixture
def save_observations(request: pytest.FixtureRequest) -> Callable[[Any], Path | None]:
    """Return a function that writes observations of a game to ``debug_obs``, for a look at them.

    It takes an array ``(n, channels, height, width)`` or ``(n, height, width, channels)`` and writes one PNG per test:
    a row for each observation, and a column for each frame of a stack. With ``DISABLE_TEST_OBSERVATIONS_SAVE=true`` in
    the environment it writes nothing.
    """

    def save(observations: Any) -> Path | None:
        if os.environ.get("DISABLE_TEST_OBSERVATIONS_SAVE", "").lower() == "true":
            return None
        from sb3_extra_buffers.recording.images import encode_png, tile

        images = np.asarray(observations)
        if images.shape[1] > images.shape[-1]:
            images = images.transpose(0, 3, 1, 2)
        # a picture in colours, or one for each frame of a stack
        images = images.transpose(0, 2, 3, 1) if images.shape[1] == 3 else images.reshape(-1, *images.shape[2:])
        columns = len(images) // len(observations)
        name = re.sub(r"[^\w.-]+", "-", request.node.nodeid.partition("tests/")[2]).strip("-")
        path = request.config.rootpath / "debug_obs" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_png(tile(images, len(images), columns, gap=2, background=32)))
        return path

    return save
