"""Without TorchRL or Ray, the import error says how to install them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

import sb3_extra_buffers.replay_buffers as package
from sb3_extra_buffers.errors import MissingExtraError


@pytest.fixture
def _fresh_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import the package again from scratch, and restore it afterwards."""
    before = dict(vars(package))
    ours = f"{package.__name__}.", "sb3_extra_buffers._torchrl."
    for name in [name for name in sys.modules if name.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    yield
    vars(package).update(before)


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
@pytest.mark.usefixtures("_fresh_imports")
def test_a_missing_package_is_named(hidden: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hidden == "ray":
        pytest.importorskip("torchrl")
    for name in [hidden, *(name for name in sys.modules if name.startswith(f"{hidden}."))]:
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(MissingExtraError) as raised:
        importlib.import_module(f"{package.__name__}.{module}")
    assert f"pip install '.[{extra}]'" in str(raised.value)
