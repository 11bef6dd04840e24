"""The replay buffers that `benchmarks.peers` compares, by name; each module imports its framework only when used."""

from __future__ import annotations

from benchmarks.peer_systems import cpprb, flashbax, npz, reverb, rlox, sb3, torchrl
from benchmarks.peer_systems.base import System

SYSTEMS: dict[str, type[System]] = {
    "sb3": sb3.Sb3,
    "sb3-optimized": sb3.Sb3Optimized,
    "pypi": sb3.Pypi,
    "pypi-igzip": sb3.PypiIgzip,
    "ours": sb3.Ours,
    "torchrl-tensor": torchrl.TorchrlTensor,
    "torchrl-memmap": torchrl.TorchrlMemmap,
    "torchrl-list": torchrl.TorchrlList,
    "torchrl-ours": torchrl.TorchrlOurs,
    "cpprb": cpprb.Cpprb,
    "cpprb-shared": cpprb.CpprbShared,
    "rlox": rlox.Rlox,
    "flashbax-item": flashbax.FlashbaxItem,
    "flashbax-flat": flashbax.FlashbaxFlat,
    "reverb": reverb.Reverb,
    "npz": npz.NpzFiles,
    "npz-kept": npz.NpzKept,
}
