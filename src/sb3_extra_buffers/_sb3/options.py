"""`StorageOptions`: the arguments that compressed buffers add to those of SB3."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch as th

from sb3_extra_buffers.arguments import check_dtypes, parse_bytes
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import ArgumentError, SpecMismatchError
from sb3_extra_buffers.stores.choice import add_preference, choose_unseen


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The arguments that compressed buffers add to those of SB3's; pass them to the buffer.

    Attributes:
        dtypes: What `find_buffer_dtypes` returned, or one such mapping for each key of a Dict. Observations are stored
            as ``elem_type`` where that is smaller than the dtype of the space, for example float32 from 0 to 255 as
            uint8; a value that would not survive exactly raises `SpecMismatchError`, and nothing is stored. Samples
            have the dtype of the space.
        normalize_images: Return image observations as float32 from 0 to 1. SB3's policies do that themselves, unless
            they are created with ``normalize_images=False``.
        compression_method: ``"auto"``, a method such as ``"delta"`` or ``"zstd-5"``, or one for each key.
        compression_kwargs: Options of that method.
        decompression_kwargs: Options for decoding; no method has any.
        output_dtype: ``"raw"`` to sample observations in the dtype of the space, ``"float"`` for float32.
        max_bytes: Upper limit for the memory of the buffer, in bytes or as a string such as ``"4GB"`` or ``"500 MiB"``;
            ``None`` for no limit.
        on_max_bytes: At the limit, ``"evict"`` drops the oldest transitions and ``"raise"`` refuses new ones.
        storage: ``"mmap"`` to keep the buffer in a folder, where every completed step survives the end of the process.
        path: The folder for ``"mmap"``, new or empty.
        prefer: ``"memory"`` or ``"speed"``: lets ``"auto"`` choose a smaller or a faster method than by default.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import CompressedReplayBuffer
        >>> options = {"compression_method": "zstd-5", "max_bytes": "4GB"}
        >>> model = DQN(
        ...     "MlpPolicy", "CartPole-v1", replay_buffer_class=CompressedReplayBuffer, replay_buffer_kwargs=options
        ... )
        >>> model.replay_buffer.storage_options.compression_method
        'zstd-5'
    """

    dtypes: Mapping[str, Any] | None = None
    normalize_images: bool = False
    compression_method: str | Mapping[str, str] = "auto"
    compression_kwargs: Mapping[str, Any] | None = None
    decompression_kwargs: Mapping[str, Any] | None = None
    output_dtype: Literal["raw", "float"] = "raw"
    max_bytes: int | str | None = None
    on_max_bytes: Literal["evict", "raise"] = "evict"
    storage: Literal["memory", "mmap"] = "memory"
    path: str | os.PathLike[str] | None = None
    prefer: Literal["memory", "speed"] | None = None
    # max_bytes for one of the two reactions, so that `add` looks at one attribute only
    evict_above: int | None = field(init=False, repr=False, default=None)
    raise_above: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.output_dtype not in ("raw", "float"):
            raise ArgumentError(f"output_dtype must be 'raw' or 'float', got {self.output_dtype!r}")
        if self.on_max_bytes not in ("evict", "raise"):
            raise ArgumentError(f"on_max_bytes must be 'evict' or 'raise', got {self.on_max_bytes!r}")
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes, "max_bytes"))
        if self.storage not in ("memory", "mmap") or (self.storage == "mmap") != (self.path is not None):
            raise ArgumentError(
                f"storage must be 'memory', or 'mmap' with the path of a folder; got {self.storage!r}, {self.path!r}"
            )
        if self.path is not None:
            object.__setattr__(self, "path", os.fspath(self.path))
        if not isinstance(self.compression_method, (str, Mapping)):
            raise ArgumentError(
                f"compression_method must be a string, or a dict with one per key; got {self.compression_method!r}"
            )
        if self.prefer is not None:
            # stored as an option of "auto", so that it is saved with the others
            options = add_preference(self.prefer, self.compression_kwargs, self.compression_method)
            object.__setattr__(self, "compression_kwargs", options)
        for name in ("dtypes", "compression_method", "compression_kwargs", "decompression_kwargs"):
            # other mappings may change later, or cannot be pickled or saved
            object.__setattr__(self, name, _as_dict(getattr(self, name)))
        object.__setattr__(self, f"{self.on_max_bytes}_above", self.max_bytes)

    def check_keys(self, keys: Collection[str]) -> None:
        """Raise if `compression_method` or `dtypes` has a key that the observations do not have."""
        methods, dtypes = self.compression_method, check_dtypes(self.dtypes) or {}
        per_key = {
            "compression_method has a method": () if isinstance(methods, str) else methods,
            "dtypes has a dtype": () if dtypes.keys() & {"elem_type", "runs_type"} else dtypes,
        }
        for what, given in per_key.items():
            unknown = [key for key in given if key not in keys]
            if unknown:
                raise ArgumentError(
                    f"{what} for {', '.join(map(repr, unknown))}, "
                    f"but the keys of the observations are {', '.join(map(repr, keys))}"
                )

    def method_for(self, key: str, spec: ObsSpec) -> str:
        """The method for one key, ``""`` for a Box; a single method for a Dict applies to its images."""
        if not isinstance(self.compression_method, str):
            return self.compression_method.get(key, "auto")
        return "none" if key and choose_unseen(spec) is not None else self.compression_method

    def options_for(self, method: str) -> Mapping[str, Any] | None:
        """The options that apply to ``method``, which may be that of one key of a Dict.

        ``prefer`` applies to ``"auto"``, all other options to other methods. Uncompressed keys have no options.
        """
        options, methods = self.compression_kwargs, self.compression_method
        if options is None or method == methods:
            return options
        if isinstance(methods, str) or method == "none":
            return None
        if set(methods.values()) <= {"auto"}:
            return options
        return {name: value for name, value in options.items() if (name == "prefer") == (method == "auto")}

    def stored_dtype(self, key: str, spec: ObsSpec) -> np.dtype[Any]:
        """The dtype to store observations of ``spec`` in: ``elem_type`` if it is smaller, else that of the space."""
        dtypes = check_dtypes(self.dtypes)
        if dtypes is not None and key:
            if "elem_type" not in dtypes:
                dtypes = check_dtypes(dtypes.get(key), f" of key {key!r}")
            elif len(spec.shape) < 2:
                dtypes = None  # a single mapping for a Dict applies to its images
        elem_type = None if dtypes is None else dtypes.get("elem_type")
        if elem_type is None:
            return spec.dtype
        stored = _as_numpy_dtype(elem_type)
        if stored.kind in "biuf" and spec.dtype.kind in "biuf":
            if stored.itemsize < spec.dtype.itemsize:
                return stored
            if np.can_cast(spec.dtype, stored, "safe"):
                return spec.dtype
        where = f" of key {key!r}" if key else ""
        raise SpecMismatchError(
            f"dtypes['elem_type'] is {stored}, but the observation space{where} has {spec.dtype}; pass a smaller "
            "dtype, or leave dtypes out"
        )


def _as_dict(options: Any) -> Any:
    """A mapping, and those in it, as new dicts; any other value as it is."""
    if not isinstance(options, Mapping):
        return options
    return {name: _as_dict(value) for name, value in options.items()}


def _as_numpy_dtype(elem_type: Any) -> np.dtype[Any]:
    """A dtype of NumPy's or torch's as NumPy's."""
    try:
        return np.dtype(th.empty(0, dtype=elem_type).numpy().dtype if isinstance(elem_type, th.dtype) else elem_type)
    except (TypeError, ValueError) as problem:
        raise SpecMismatchError(f"dtypes['elem_type'] is {elem_type!r}, which NumPy does not have: {problem}") from None


#: Names of the arguments.
OPTION_NAMES = frozenset(option.name for option in fields(StorageOptions) if option.init)
