"""The contents of steps: images in observation stores, all other keys in arrays; both are indexed by slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import as_array, cast_exactly
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import FileFormatError, SpecMismatchError
from sb3_extra_buffers.stores.arena import resident_bytes, zeros
from sb3_extra_buffers.stores.base import Indices
from sb3_extra_buffers.stores.checks import check_flags, require
from sb3_extra_buffers.stores.choice import may_be_stacked
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from sb3_extra_buffers.files.parts import LoadedParts

Array = npt.NDArray[Any]
Step = dict[str, Array]


def parse_step(step: Any) -> Step:
    """Return the values of ``step`` as arrays of numbers, without ``log/...`` and ``stepid``."""
    if not isinstance(step, Mapping) or not all(isinstance(key, str) for key in step):
        raise SpecMismatchError(f"a step must be a dict of arrays, got a {type(step).__name__}")
    parsed = {key: as_array(value, key) for key, value in step.items() if key[:4] != "log/" and key != "stepid"}
    for key, value in parsed.items():
        if value.dtype.kind not in "biuf":
            raise SpecMismatchError(f"{key} has dtype {value.dtype}; values must be numbers, bools or arrays of these")
    if not parsed:
        raise SpecMismatchError("a step must have at least one key besides 'stepid' and 'log/...'")
    return parsed


class StepStore:
    """Steps with the same keys, shapes and dtypes, at slots that count from 0.

    The keys in ``specs`` are in the order of the first step. Each is in ``stores``, compressed, or in ``columns``.
    """

    def __init__(
        self, specs: dict[str, ObsSpec], columns: dict[str, Array], stores: dict[str, ObservationStore]
    ) -> None:
        self.specs, self.columns, self.stores = specs, columns, stores
        for store in stores.values():
            store.stride = 1

    @classmethod
    def for_step(
        cls, step: Step, n_slots: int, compressed: Sequence[str] | None, method: str, options: Mapping[str, Any] | None
    ) -> StepStore:
        """Create a store for steps like ``step``; ``compressed`` are the keys to compress, by default all images."""
        specs = {key: ObsSpec(value.shape, value.dtype) for key, value in step.items()}
        if compressed is None:
            compressed = [key for key, spec in specs.items() if spec.dtype == np.uint8 and may_be_stacked(spec)]
        missing = set(compressed) - specs.keys()
        if missing:
            raise SpecMismatchError(f"compressed_keys has {sorted(missing)}, but a step has only {sorted(specs)}")
        columns, stores = {}, {}
        for key, spec in specs.items():
            if key in compressed:
                stores[key] = ObservationStore(spec, 1, method, options)
                stores[key].allocate(n_slots)
            else:
                columns[key] = zeros((n_slots, *spec.shape), spec.dtype)
        return cls(specs, columns, stores)

    # ---- writing ----

    def check(self, step: Step) -> Step:
        """Return ``step`` with the dtypes of the first step; raise if it does not match the first step."""
        specs = self.specs
        if step.keys() != specs.keys():
            raise SpecMismatchError(f"a step has the keys {sorted(step)}, but earlier steps have {sorted(specs)}")
        for key, value in step.items():
            spec = specs[key]
            if value.shape != spec.shape:
                raise SpecMismatchError(f"{key} has shape {value.shape}, but earlier steps have {spec.shape}")
            if value.dtype != spec.dtype:
                step[key] = cast_exactly(value, spec.dtype, key)
        return step

    def reserve(self, n_slots: int) -> None:
        """Allocate space for ``n_slots`` steps in total."""
        for key, column in self.columns.items():
            if len(column) < n_slots:
                longer = zeros((n_slots, *column.shape[1:]), column.dtype)
                longer[: len(column)] = column
                self.columns[key] = longer
        for store in self.stores.values():
            if store.n_obs < n_slots:
                store.allocate(n_slots - store.n_obs)

    def add_stream(self, number: int) -> None:
        """Give stream ``number`` segments of its own; once a method is chosen, it shares those of another stream."""
        for store in self.stores.values():
            if store.inner is None:
                store.n_streams = max(store.n_streams, number + 1)

    def write_images(self, slot: int, stream: int, step: Step) -> None:
        """Write the compressed keys of a step; one write to each store."""
        slots = np.array([slot])
        for key, store in self.stores.items():
            row = np.ascontiguousarray(step[key]).reshape(1, -1).view(np.uint8)
            store.write(slots, np.array([stream % store.n_streams]), row)

    def erase(self, first: int, stop: int) -> None:
        """Free the images in slots ``first`` to ``stop - 1``; idempotent."""
        for store in self.stores.values():
            # the replay is full, so there will not be more observations from which to choose a method
            store.choose_method()
            store.erase(np.arange(first, stop))

    # ---- reading ----

    def read(self, slots: Indices) -> dict[str, Array]:
        """Return every key of the steps at ``slots [batch, length]``; each row must be consecutive steps."""
        batch: dict[str, Array] = {}
        for key, spec in self.specs.items():
            if key in self.stores:
                rows: ByteRows = self.stores[key].read_windows(slots)
                batch[key] = rows.view(spec.dtype).reshape(*slots.shape, *spec.shape)
            else:
                batch[key] = self.columns[key].take(slots, axis=0)
        return batch

    # ---- reports ----

    @property
    def held_bytes(self) -> int:
        """Upper bound of the bytes held for images."""
        return sum(store.held_bytes for store in self.stores.values())

    def step_bytes(self, columns_only: bool = False) -> int:
        """Bytes of one uncompressed step."""
        return sum(spec.nbytes for key, spec in self.specs.items() if not (columns_only and key in self.stores))

    def memory_usage(self, n_steps: int) -> MemoryUsage:
        """Return the bytes in use for ``n_steps`` steps, and the bytes that plain arrays would take."""
        total = MemoryUsage(other=sum(resident_bytes(column) for column in self.columns.values()))
        for key, store in self.stores.items():
            usage, dense = store.memory_usage(), n_steps * self.specs[key].nbytes
            total += replace(usage, codecs={key: usage.codecs[""]}, dense_observations=dense)
        return replace(total, transitions=n_steps, dense=n_steps * self.step_bytes())

    # ---- files ----

    def to_parts(self, n_slots: int) -> tuple[list[Any], dict[str, Array]]:
        """Return a description of the keys, and the columns of the first ``n_slots`` slots."""
        keys = [[key, list(spec.shape), spec.dtype.str, key in self.stores] for key, spec in self.specs.items()]
        return keys, {f"key-{number}": self.columns[key][:n_slots] for number, key in self._numbered()}

    def _numbered(self) -> Iterable[tuple[int, str]]:
        """Keys that are columns, and the numbers that name them in files, because keys may be any strings."""
        return [(number, key) for number, key in enumerate(self.specs) if key in self.columns]

    @classmethod
    def from_parts(cls, parts: LoadedParts, n_saved: int, n_slots: int) -> StepStore:
        """Restore what `to_parts` returned, with space for ``n_slots``; nothing in ``parts`` is trusted."""
        specs: dict[str, ObsSpec] = {}
        columns: dict[str, Array] = {}
        stores: dict[str, ObservationStore] = {}
        for number, entry in enumerate(parts.entry("keys", kind=list)):
            fits = isinstance(entry, list) and [*map(type, entry)] == [str, list, str, bool]
            require(fits, f"expected a key as [name, shape, dtype, compressed], got {entry!r}")
            key, shape, dtype, compressed = entry
            require(key not in specs and key != "stepid", f"the key {key!r} is not allowed, or occurs twice")
            name = f"key-{number}"
            if compressed:
                store = parts.stores.get(name)
                if store is None or store.n_obs < n_saved:
                    raise FileFormatError(f"{key!r} has no store of {n_saved} observations")
                stores[key], specs[key] = store, store.spec
            else:
                rows = parts.columns.get(name)
                if rows is None or rows.ndim < 1 or len(rows) != n_saved or rows.dtype.kind not in "biuf":
                    raise FileFormatError(f"{key!r} does not have {n_saved} rows of numbers")
                check_flags(key, rows)
                specs[key] = ObsSpec(rows.shape[1:], rows.dtype)
                column = columns[key] = zeros((n_slots, *rows.shape[1:]), rows.dtype)
                column[:n_saved] = rows
            spec = specs[key]
            require([list(spec.shape), spec.dtype.str] == [shape, dtype], f"{key!r} is not {shape} of {dtype}")
        require(bool(specs), "steps without a key")
        steps = cls(specs, columns, stores)
        steps.reserve(n_slots)
        return steps
