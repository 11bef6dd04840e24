"""What older versions saved is loaded for ever after."""

from __future__ import annotations

import pytest

from sb3_extra_buffers.errors import MissingExtraError
from sb3_extra_buffers.files import manifest, registry
from tests.golden.saved.make import HERE, MAKERS, load


@pytest.mark.parametrize("name", MAKERS)
def test_a_golden_folder_holds_what_it_held(name: str) -> None:
    try:
        loaded = load(name)
        expected = MAKERS[name].make()
    except (KeyError, MissingExtraError):
        pytest.skip("needs a package that is not installed")
    MAKERS[name].compare(expected, loaded)


def test_every_kind_of_buffer_has_a_golden_folder() -> None:
    paths = [HERE / name for name in MAKERS]
    found = {(manifest.read_tail(path) if path.is_file() else manifest.read(path))["kind"] for path in paths}

    # recordings, and what belongs to TorchRL and Ray, have tests of their own
    assert set(registry.REGISTRY) - found <= {"recording", "torchrl-storage", "experience", "replay-service"}
