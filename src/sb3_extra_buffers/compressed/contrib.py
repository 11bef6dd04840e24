"""sb3-contrib's rollout buffers with compressed observations; needs ``sb3-contrib``."""

from __future__ import annotations

from typing import Any

from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer

from sb3_extra_buffers._sb3.rollout import ContribRollout
from sb3_extra_buffers.compressed.buffers import CompressedDictRolloutBuffer, CompressedRolloutBuffer

__all__ = [
    "CompressedMaskableDictRolloutBuffer",
    "CompressedMaskableRolloutBuffer",
    "CompressedRecurrentDictRolloutBuffer",
    "CompressedRecurrentRolloutBuffer",
    "use_rollout_buffer",
]


class CompressedMaskableRolloutBuffer(ContribRollout, MaskableRolloutBuffer, CompressedRolloutBuffer):
    """`MaskableRolloutBuffer` with compressed observations."""


class CompressedMaskableDictRolloutBuffer(ContribRollout, MaskableDictRolloutBuffer, CompressedDictRolloutBuffer):
    """`MaskableDictRolloutBuffer` with compressed observations."""


class CompressedRecurrentRolloutBuffer(ContribRollout, RecurrentRolloutBuffer, CompressedRolloutBuffer):
    """`RecurrentRolloutBuffer` with compressed observations; pass it to `use_rollout_buffer`."""


class CompressedRecurrentDictRolloutBuffer(ContribRollout, RecurrentDictRolloutBuffer, CompressedDictRolloutBuffer):
    """`RecurrentDictRolloutBuffer` with compressed observations; pass it to `use_rollout_buffer`."""


def use_rollout_buffer(model: Any, buffer_class: type[Any], **options: Any) -> None:
    """Replace the rollout buffer of ``model`` with an empty ``buffer_class`` of the same settings.

    ``RecurrentPPO`` has no ``rollout_buffer_class`` argument. Call this after creating the model, and again after
    loading it.

    Args:
        model: A model with a rollout buffer.
        buffer_class: The class of the new buffer.
        **options: Arguments that compressed buffers add, such as ``compression_method``.

    Examples:
        >>> model = RecurrentPPO("CnnLstmPolicy", env)  # doctest: +SKIP
        >>> use_rollout_buffer(model, CompressedRecurrentRolloutBuffer)  # doctest: +SKIP
    """
    old = model.rollout_buffer
    if hasattr(old, "hidden_state_shape"):
        options["hidden_state_shape"] = old.hidden_state_shape
    model.rollout_buffer = buffer_class(
        old.buffer_size,
        old.observation_space,
        old.action_space,
        device=old.device,
        gae_lambda=old.gae_lambda,
        gamma=old.gamma,
        n_envs=old.n_envs,
        **options,
    )
