"""Folders saved by older versions stay loadable."""

from __future__ import annotations

import pytest

from sb3_extra_buffers.errors import MissingExtraError
from sb3_extra_buffers.files import manifest, registry
from tests.golden.saved.make import HERE, MAKERS, load


@pytest.mark.parametrize("name", MAKERS)
def test_golden_folders_load_with_their_original_contents(name: str) -> None:
    try:
        loaded = load(name)
        expected = MAKERS[name].make()
    except (KeyError, MissingExtraError):
        pytest.skip("needs a package that is not installed")
    MAKERS[name].compare(expected, loaded)


def test_every_registered_buffer_has_a_golden_folder() -> None:
    paths = [HERE / name for name in MAKERS]
    found = {(manifest.read_tail(path) if path.is_file() else manifest.read(path))["kind"] for path in paths}

    # recordings, TorchRL and Ray have golden files of their own
    assert set(registry.REGISTRY) - found <= {"recording", "torchrl-storage", "experience", "replay-service"}
