"""Write golden payloads: ``python -m tests.golden.make [name ...]``.

Run this once for a new codec or a new kind of payload, and commit what it writes. Existing payloads are left alone:
users have files with such payloads, so every later version must decode them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sb3_extra_buffers.codecs import ByteRows, Codec, ObsSpec, available_codecs, get_codec

GOLDEN = Path(__file__).parent
SPEC = ObsSpec((12, 16, 3), np.dtype(np.uint8))


def frames(n: int) -> ByteRows:
    """Frames of a few colours in which a square walks over a striped floor."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (9, 3), np.uint8)
    floor = colours[np.add.outer(np.arange(12) // 3, np.arange(16) // 5) % 8]
    batch = np.repeat(floor[None], n, axis=0)
    for i, frame in enumerate(batch):
        frame[i % 9 : i % 9 + 3, i % 13 : i % 13 + 3] = colours[8]
    return SPEC.to_rows(batch)


def cases() -> Iterator[tuple[str, Codec, ByteRows]]:
    """Folder, codec and row of each golden payload that can be written here."""
    rows = frames(64)
    numbers = ObsSpec((12, 12), np.dtype(np.float32))
    for name in available_codecs():
        codec = get_codec(name).bind(numbers if name == "table" else SPEC)
        # codecs of one id write one format
        yield codec.codec_id, codec, rows[5]
    if "zstd" in available_codecs():
        yield "zstd-dictionary", get_codec("zstd3", dictionary=2048).bind(SPEC).train(rows), rows[5]
    inner = get_codec("palette", inner="gzip6").bind(SPEC)
    noise = np.random.default_rng(1).integers(0, 256, SPEC.nbytes, np.uint8)
    yield "palette-gzip", inner, rows[5]
    yield "palette-gzip-learnt", inner.train(rows), rows[5]
    yield "palette-gzip-raw", inner, np.tile(noise, 2)[: SPEC.nbytes]
    yield "rle-floats", get_codec("rle").bind(ObsSpec((72,), np.dtype(np.float64))), rows[5]


def write(folder: Path, codec: Codec, row: ByteRows) -> None:
    folder.mkdir()
    (folder / "row.bin").write_bytes(row.tobytes())
    (folder / "payload.bin").write_bytes(codec.encode(row.data))
    said = {"codec_id": codec.codec_id, "config": codec.config()}
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    for name, codec, row in cases():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        if not (GOLDEN / name).exists():
            write(GOLDEN / name, codec, row)
            print("wrote", GOLDEN / name)
