"""Saves the intact part of a damaged save."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ArgumentError, DamagedFileError, ExtraBuffersError
from sb3_extra_buffers.files import manifest, registry
from sb3_extra_buffers.files.parts import Cut, LoadedParts
from sb3_extra_buffers.files.saved_parts import SavedParts, errors_about
from sb3_extra_buffers.files.saving import save, save_file
from sb3_extra_buffers.files.step_records import replay
from sb3_extra_buffers.files.verifying import DamageScan
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

# saved states that a repair tries, newest first
_MAX_STATES = 16


@dataclass
class Repair:
    """What a repair kept and what it lost.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import repair, save
        >>> saved = save(CompressedArray(1000, (84, 84)), "frames")
        >>> repair("frames", "repaired").n_lost
        0
    """

    folder: Path
    """The repaired folder or file."""
    n_steps: int = 0
    """Steps, or observations of an array, that are intact."""
    n_lost: int = 0
    """Steps, or observations of an array, that are lost."""
    findings: list[str] = field(default_factory=list)
    """What was wrong."""


def repair(path: str | os.PathLike[str], target: str | os.PathLike[str], cls: type[Any] | None = None) -> Repair:
    """Save what is intact of ``path`` as ``target``: the longest run of undamaged steps, or an array without its lost
    observations. ``path`` itself is not changed.

    If nothing of the last state can be kept, earlier states are tried, as far as the data file still holds them.

    Args:
        path: The damaged folder or file.
        target: Where to save what is intact; another path than ``path``.
        cls: The class to load; ``None`` for the one that was saved.

    Examples:
        >>> from sb3_extra_buffers.compressed import CompressedArray
        >>> from sb3_extra_buffers.files import repair, save, verify
        >>> saved = save(CompressedArray(1000, (84, 84)), "frames")
        >>> repaired = repair("frames", "repaired")
        >>> list(verify("repaired"))
        []
    """
    source, findings = Path(path), list[str]()
    if os.path.realpath(source) == os.path.realpath(target):
        raise ArgumentError(
            f"{source} cannot be repaired in place, which would lose what is damaged; pass a new target"
        )
    first_error: ExtraBuffersError | None = None
    for record in islice(_states(source, findings), _MAX_STATES):
        report = Repair(Path(target))
        try:
            with errors_about(source):
                saved = SavedParts(source.parent, record, source) if source.is_file() else SavedParts.of_folder(
                    source, record
                )  # fmt: skip
                repaired = _rebuild(saved, report, cls)
        except ExtraBuffersError as error:
            first_error = first_error or error
            findings.append(f"state {record.get('number')}: {error}")
            continue
        report.findings[:0] = findings
        (save_file if source.is_file() else save)(repaired, target)
        return report
    reason = first_error or "; ".join(findings) or "no saved state was found"
    raise DamagedFileError(f"{source} cannot be repaired: {reason}") from first_error


def _states(source: Path, findings: list[str]) -> Iterator[dict[str, Any]]:
    """Every manifest that can be found, newest first."""
    manifest.check_is_saved(source)
    newest = None
    try:
        newest = manifest.read_tail(source) if source.is_file() else manifest.read(source)
        yield newest
    except ExtraBuffersError as error:
        findings.append(str(error))
    files = [source] if source.is_file() else sorted(source.glob("data-*.bin"), reverse=True)
    for path in files:
        if source.is_file() or manifest.FILE_NAMES.fullmatch(path.name):
            try:
                yield from (record for record in manifest.copies(path) if record != newest)
            except ExtraBuffersError as error:
                findings.append(str(error))


def _rebuild(saved: SavedParts, report: Repair, cls: type[Any] | None) -> Any:
    """What is intact of a save; ``report`` says what is not."""
    scan = DamageScan(saved)
    report.findings = scan.findings
    registry.check_target(saved.record.get("kind"), cls)
    if not scan.findings:
        return _replay_intact(saved, saved.load(cls, replayed=False), report)
    cut_parts = getattr(registry.module_of(saved.kind), "cut", None)
    if cut_parts is None:
        raise DamagedFileError(f"a damaged {saved.kind!r} cannot be cut to its intact part")
    columns = {name: column for name, (column, _) in scan.columns.items()}
    stores = {name: store for name, (store, _) in scan.stores.items()}
    bad_rows = {name: bad for name, (_, bad) in scan.columns.items() if bad.any()}
    bad_indices = {name: scan.lost(name) for name in stores}
    cut: Cut = cut_parts(
        LoadedParts(saved.kind, saved.record["description"], columns, stores, cls), bad_rows, bad_indices
    )
    report.n_steps, report.n_lost = cut.n_kept, cut.n_lost
    copies = {name: _copy_observations(store, cut.indices[name]) for name, store in stores.items()}
    return registry.from_parts(LoadedParts(saved.kind, cut.description, cut.columns, copies, cls))


def _replay_intact(saved: SavedParts, loaded: Any, report: Repair) -> Any:
    """Replay the journal up to its first damaged record."""
    if saved.journal is not None:
        try:
            replay(loaded, saved.journal)
        except DamagedFileError as error:
            report.findings.append(f"{error}; the steps before it are kept")
    report.n_steps = _count(loaded)
    return loaded


def _count(loaded: Any) -> int:
    """Steps of all environments, or observations of an array; 0 for what has neither."""
    if isinstance(loaded, StoreView):
        return math.prod(loaded.lead_shape)
    if hasattr(loaded, "memory_usage"):
        return int(loaded.memory_usage().transitions)
    return len(loaded) if hasattr(loaded, "__len__") else 0


def _copy_observations(store: ObservationStore, batches: list[Array]) -> ObservationStore:
    """A store like ``store`` that holds only these batches of indices."""
    copy = ObservationStore(store.spec, store.n_streams, store.method, store.options, store.heap_bytes)
    copy.allocate(store.n_obs)
    for batch in batches:
        indices = np.ascontiguousarray(batch, np.int64).reshape(-1)
        copy.write(indices, indices % store.n_streams, store.read(indices))
    return copy
