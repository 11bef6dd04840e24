"""Custom operators, which `torch.compile` does not trace into: sampling, and updating priorities."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["register", "sample_into", "update_priorities"]

# operators take tensors and numbers, so a buffer is passed as a number
_buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(buffer: Any) -> int:
    """Give ``buffer`` a number to pass to the operators."""
    number = next(_numbers)
    _buffers[number] = buffer
    return number


def _sample_into(number: int, outs: Sequence[torch.Tensor]) -> None:
    """Fill ``outs`` with a batch of the buffer ``number``."""
    _buffers[number].fill_outputs(outs)


def _update_priorities(number: int, state: torch.Tensor, indices: torch.Tensor, td_errors: torch.Tensor) -> None:
    """Update priorities; ``state`` orders updates and samples among themselves."""
    _buffers[number].write_priorities(indices, td_errors)


def _no_result(*_args: Any) -> None:
    """The fake implementation of both operators: they return nothing."""


# torch before 2.4 has no custom operators and traces into the functions
sample_into: Any = _sample_into
update_priorities: Any = _update_priorities
if hasattr(torch.library, "custom_op"):
    sample_into = torch.library.custom_op(
        "sb3_extra_buffers::sample_into",
        _sample_into,
        mutates_args=("outs",),
        schema="(int number, Tensor(a1!)[] outs) -> ()",
    )
    update_priorities = torch.library.custom_op(
        "sb3_extra_buffers::update_priorities",
        _update_priorities,
        mutates_args=("state",),
        schema="(int number, Tensor(a1!) state, Tensor indices, Tensor td_errors) -> ()",
    )
    sample_into.register_fake(_no_result)
    update_priorities.register_fake(_no_result)
