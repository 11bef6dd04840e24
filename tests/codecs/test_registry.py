"""What users may write for a method, and what they are told when they may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs import (
    available_codecs,
    codec_from_config,
    get_codec,
    is_available,
    known_codecs,
    parse_method,
)
from sb3_extra_buffers.errors import (
    CodecLevelError,
    CodecOptionError,
    ExtraBuffersError,
    MissingExtraError,
    UnknownCodecError,
)

NO_EXTRAS = Path(__file__).parents[1] / "no_extras"


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_available(name), reason=f"the package of {name} is not installed")


@pytest.mark.parametrize(
    ("method", "name", "level"),
    [
        ("igzip3", "igzip", 3),
        ("igzip/3", "igzip", 3),
        ("zstd-5", "zstd", -5),
        ("zstd/-5", "zstd", -5),
        ("zstd5", "zstd", 5),
        ("zstd", "zstd", None),
        ("lz4-frame/5", "lz4-frame", 5),
        ("lz4-frame/-5", "lz4-frame", -5),
        ("lz4-frame", "lz4-frame", None),
        ("lz4-block/12", "lz4-block", 12),
        ("lz4-block/-1", "lz4-block", -1),
        ("rle-jit", "rle-jit", None),
        ("none", "none", None),
        # a name with a dash needs a slash before the level, so this is an unknown name
        ("lz4-frame5", "lz4-frame5", None),
        ("zstd--5", "zstd--5", None),
        ("zstd5 ", "zstd5 ", None),
        ("zstd5\n", "zstd5\n", None),
        ("5", "5", None),
        ("", "", None),
    ],
)
def test_parse_method(method: str, name: str, level: int | None) -> None:
    assert parse_method(method) == (name, level)


@pytest.mark.parametrize("method", [None, 1, b"zstd", ["zstd"]])
def test_methods_that_are_not_strings(method: Any) -> None:
    for use in (parse_method, get_codec):
        with pytest.raises(UnknownCodecError, match="must be a string, got"):
            use(method)


LEVELS: list[tuple[str, list[int], list[int], str]] = [
    ("gzip", [0, 1, 6, 9], [-1, 10], "0..9"),
    ("igzip", [0, 1, 2, 3], [-1, 4], "0..3"),
    ("zstd", [-100, -1, 1, 22], [-101, 0, 23], "1..22 or -100..-1"),
    ("lz4-frame", [-65537, -1, 0, 16], [17], "0..16, or negative"),
    ("lz4-block", [-65537, -1, 0, 1, 12], [13, 16], "1..12 .*, 0 .*, or negative"),
]
INSIDE = [pytest.param(n, level, marks=needs(n)) for n, inside, _, _ in LEVELS for level in inside]
OUTSIDE = [pytest.param(n, level, says, marks=needs(n)) for n, _, out, says in LEVELS for level in out]


@pytest.mark.parametrize(("name", "level"), INSIDE)
def test_documented_levels_work_in_every_spelling(name: str, level: int) -> None:
    codec = get_codec(f"{name}/{level}")
    row = np.arange(300, dtype=np.uint8)
    out = np.zeros_like(row)

    codec.decode_into(memoryview(codec.encode(row.data)), out.data)

    np.testing.assert_array_equal(out, row)
    assert get_codec(name, level=level) == get_codec(name, compresslevel=level) == codec
    assert get_codec(codec.describe()) == codec
    if name.isalpha():
        assert get_codec(f"{name}{level}") == codec


@pytest.mark.parametrize(("name", "level", "says"), OUTSIDE)
def test_error_for_a_bad_level_lists_the_allowed_ones(name: str, level: int, says: str) -> None:
    for method, options in (
        (f"{name}/{level}", {}),
        (name, {"level": level}),
        (name, {"compresslevel": level}),
    ):
        with pytest.raises(CodecLevelError, match=f"{name} level must be {says}.*, got {level}"):
            get_codec(method, **options)


@pytest.mark.parametrize("level", [True, 1.0, "1"])
def test_level_must_be_an_integer(level: Any) -> None:
    with pytest.raises(CodecLevelError, match=r"gzip level must be 0\.\.9"):
        get_codec("gzip", level=level)


@pytest.mark.parametrize("name", [name for name in ("none", "rle", "rle-jit", "palette") if is_available(name)])
def test_level_for_a_codec_without_levels_is_refused(name: str) -> None:
    with pytest.raises(CodecLevelError, match=f"'{name}' has no levels"):
        get_codec(f"{name}/3")


@needs("zstd")
def test_bare_zstd_is_level_minus_three() -> None:
    assert get_codec("zstd") == get_codec("zstd-3")


def test_level_option_overrides_the_method_string() -> None:
    assert get_codec("gzip3", compresslevel=7) == get_codec("gzip7")
    assert get_codec("gzip3", compresslevel=None) == get_codec("gzip3")
    with pytest.raises(CodecOptionError, match="one option"):
        get_codec("gzip", level=1, compresslevel=2)


@pytest.mark.parametrize("method", ["zst", "lz4", "zstd--5", "", "none ", "NONE", "auto", "lz4-frame5", "zst5"])
def test_error_for_an_unknown_method_lists_the_known_ones(method: str) -> None:
    with pytest.raises(UnknownCodecError) as caught:
        get_codec(method)

    assert repr(method) in str(caught.value)
    for name in ("auto", *known_codecs()):
        assert name in str(caught.value)


def test_error_for_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(CodecOptionError, match="'gzip' has no option 'speed'; it takes 'level'"):
        get_codec("gzip", speed=3)
    with pytest.raises(CodecOptionError, match="'none' has no option 'speed'; it takes none"):
        get_codec("none", speed=3)
    # users cannot set what a codec learns from the data
    with pytest.raises(CodecOptionError, match="'elem'"):
        get_codec("rle", elem="<u4")


@needs("zstd")
@pytest.mark.parametrize("size", [-1, True, 1.5, "16384"])
def test_dictionary_must_be_a_size(size: Any) -> None:
    with pytest.raises(CodecOptionError, match="size in bytes"):
        get_codec("zstd", dictionary=size)


def test_palette_refuses_unsuitable_inner_methods() -> None:
    assert get_codec("palette", inner="gzip3").describe() == "palette over gzip3"
    with pytest.raises(CodecLevelError, match="gzip level must be"):
        get_codec("palette", inner="gzip10")
    with pytest.raises(UnknownCodecError):
        get_codec("palette", inner="zst")
    with pytest.raises(CodecOptionError, match="byte codec"):
        get_codec("palette", inner="palette")


def test_configuration_with_unknown_fields_is_refused() -> None:
    with pytest.raises(CodecOptionError, match=r"'window'.*newer version"):
        codec_from_config("gzip", {"level": 3, "window": 9})
    with pytest.raises(UnknownCodecError):
        codec_from_config("brotli", {})
    with pytest.raises(CodecLevelError):
        codec_from_config("gzip", {"level": 11})


def test_every_available_codec_is_built_by_its_name() -> None:
    assert set(available_codecs()) <= set(known_codecs())
    for name in available_codecs():
        assert get_codec(name).describe().startswith(name)


def test_error_for_a_missing_package_has_the_pip_command() -> None:
    code = """
from sb3_extra_buffers.codecs import available_codecs, get_codec, known_codecs
print(*available_codecs())
for name in known_codecs():
    try:
        get_codec(name)
    except ImportError as error:
        print(type(error).__name__, error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(NO_EXTRAS), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    usable, *errors = ran.stdout.splitlines()

    assert usable.split() == ["none", "rle", "gzip", "delta", "camera", "palette", "table"]
    missing = {
        "rle-jit": "numba",
        "igzip": "isal",
        "zstd": "zstd",
        "lz4-frame": "lz4",
        "lz4-block": "lz4",
        "scroll": "lz4",
    }
    assert len(errors) == len(missing)
    for name, extra in missing.items():
        (error,) = (line for line in errors if repr(name) in line)
        assert error.startswith("MissingExtraError")
        assert error.endswith(f"pip install '.[{extra}]'")


def test_missing_package_raises_missing_extra_error() -> None:
    assert issubclass(MissingExtraError, ImportError)
    assert issubclass(MissingExtraError, ExtraBuffersError)
