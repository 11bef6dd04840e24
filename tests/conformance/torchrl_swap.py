"""Run pytest with `CompressedStorage` instead of TorchRL's own storages.

``python -m tests.conformance.torchrl_swap HOW [pytest arguments]``, where HOW is ``plain`` (nothing replaced),
``auto`` (default options), ``stored`` (every leaf compressed, however small) or ``device`` (in stores for GPUs, with
their reference kernels on the CPU).
"""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.conformance import torchrl_extension


def swap_in() -> None:
    """Replace TorchRL's storages in the modules that tests import them from, or that create them for a test."""
    from tests.conformance.torchrl_standins import STAND_INS

    names = "data", "data.replay_buffers", "data.replay_buffers.storages", "data.map.tdstorage"
    for module in [importlib.import_module(f"torchrl.{name}") for name in names]:
        for stand_in in STAND_INS:
            setattr(module, stand_in.__name__, stand_in)


def as_on_a_gpu() -> None:
    """Use the stores for GPUs on the CPU."""
    from sb3_extra_buffers.stores import device_base

    for name, value in (("stays_on_host", lambda device: False), ("has_triton", lambda: True)):
        setattr(device_base, name, value)


def main(how: str, *arguments: str) -> int:
    torchrl_extension.load()
    if how != "plain":
        swap_in()
    if how == "device":
        as_on_a_gpu()
    return int(pytest.main(list(arguments)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
