"""Run pytest with the compressed buffers in the place of SB3's and sb3-contrib's own.

``python -m tests.conformance.swap HOW [pytest arguments]``, where HOW is ``plain`` (nothing swapped), ``auto`` (as
users have them) or ``stored`` (every observation, however small, goes through a store).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import sb3_contrib  # noqa: F401  # loads the modules that name buffer classes
import stable_baselines3
from sb3_contrib.common.maskable import buffers as maskable_buffers
from sb3_contrib.common.recurrent import buffers as recurrent_buffers
from stable_baselines3.common import buffers as sb3_buffers
from stable_baselines3.her import her_replay_buffer

import sb3_extra_buffers.compressed as ours
from sb3_extra_buffers._sb3.options import StorageOptions

# their own code must keep its names: it says super(ReplayBuffer, self)
DEFINING = (sb3_buffers, her_replay_buffer, maskable_buffers, recurrent_buffers)
HOSTS = (stable_baselines3.__name__, "sb3_contrib")


def swaps() -> dict[Any, Any]:
    """Their classes, and ours that stand in for them."""
    found = {}
    for module in DEFINING:
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and f"Compressed{name}" in ours.__all__:
                found[value] = getattr(ours, f"Compressed{name}")
    return found


def swap_in() -> dict[Any, Any]:
    """Rebind every name by which a test or an algorithm would find one of their classes."""
    swapped = swaps()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in HOSTS or module in DEFINING:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value in swapped:
                setattr(module, attribute, swapped[value])
    for value, replacement in swapped.items():
        for base in swapped.keys() - {value}:
            if issubclass(value, base):
                # theirs are subclasses of each other, and ask so
                swapped[base].register(replacement)
    for module in DEFINING:
        stand_in = ModuleType(module.__name__)
        stand_in.__dict__.update(vars(module))
        for value, replacement in swapped.items():
            if value.__name__ in vars(module):
                setattr(stand_in, value.__name__, replacement)
        sys.modules[module.__name__] = stand_in
        parent, _, child = module.__name__.rpartition(".")
        setattr(sys.modules[parent], child, stand_in)
    return swapped


def store_everything() -> None:
    """Let no observation be too small for a store."""
    StorageOptions.method_for = lambda self, key, spec: "delta"  # type: ignore[method-assign]  # for this process only


def main(how: str, *arguments: str) -> int:
    if how != "plain":
        swap_in()
    if how == "stored":
        store_everything()
    return int(pytest.main(list(arguments)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
