"""Payloads written by earlier versions decode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sb3_extra_buffers.codecs import available_codecs, codec_from_config, get_codec, is_available
from tests.contracts.codec import decode

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden_payloads_decode(folder: Path) -> None:
    saved = json.loads((folder / "config.json").read_text())
    codec_names = [
        saved["codec_id"],
        *([saved["config"]["inner"].rstrip("0123456789")] if "inner" in saved["config"] else []),
    ]
    if not all(map(is_available, codec_names)):
        pytest.skip(f"a package of {codec_names} is not installed")
    row = (folder / "row.bin").read_bytes()
    # every implementation of the format, not only the one that wrote it
    readers = [name for name in available_codecs() if get_codec(name).codec_id == saved["codec_id"]]

    for name in readers:
        out = decode(codec_from_config(name, saved["config"]), (folder / "payload.bin").read_bytes(), len(row))
        np.testing.assert_array_equal(out, np.frombuffer(row, np.uint8))
    assert readers


def test_every_format_has_a_golden_payload() -> None:
    written = {json.loads((folder / "config.json").read_text())["codec_id"] for folder in FOLDERS}

    # python -m tests.golden.make
    assert {get_codec(name).codec_id for name in available_codecs()} <= written
