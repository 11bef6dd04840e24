"""Prioritised replay: compressed buffers that sample by TD error, and SB3's algorithms trained with them."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_extra_buffers._sb3.generated import Generated, generate_class
from sb3_extra_buffers._sb3.prioritized import PrioritizedMixin, PrioritizedReplayBufferSamples
from sb3_extra_buffers._sb3.weighted import LOSSES, PrioritizedTraining, calls_a_loss
from sb3_extra_buffers.errors import AlgorithmMismatchError

__all__ = [
    "CompressedDictPrioritizedReplayBuffer",
    "CompressedPrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "prioritized",
]


class CompressedPrioritizedReplayBuffer(PrioritizedMixin, ReplayBuffer):
    """Prioritised `ReplayBuffer` (Schaul et al., 2016) with compressed observations.

    Takes the arguments of `CompressedReplayBuffer`, ``n_steps`` and ``gamma`` among them, and:

    Args:
        alpha: How strongly priorities count: 0 samples uniformly, 1 in proportion to TD errors.
        beta: How far importance weights correct the sampling bias: a number, a pair of first and last value, or a
            function of ``progress_remaining``, which goes from 1 to 0.
        epsilon: Added to every TD error, so that every transition can be drawn again.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import CompressedPrioritizedReplayBuffer, prioritized
        >>> options = {"alpha": 0.5, "beta": (0.4, 1.0)}
        >>> model = prioritized(DQN)("MlpPolicy", "CartPole-v1", buffer_size=1000, replay_buffer_kwargs=options)
        >>> isinstance(model.replay_buffer, CompressedPrioritizedReplayBuffer)
        True
        >>> model.learn(50).replay_buffer.sample(32).weights.shape
        torch.Size([32, 1])
    """


class CompressedDictPrioritizedReplayBuffer(PrioritizedMixin, DictReplayBuffer):
    """Prioritised `DictReplayBuffer` with compressed observations.

    Takes the arguments of `CompressedPrioritizedReplayBuffer` and of `CompressedReplayBuffer`.

    Examples:
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedDictPrioritizedReplayBuffer
        >>> space = spaces.Dict({"image": spaces.Box(0, 255, (4, 84, 84), "uint8"), "speed": spaces.Box(0, 1, (3,))})
        >>> buffer = CompressedDictPrioritizedReplayBuffer(100_000, space, spaces.Discrete(6), alpha=0.5)
    """


class _Prioritized(Generated, PrioritizedTraining):
    default_buffers = (CompressedPrioritizedReplayBuffer, CompressedDictPrioritizedReplayBuffer)


def prioritized(algorithm_class: type[Any]) -> type[Any]:
    """Return a class like ``algorithm_class`` that trains with prioritised replay.

    Its ``train()`` runs the installed code of ``algorithm_class`` with importance weights on the gradient of the loss,
    and turns the TD errors of each batch into priorities before the next batch is drawn. Works for DQN, SAC, TD3, DDPG
    and sb3-contrib's QRDQN, TQC and CrossQ, and for your own classes whose ``train()`` calls one of their losses.

    Args:
        algorithm_class: An off-policy algorithm.

    Returns:
        A class that takes the arguments of ``algorithm_class``. Its replay buffer is a
        `CompressedPrioritizedReplayBuffer`, or `CompressedDictPrioritizedReplayBuffer` for Dict observations.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from sb3_extra_buffers.compressed import prioritized
        >>> model = prioritized(DQN)("MlpPolicy", "CartPole-v1", replay_buffer_kwargs={"alpha": 0.5}, device="cpu")
    """
    if issubclass(algorithm_class, PrioritizedTraining):
        return algorithm_class
    name = algorithm_class.__name__
    if not issubclass(algorithm_class, OffPolicyAlgorithm):
        raise AlgorithmMismatchError(f"{name} has no replay buffer; pass an off-policy algorithm of SB3, such as DQN")
    if not calls_a_loss(algorithm_class.train):
        raise AlgorithmMismatchError(
            f"{name}.train() calls none of {', '.join(sorted(LOSSES))}; if it calls super().train(), make "
            f"{name} a subclass of prioritized({algorithm_class.__bases__[0].__name__}) instead"
        )
    bases = (_Prioritized, algorithm_class)
    return generate_class(prioritized, algorithm_class, "Prioritized", bases, f"`{name}` with prioritised replay.")
