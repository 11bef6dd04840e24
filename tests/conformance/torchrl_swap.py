"""Run pytest with `CompressedStorage` in the place of TorchRL's own storages.

``python -m tests.conformance.torchrl_swap HOW [pytest arguments]``, where HOW is ``plain`` (nothing swapped), ``auto``
(as users have it) or ``stored`` (every leaf goes through a store, however small).
"""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.conformance import torchrl_extension


def swap_in() -> None:
    """Rebind the names by which a test would find one of their storages."""
    from tests.conformance.torchrl_standins import STAND_INS

    for name in ("torchrl.data", "torchrl.data.replay_buffers", "torchrl.data.replay_buffers.storages"):
        module = importlib.import_module(name)
        for stand_in in STAND_INS:
            setattr(module, stand_in.__name__, stand_in)


def main(how: str, *arguments: str) -> int:
    torchrl_extension.load()
    if how != "plain":
        swap_in()
    return int(pytest.main(list(arguments)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
