"""Which method stores observations: the one that the user named, or with ``auto`` the best of a trial."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.codecs.table import find_unit
from sb3_extra_buffers.errors import CodecOptionError, ExtraBuffersError
from sb3_extra_buffers.kernels.policy import JOIN_NS, SB3_ADD_NS, SB3_READ_NS, SB3_WRITE_NS
from sb3_extra_buffers.stores.base import Indices, Trial
from sb3_extra_buffers.stores.frame_tables import FrameTables
from sb3_extra_buffers.stores.layout import StackLayout, find_layout
from sb3_extra_buffers.stores.registry import Place, find_store
from sb3_extra_buffers.stores.tables import TableStore

# smaller observations stay uncompressed: looking them up costs more than compression saves
_SMALL_BYTES = 512
# observations to try methods on: enough to see a stack advance, few enough to hold uncompressed
_TRIAL_BYTES = 4 << 20
_MIN_TRIAL, _MAX_TRIAL = 16, 256
# consecutive observations of a stream that are tried together. In shorter runs the first frames, which take more bytes
# than those that follow, would count too much
_RUN = 32

#: What ``prefer`` may be, and the exponents of memory and time in the score of a method.
PREFERENCES: dict[str | None, tuple[float, float]] = {None: (1.0, 1.0), "memory": (3.0, 1.0), "speed": (1.0, 3.0)}
# of methods with equal scores, the first wins
_CANDIDATES = ("none", "delta", "scroll", "camera", "zstd1", "gzip1")
# for images with few colours, and for numbers with few distinct values
_PALETTES = tuple(f"palette:{inner}" for inner in ("none", "delta", "scroll"))
_TABLES = tuple(f"table:{inner}" for inner in ("none", "delta", "scroll", "camera"))
# smaller and several times slower
_MEMORY_CANDIDATES = ("delta2", "delta3", "scroll2", "scroll3")
# camera, whose kernels take seconds to compile, is not tried if another method takes less than 1/8 of a frame
_CAMERA_SHARE = 8
# a method must save at least a tenth
_WORTH = 0.9
# transitions are read this many times for each time that they are written, for example by DQN
_READS_PER_WRITE = 8
# limits of `sample` and `add`, relative to SB3; the score multiplies the time by the factor beyond a limit
_MAX_SAMPLE, _MAX_ADD = 2, 4
# bytes in the tables of a frame store: per frame, and per frame of a stack (4 for an observation, 4 for its successor)
_FRAME_INDEX, _STACK_INDEX = 8, 8
# a method replaces the one in use if its score is less than _BETTER times that of the one in use; a method is ruled out
# early if its score is more than _RULED_OUT times the best
_BETTER, _RULED_OUT = 0.85, 3.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, and why it was chosen (empty if the user named it)."""

    method: str
    why: str

    @property
    def is_raw(self) -> bool:
        """Whether observations are stored uncompressed."""
        return self.method == "none"


def may_be_stacked(spec: ObsSpec) -> bool:
    """Whether observations may be stacks of frames; vectors and small observations are not treated as such."""
    return len(spec.shape) >= 2 and spec.nbytes >= _SMALL_BYTES


def choose_unseen(spec: ObsSpec) -> Choice | None:
    """The choice of ``auto`` where no trial is needed: vectors and other small observations stay uncompressed."""
    if not may_be_stacked(spec):
        return Choice("none", f"auto: {spec.nbytes} bytes are too few to compress")
    return None


class Candidate(NamedTuple):
    """A method with the result of its trial, and its score: lower is better."""

    method: str
    trial: Trial
    score: float

    def __str__(self) -> str:
        return f"{self.method} {self.trial.frame_bytes:.0f} ({self.trial.read_ns / 1e3:.3g} us)"


