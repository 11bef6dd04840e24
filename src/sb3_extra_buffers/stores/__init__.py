"""Stores of encoded observations: heaps, frames, and views that index like arrays."""

from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

__all__ = ["Heap", "MemoryUsage", "ObservationStore", "StoreView"]
