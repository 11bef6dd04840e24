"""Without TorchRL or Ray, importing what needs them names the line that installs them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("hidden", "module", "extra"),
    [
        ("torchrl", "experience_memory", "torchrl"),
        ("tensordict", "experience_memory", "torchrl"),
        ("torchrl", "compressed_storage", "torchrl"),
        ("torchrl", "ray", "torchrl"),
        ("ray", "ray", "ray"),
    ],
)
def test_the_missing_package_is_named(hidden: str, module: str, extra: str) -> None:
    if hidden == "ray":
        pytest.importorskip("torchrl")
    code = f"""
import sys
sys.modules[{hidden!r}] = None
import sb3_extra_buffers.replay_buffers
from sb3_extra_buffers.errors import MissingExtraError
try:
    import sb3_extra_buffers.replay_buffers.{module}
except MissingExtraError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert f"pip install 'sb3-extra-buffers[{extra}]'" in said
