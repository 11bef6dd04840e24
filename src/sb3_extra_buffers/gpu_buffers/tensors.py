"""Checks of the arguments of ``add`` that are tensors on the device; their values are not inspected."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

import numpy as np
import torch as th

from sb3_extra_buffers._sb3.steps import fit_column, fit_flags, fit_truncations
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.gpu_buffers.utils import torch_dtype_to_numpy
from sb3_extra_buffers.stores.device_base import is_on

__all__ = ["fit_action_tensor", "fit_flag_numbers", "fit_numbers", "fit_observation_tensor", "fit_timeouts"]

_KEY = "TimeLimit.truncated"
_KEYS, _FALSE = repeat(_KEY), repeat(False)
_EMPTY: dict[str, Any] = {}
_AS_THEY_ARE = frozenset({th.float32, th.bool})


def fit_numbers(values: Any, n_envs: int, name: str, device: th.device | None) -> Any:
    """One number for each environment: an array or, for a tensor on ``device``, a contiguous tensor."""
    if device is None or not isinstance(values, th.Tensor) or not is_on(values, device):
        return fit_column(values, n_envs, name)
    # fast path: skip validation when everything already matches
    if values.dtype in _AS_THEY_ARE and values.shape == (n_envs,) and values.is_contiguous():
        return values.detach() if values.requires_grad else values
    if values.dtype.is_complex:
        raise SpecMismatchError(f"{name} has dtype {values.dtype}; pass a number for each of {n_envs} environments")
    if values.shape not in ((n_envs,), (1, n_envs)) and values.numel() != 1:
        raise SpecMismatchError(
            f"{name} has shape {tuple(values.shape)}, but there are {n_envs} environments; check n_envs"
        )
    dtype = values.dtype if values.dtype in _AS_THEY_ARE else th.float32
    return values.detach().to(dtype).reshape(-1).expand(n_envs).contiguous()


def fit_flag_numbers(values: Any, n_envs: int, name: str, device: th.device | None) -> Any:
    """Like `fit_numbers`, for whether episodes ended or began; NaN is refused unless that means waiting for a GPU."""
    flags = fit_numbers(values, n_envs, name, device)
    return flags if isinstance(flags, th.Tensor) else fit_flags(flags, n_envs, name)


def fit_action_tensor(actions: th.Tensor, shape: tuple[int, ...], dtype: th.dtype) -> th.Tensor | None:
    """Actions in ``shape`` and ``dtype``; None if that could change values other than by rounding floats."""
    # fast path: skip validation when everything already matches
    if actions.dtype is dtype and actions.is_contiguous() and not actions.requires_grad:
        if actions.shape == shape:
            return actions
        if actions.shape == shape[:1] and shape[1:] == (1,):
            return actions.view(shape)
    if actions.dtype != dtype:
        is_float = actions.dtype.is_floating_point, dtype.is_floating_point
        # other integers are converted: an action that is in the space fits its dtype
        if actions.dtype.is_complex or is_float == (True, False) or dtype == th.bool:
            return None
    try:
        actions = actions.detach().reshape(shape)
    except RuntimeError:
        raise SpecMismatchError(
            f"action has shape {tuple(actions.shape)}, expected {shape}: (n_envs, numbers per action); check n_envs "
            "and the action space"
        ) from None
    return actions.to(dtype).contiguous()


def fit_observation_tensor(
    observations: th.Tensor, shape: tuple[int, ...], dtype: th.dtype, device: th.device, name: str
) -> th.Tensor | None:
    """Observations in ``shape`` and ``dtype``; None if that could change values other than by rounding floats."""
    given = observations.dtype
    if given != dtype and not (given.is_floating_point and dtype.is_floating_point):
        if given.is_complex or not np.can_cast(torch_dtype_to_numpy(given), torch_dtype_to_numpy(dtype), "safe"):
            return None
    elif given.is_floating_point and given.itemsize > dtype.itemsize:
        return None  # may overflow
    observations = observations.detach()
    if observations.shape != shape:
        # Discrete observations come without their last axis
        if observations.shape == shape[:1] and shape[1:] == (1,):
            observations = observations.reshape(shape)
        try:
            observations = observations.expand(shape)
        except RuntimeError:
            raise SpecMismatchError(
                f"{name} has shape {tuple(observations.shape)}, expected {shape}: (n_envs, *observation shape); check "
                "n_envs and the observation space"
            ) from None
    # waits for a copy from the host, whose memory the caller may overwrite
    return observations.to(device, dtype).contiguous()


def fit_timeouts(infos: Any, n_envs: int, device: th.device | None) -> Any:
    """Whether each environment was truncated; None if none was.

    ``infos`` are the environments' dicts, or a dict with ``"TimeLimit.truncated"`` for all of them; None or nothing if
    no episode was truncated.
    """
    if infos is None or (isinstance(infos, (list, tuple, dict)) and not infos):
        return None
    if isinstance(infos, Mapping):
        if _KEY not in infos:
            raise SpecMismatchError(f"infos, a dict, must have {_KEY!r}, a bool for each of {n_envs} environments")
        return fit_flag_numbers(infos[_KEY], n_envs, f"infos[{_KEY!r}]", device)
    if type(infos) is list:
        # fast path: no bytecode per environment
        try:
            if not infos[0] and infos.count(_EMPTY) == n_envs == len(infos):
                return None
            if list(map(dict.get, infos, _KEYS, _FALSE)).count(False) == n_envs == len(infos):
                return None
        except (TypeError, ValueError):
            pass  # looked at one by one below
    truncated = fit_truncations(infos, n_envs)
    # a list of bools, or an array
    return None if type(truncated) is list and True not in truncated else truncated