class MethodChoice:
    """Chooses the method of one store; host and device stores use the same rules.

    ``choice`` is known from the start where the user named a method or no trial is needed, else None: then `n_trial`
    observations are collected for `decide`. The object never changes, so that a store can undo a decision together
    with the write that led to it.
    """

    def __init__(self, spec: ObsSpec, method: str = "auto", options: Mapping[str, Any] | None = None) -> None:
        self.spec, self.method, self.options = spec, method, dict(options or {})
        self.choice: Choice | None
        if method == "auto":
            _check_preference(self.options)
            self.choice = choose_unseen(spec)
        else:
            # fail now, not at step 3,000,000
            codec = get_codec(method, **self.options).bind(spec)
            self.choice = Choice("none" if codec.codec_id == "none" else method, "")
        if spec.nbytes == 0:
            self.choice = Choice("none", "observations are empty")

    @property
    def prefer(self) -> str | None:
        """``"memory"`` or ``"speed"`` if the user prefers one of them, else None."""
        return self.options.get("prefer") if self.method == "auto" else None

    @property
    def codec_options(self) -> dict[str, Any]:
        """The options of the codec."""
        return {} if self.method == "auto" else self.options

    def n_trial(self, n_obs: int, heap_bytes: int | None = None) -> int:
        """How many observations to collect first, for a store of ``n_obs`` that may hold ``heap_bytes``."""
        n_trial = min(max(_TRIAL_BYTES // self.spec.nbytes, _MIN_TRIAL), _MAX_TRIAL, max(n_obs // 2, 1))
        return n_trial if heap_bytes is None else min(n_trial, heap_bytes // self.spec.nbytes + 1)

    def decide(
        self, streams: Indices, rows: ByteRows, n_streams: int, may_stay_dense: bool = True, place: Place = "cpu"
    ) -> tuple[StackLayout, Choice | None]:
        """Return the layout of ``rows`` and the method for them; None if there are no rows to try methods on.

        Row ``i`` belongs to ``streams[i]``. ``may_stay_dense`` is whether ``auto`` may leave rows uncompressed. With
        ``place="cuda"``, only methods that the GPU can decode are tried.
        """
        if self.choice is not None or not len(rows):
            return _layout(self.spec, streams, rows), self.choice
        methods = None if place == "cpu" else _decoded_on_device
        layout, ranked = compare(self.spec, streams, rows, n_streams, self.prefer, may_stay_dense, methods)
        return layout, Choice(ranked[0].method, explain(layout, ranked))

    def decide_again(
        self,
        runs: Indices,
        rows: ByteRows,
        now: Choice,
        layout_now: StackLayout,
        may_stay_dense: bool = True,
    ) -> tuple[StackLayout, Choice] | None:
        """Return the layout and the method to change to, or None if those in use are about as good.

        Row ``i`` belongs to run ``runs[i]``: a few consecutive observations of one stream, from any part of the store.
        """
        layout = _layout(self.spec, runs, rows)
        if layout.stack < layout_now.stack:
            layout = layout_now  # short runs may not show that observations are stacked
        n_runs = int(runs.max()) + 1
        # a quarter of the runs is enough to rule out most methods
        few, methods = runs % 4 == min(2, n_runs - 1), None
        for part in (few, np.ones_like(few)) if few.any() else (~few,):
            arguments = runs[part], rows[part], n_runs, self.prefer, may_stay_dense
            ranked = rank(layout, *arguments, methods)
            same = [each for each in ranked if each.method == now.method and layout == layout_now]
            current = (same or rank(layout_now, *arguments, (now.method,)))[0]
            limit = _RULED_OUT * min(ranked[0].score, current.score)
            methods = tuple(each.method for each in ranked if each.score < limit)
            if layout == layout_now and not set(methods) - {now.method}:
                return None
        if ranked[0].score > _BETTER * current.score:
            return None
        return layout, Choice(ranked[0].method, explain(layout, ranked))

    def make_codec(self, choice: Choice, layout: StackLayout) -> Codec:
        """The codec of ``choice`` for frames of ``layout``."""
        return get_codec(choice.method, **self.codec_options).bind(layout.frame_spec)

    @staticmethod
    def describe(choice: Choice | None, in_use: str) -> str:
        """The method ``in_use`` and why it was chosen."""
        return f"{in_use} ({choice.why})" if choice is not None and choice.why else in_use

    def describe_pending(self, n_collected: int, n_trial: int) -> str:
        """The user's method, while ``n_collected`` observations are held for `decide`."""
        event = "the method is chosen" if self.choice is None else "compression starts"
        return f"{self.method} (not compressed yet: {event} after {n_trial} observations, {n_collected} so far)"


def _layout(spec: ObsSpec, streams: Indices, rows: ByteRows) -> StackLayout:
    return find_layout(spec, [rows[streams == stream] for stream in np.unique(streams)])


def compare(
    spec: ObsSpec,
    streams: Indices,
    rows: ByteRows,
    n_streams: int,
    prefer: str | None = None,
    may_stay_dense: bool = True,
    methods: Sequence[str] | Callable[[StackLayout, str | None], Sequence[str]] | None = None,
) -> tuple[StackLayout, list[Candidate]]:
    """Return the layout of ``rows``, and the methods as `rank` orders them. Of many rows, only some runs are tried."""
    layout = _layout(spec, streams, rows)
    if len(rows) > 2 * _MAX_TRIAL:
        streams, rows = _spread(streams, rows)
        n_streams = int(streams.max()) + 1
    if callable(methods):
        methods = methods(layout, prefer)
    return layout, rank(layout, streams, rows, n_streams, prefer, may_stay_dense, methods)


def _decoded_on_device(layout: StackLayout, prefer: str | None) -> list[str]:
    """The candidates that a GPU can decode."""
    methods = []
    for method in candidates(layout.frame_spec, prefer):
        with contextlib.suppress(ExtraBuffersError):
            store = find_store(get_codec(method).bind(layout.frame_spec), layout, "cuda")
            if not store.location:
                methods.append(method)
    return methods


def _spread(streams: Indices, rows: ByteRows) -> tuple[Indices, ByteRows]:
    """Select runs of consecutive rows of a stream, spread over all ``rows``; return each one's run, and the rows."""
    present = np.unique(streams)
    per_stream = max(_MAX_TRIAL // _RUN // len(present), 1)
    runs = []
    for stream in present[:: max(len(present) * _RUN // _MAX_TRIAL, 1)]:
        of_stream = np.flatnonzero(streams == stream)
        begins = np.linspace(0, max(len(of_stream) - _RUN, 0), per_stream).astype(np.int64)
        runs += [of_stream[begin : begin + _RUN] for begin in begins]
    chosen = np.concatenate(runs)
    numbers = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    # in the order in which they were written
    times = np.concatenate([np.arange(len(run)) for run in runs])
    order = np.argsort(times, kind="stable")
    return numbers[order], rows[chosen[order]]


def add_preference(
    prefer: str | None, options: Mapping[str, Any] | None, methods: str | Mapping[Any, str] | None
) -> dict[str, Any]:
    """Return ``options`` together with ``prefer``, which is an error if ``methods`` names a method."""
    if prefer is None:
        return dict(options or {})
    if isinstance(methods, str | None) and methods != "auto":
        raise CodecOptionError(
            f"prefer={prefer!r} is for compression_method='auto', got {methods!r}; pass only one of the two"
        )
    if (options or {}).get("prefer", prefer) != prefer:
        raise CodecOptionError(f"prefer={prefer!r} contradicts compression_kwargs={options!r}; pass only one of them")
    added = {**(options or {}), "prefer": prefer}
    _check_preference({"prefer": prefer})
    return added


def _check_preference(options: Mapping[str, Any]) -> None:
    """Raise unless ``prefer``, the only option of ``auto``, is valid."""
    unknown = [name for name in options if name != "prefer"]
    if unknown:
        raise CodecOptionError(
            f"compression_method='auto' has no option {', '.join(map(repr, unknown))}, only 'prefer'; "
            "name a method to use its options"
        )
    prefer = options.get("prefer")
    if not (prefer is None or isinstance(prefer, str)) or prefer not in PREFERENCES:
        raise CodecOptionError(f"prefer must be 'memory' or 'speed', got {prefer!r}")


def candidates(spec: ObsSpec, prefer: str | None = None) -> tuple[str, ...]:
    """The methods that ``auto`` considers for frames of ``spec``; `rank` leaves out those that cannot be used."""
    methods = list(_CANDIDATES)
    if is_available("zstd"):
        methods.remove("gzip1")  # larger and slower in every case
    if find_unit(spec) is not None:
        methods += _PALETTES if spec.dtype.itemsize == 1 else _TABLES
    if prefer == "memory":
        methods += _MEMORY_CANDIDATES
    return tuple(methods)


def score(trial: Trial, layout: StackLayout, prefer: str | None = None, method: str = "") -> float:
    """Memory times time of a method, lower is better; ``prefer`` gives one of the two more weight.

    Memory includes a frame's share of the tables. Time is that of reading, plus a part of that of writing. If `sample`
    takes more than twice as long as SB3's, or `add` more than four times as long, the time is multiplied by the factor
    by which the limit is exceeded.

    Uncompressed frames, or indices of a palette or table, count as if they were read at the slowest acceptable speed,
    although they are read much faster: speed beyond SB3's does not justify several times the memory.
    ``prefer="speed"`` counts their actual speed.
    """
    copied = 2 * layout.spec.nbytes
    max_read, max_add = _MAX_SAMPLE * SB3_READ_NS * copied, _MAX_ADD * (SB3_ADD_NS + SB3_WRITE_NS * copied)
    nbytes = trial.frame_bytes + _FRAME_INDEX + _STACK_INDEX * layout.stack
    is_raw = trial.frame_bytes >= layout.frame_bytes or method.endswith(":none")
    time_ns = max(trial.read_ns, max_read) if is_raw and prefer != "speed" else trial.read_ns
    time_ns += trial.write_ns / _READS_PER_WRITE
    time_ns *= max(trial.read_ns / max_read, 1.0) * max(trial.step_ns / max_add, 1.0)
    for_memory, for_time = PREFERENCES[prefer]
    return float(nbytes**for_memory * time_ns**for_time)


def rank(
    layout: StackLayout,
    streams: Indices,
    rows: ByteRows,
    n_streams: int,
    prefer: str | None = None,
    may_stay_dense: bool = True,
    methods: Sequence[str] | None = None,
) -> list[Candidate]:
    """Try ``methods`` on ``rows``, by default all that `auto` considers; return the best first.

    Methods that do not save a tenth come last, after ``none``. Methods that do not fit these observations, or whose
    package is missing, are left out.
    """
    size = layout.frame_bytes
    ranked: list[Candidate] = []
    for method in candidates(layout.frame_spec, prefer) if methods is None else methods:
        if method == "camera" and any(_CAMERA_SHARE * each.trial.frame_bytes < size for each in ranked):
            continue
        try:
            codec = get_codec(method).bind(layout.frame_spec)
        except ExtraBuffersError:
            continue
        if method.endswith(":none") and layout.stack == 1:
            continue  # only for stacks
        store = find_store(codec, layout)
        if codec.codec_id == "palette" and not issubclass(store, TableStore):
            continue  # not images
        if method == "none" and not (may_stay_dense or issubclass(store, FrameTables)):
            continue  # only frame stores free the memory of erased observations
        trial = store.trial(layout, codec, streams, rows, n_streams)
        if layout.pixel_bytes:  # stacked along the last axis
            trial = trial._replace(read_ns=trial.read_ns + JOIN_NS * 2 * layout.spec.nbytes)
        ranked.append(Candidate(method, trial, score(trial, layout, prefer, method)))

    def order(candidate: Candidate) -> tuple[bool, float]:
        pays = candidate.method == "none" or candidate.trial.frame_bytes <= _WORTH * size
        return not pays, candidate.score

    return sorted(ranked, key=order)


def explain(layout: StackLayout, ranked: Sequence[Candidate], n_shown: int = 3) -> str:
    """Why the first of ``ranked`` was chosen."""
    tried = ", ".join(map(str, ranked[:n_shown]))
    return f"auto: {layout}; bytes for a frame of {layout.frame_bytes}: {tried}"
