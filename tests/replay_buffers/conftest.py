"""Set up for the tests of TorchRL's buffers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.conformance import torchrl_extension

if importlib.util.find_spec("torchrl") is not None:
    # TorchRL's compiled extension, which prioritized samplers need, if it was built
    torchrl_extension.load()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
