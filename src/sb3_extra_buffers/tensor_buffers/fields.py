"""The named tensors of a buffer: shapes and dtypes, and the checks of what is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.arguments import as_array, cast, check_count, check_flags
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import ArgumentError, SpecMismatchError

__all__ = ["Field", "parse_fields"]

Array = npt.NDArray[Any]

# fields that say whether an episode ended
_FLAGS = frozenset({"dones", "truncations"})


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


@dataclass(frozen=True)
class Field:
    """A named tensor of a transition: its shape without the environment, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one transition."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any] | None:
        """The corresponding NumPy dtype; None if there is none, as for bfloat16."""
        return _numpy_dtype(self.dtype)

    @property
    def is_image(self) -> bool:
        """Whether the field has dtype uint8 and at least two axes."""
        return self.dtype == torch.uint8 and len(self.shape) >= 2

    def obs_spec(self) -> ObsSpec:
        """Return the spec for a store of these observations."""
        dtype = self.numpy_dtype
        if dtype is None:
            raise ArgumentError(
                f"observations cannot be stored as {self.dtype}; choose another dtype for {self.name!r}"
            )
        return ObsSpec(self.shape, dtype)

    def check_observations(self, value: Any, name: str, n_envs: int, device: torch.device) -> Array | torch.Tensor:
        """Return contiguous observations of all environments: a tensor if they are on ``device``, else an array."""
        expected = (n_envs, *self.shape)
        if isinstance(value, torch.Tensor) and value.device == device and device.type == "cuda":
            if value.dtype != self.dtype or tuple(value.shape) != expected:
                raise _mismatch(name, expected, self.dtype, tuple(value.shape), value.dtype)
            return value.detach().contiguous()
        array = as_array(value, name)
        dtype = self.numpy_dtype
        if array.dtype == dtype and array.shape == expected:
            return np.ascontiguousarray(array)
        if array.shape != expected:
            raise _mismatch(name, expected, self.dtype, array.shape, array.dtype)
        try:
            return np.ascontiguousarray(self.obs_spec().to_batch(array))
        except SpecMismatchError:
            raise _mismatch(name, expected, self.dtype, array.shape, array.dtype) from None

    def check_values(self, value: Any, n_envs: int, device: torch.device) -> Array | torch.Tensor:
        """Return validated values of all environments: a tensor, or an array that is still to be uploaded."""
        name, expected = self.name, (n_envs, *self.shape)
        if not isinstance(value, torch.Tensor) and self.numpy_dtype is None:
            value = torch.from_numpy(as_array(value, name))
        if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or self.numpy_dtype is None):
            is_rounded = value.dtype.is_floating_point and self.dtype.is_floating_point
            if tuple(value.shape) != expected or not (value.dtype in (self.dtype, torch.bool) or is_rounded):
                raise _mismatch(name, expected, self.dtype, tuple(value.shape), value.dtype)
            if name in _FLAGS and value.device.type == "cpu" and value.dtype.is_floating_point:
                check_flags(value.detach().float().numpy(), name)  # a check on a GPU would mean waiting for it
            return value.detach().to(device, self.dtype).contiguous()
        array, dtype = as_array(value, name), self.numpy_dtype
        assert dtype is not None
        if array.shape != expected:
            raise _mismatch(name, expected, self.dtype, array.shape, array.dtype)
        values: Array = np.ascontiguousarray(array if array.dtype == dtype else cast(array, dtype, name))
        if name in _FLAGS:
            check_flags(values, name)
        return values


def _mismatch(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, got_shape: tuple[int, ...], got_dtype: Any
) -> SpecMismatchError:
    what = f"{name} must be {_plain(dtype)} of shape {shape} (environments first), got {_plain(got_dtype)} of shape"
    return SpecMismatchError(f"{what} {got_shape}; convert it before adding it")


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def parse_fields(specs: Any, observations: Sequence[str]) -> tuple[dict[str, Field], dict[str, Field]]:
    """The observations and the other fields of ``specs``, by name."""
    if not isinstance(specs, Mapping) or not specs:
        raise ArgumentError(f"specs must be a dict of name: (shape, dtype), got {specs!r}")
    fields = {name: _parse(name, spec) for name, spec in specs.items()}
    names = (observations,) if isinstance(observations, str) else tuple(observations)
    is_known = all(name in fields and f"next_{name}" not in names for name in names)
    if not is_known or not names or len(set(names)) < len(names):
        raise ArgumentError(
            f"observations must name some of {', '.join(map(repr, fields))}, each once; got {observations!r}"
        )
    for name in names:
        follower = fields.pop(f"next_{name}", None)
        if follower is not None and (follower.shape, follower.dtype) != (fields[name].shape, fields[name].dtype):
            raise ArgumentError(
                f"{follower.name!r} must have the shape and dtype of {name!r}, {fields[name].shape} and "
                f"{fields[name].dtype}; got {follower.shape} and {follower.dtype}"
            )
    stored = {name: fields.pop(name) for name in names}
    return stored, fields


def _parse(name: Any, spec: Any) -> Field:
    try:
        shape, dtype = spec
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
    except (TypeError, ValueError):
        raise ArgumentError(f"specs[{name!r}] must be a pair of shape and dtype, got {spec!r}") from None
    if isinstance(dtype, (type, str, np.dtype)):
        try:
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError:
            raise ArgumentError(f"specs[{name!r}] has dtype {dtype!r}, which torch does not have") from None
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"specs must be a dict of name: (shape, dtype), got {name!r}: {spec!r}")
    return Field(name, tuple(check_count(size, f"a size of specs[{name!r}]") for size in shape), dtype)
