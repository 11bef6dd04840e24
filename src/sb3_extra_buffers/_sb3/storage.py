"""What compressed buffers of every kind have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th

from sb3_extra_buffers._sb3.algorithm import check_loaded
from sb3_extra_buffers._sb3.leaves import Array, take_decoded
from sb3_extra_buffers._sb3.options import OPTION_NAMES, StorageOptions
from sb3_extra_buffers.errors import UnsupportedVersionError
from sb3_extra_buffers.files.folders import SavedAsFolder

#: version of what is pickled
STATE_VERSION = 1

# what a buffer that lives in a file, or was opened to be read, has beyond its own; a copy of it has nothing of that
_OF_FILES = frozenset({"add", "extend", "reset", "_live"})


class CompressedStorage(SavedAsFolder):
    """Options, tensors and pickles."""

    _options: StorageOptions

    if TYPE_CHECKING:
        device: th.device

    def _take_options(self, **options: Any) -> None:
        """Remember how observations are to be kept; who comes first is right (`OptionsFirst`)."""
        if "_options" not in self.__dict__:
            self._options = StorageOptions(**options)

    # ---- tensors ----

    def to_torch(self, array: Any, copy: bool = True) -> Any:
        """`BaseBuffer.to_torch`; observations that were just decoded are not copied once more."""
        if isinstance(array, dict):
            return {key: self.to_torch(part, copy) for key, part in array.items()}
        if take_decoded(array):
            return self._to_torch(array)
        return super().to_torch(array, copy)  # type: ignore[misc]  # SB3's BaseBuffer comes after this class

    def _obs_to_torch(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self._obs_to_torch(part) for key, part in observations.items()}
        return self._convert(self._to_torch(observations))

    def _as_asked(self, samples: Any) -> Any:
        """Samples with their observations in the dtype that ``output_dtype`` and ``normalize_images`` ask for."""
        options = self._options
        if options.output_dtype == "raw" and not options.normalize_images:
            return samples
        names = {"observations", "next_observations"} & set(samples._fields)
        return samples._replace(**{name: self._convert(getattr(samples, name)) for name in names})

    def _convert(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self._convert(part) for key, part in observations.items()}
        if self._options.normalize_images and observations.dtype == th.uint8 and observations.ndim >= 4:
            return observations.float() / 255.0
        return observations.float() if self._options.output_dtype == "float" else observations

    def _to_torch(self, array: Array) -> th.Tensor:
        """A tensor of the buffer's device; on the CPU it takes over the array's memory."""
        tensor = th.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    # ---- files ----

    def _settle_in_file(self) -> None:
        """Begin to live in a file if that was asked for; with the first step, when everything has been set up."""
        if self._options.storage != "mmap" or self._options.path is None:
            return
        from sb3_extra_buffers.files.live import StartsInFile, check_new

        vars(self)["add"] = StartsInFile(self, check_new(self._options.path))

    # ---- pickles ----

    def __getstate__(self) -> dict[str, Any]:
        return self._with_version(self.__dict__)

    @staticmethod
    def _with_version(state: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in state.items() if name not in _OF_FILES}
        return kept | {"_state_version": STATE_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        self.__dict__.update(state)

    def _check_state(self, state: dict[str, Any]) -> None:
        version = state.pop("_state_version", 0)
        if version > STATE_VERSION:
            raise UnsupportedVersionError(
                f"this {type(self).__name__} was saved in version {version} of its layout, the newest known here is "
                f"{STATE_VERSION}; update sb3-extra-buffers"
            )
        check_loaded(self, state)


class OptionsFirst:
    """For classes that stand before ours and know nothing of its options.

    Takes the options before a constructor that would not pass them on, and applies them to samples that were made
    without us.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        taken = {name: kwargs.pop(name) for name in OPTION_NAMES & kwargs.keys()}
        self._options = StorageOptions(**taken)
        super().__init__(*args, **kwargs)

    def _get_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples = super()._get_samples(*args, **kwargs)  # type: ignore[misc]  # this stands before a buffer
        return self._as_asked(samples)  # type: ignore[attr-defined]  # behind which is a CompressedStorage
