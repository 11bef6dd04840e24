"""sb3-contrib's rollout buffers with compressed observations; needs ``sb3-contrib``."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces
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
    """sb3-contrib's `MaskableRolloutBuffer` with compressed observations.

    Takes the arguments of `CompressedRolloutBuffer`.

    Examples:
        >>> from sb3_contrib import MaskablePPO
        >>> from sb3_contrib.common.envs import InvalidActionEnvDiscrete
        >>> from sb3_extra_buffers.compressed import CompressedMaskableRolloutBuffer
        >>> env = InvalidActionEnvDiscrete()
        >>> model = MaskablePPO("MlpPolicy", env, rollout_buffer_class=CompressedMaskableRolloutBuffer)
    """


class CompressedMaskableDictRolloutBuffer(ContribRollout, MaskableDictRolloutBuffer, CompressedDictRolloutBuffer):
    """sb3-contrib's `MaskableDictRolloutBuffer` with compressed observations.

    Takes the arguments of `CompressedRolloutBuffer`.

    Examples:
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedMaskableDictRolloutBuffer
        >>> space = spaces.Dict({"image": spaces.Box(0, 255, (4, 84, 84), "uint8"), "speed": spaces.Box(0, 1, (3,))})
        >>> buffer = CompressedMaskableDictRolloutBuffer(128, space, spaces.Discrete(6), n_envs=8)
    """


class CompressedRecurrentRolloutBuffer(ContribRollout, RecurrentRolloutBuffer, CompressedRolloutBuffer):
    """sb3-contrib's `RecurrentRolloutBuffer` with compressed observations; pass it to `use_rollout_buffer`.

    Takes the arguments of `CompressedRolloutBuffer`, and ``hidden_state_shape``, the shape of a rollout's LSTM states.

    Examples:
        >>> from sb3_contrib import RecurrentPPO
        >>> from sb3_extra_buffers.compressed import CompressedRecurrentRolloutBuffer, use_rollout_buffer
        >>> model = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=16, batch_size=16)
        >>> use_rollout_buffer(model, CompressedRecurrentRolloutBuffer)
        >>> model = model.learn(32)
    """


class CompressedRecurrentDictRolloutBuffer(ContribRollout, RecurrentDictRolloutBuffer, CompressedDictRolloutBuffer):
    """sb3-contrib's `RecurrentDictRolloutBuffer` with compressed observations; pass it to `use_rollout_buffer`.

    Takes the arguments of `CompressedRecurrentRolloutBuffer` and of `CompressedRolloutBuffer`.

    Examples:
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedRecurrentDictRolloutBuffer
        >>> space = spaces.Dict({"image": spaces.Box(0, 255, (4, 84, 84), "uint8"), "speed": spaces.Box(0, 1, (3,))})
        >>> states = (128, 1, 8, 256)  # steps, layers, environments, units
        >>> buffer = CompressedRecurrentDictRolloutBuffer(128, space, spaces.Discrete(6), states, n_envs=8)
    """


class CompressedRecurrentTraining:
    """Mixin for `RecurrentPPO`: creates and loads models that have a compressed rollout buffer."""

    def __init__(self, *args: Any, rollout_buffer_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        set_up = kwargs.pop("_init_setup_model", True)
        super().__init__(*args, _init_setup_model=False, **kwargs)  # type: ignore[call-arg]  # RecurrentPPO follows
        # an attribute of SB3's on-policy algorithms, which is saved with the model
        self.rollout_buffer_kwargs = dict(rollout_buffer_kwargs or {})
        if set_up:
            self._setup_model()

    def _setup_model(self: Any) -> None:
        super()._setup_model()  # type: ignore[misc]  # RecurrentPPO follows
        is_dict = isinstance(self.observation_space, spaces.Dict)
        buffer_class = CompressedRecurrentDictRolloutBuffer if is_dict else CompressedRecurrentRolloutBuffer
        use_rollout_buffer(self, buffer_class, **self.rollout_buffer_kwargs)


def use_rollout_buffer(model: Any, buffer_class: type[Any], **options: Any) -> None:
    """Replace the rollout buffer of ``model`` with an empty ``buffer_class`` of the same settings.

    ``RecurrentPPO`` has no ``rollout_buffer_class`` argument. Call this after creating the model, and again after
    loading it; or use ``compressed(RecurrentPPO)``, which does both by itself.

    Args:
        model: A model with a rollout buffer.
        buffer_class: The class of the new buffer.
        **options: Arguments that compressed buffers add, such as ``compression_method``.

    Examples:
        >>> from sb3_contrib import RecurrentPPO
        >>> from sb3_extra_buffers.compressed import CompressedRecurrentRolloutBuffer, use_rollout_buffer
        >>> model = RecurrentPPO("MlpLstmPolicy", "CartPole-v1")
        >>> use_rollout_buffer(model, CompressedRecurrentRolloutBuffer)
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
