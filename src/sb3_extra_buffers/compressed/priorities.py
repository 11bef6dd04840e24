"""Prioritised replay: compressed buffers that draw by TD error, and SB3's algorithms trained with them."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_extra_buffers._sb3.prioritized import PrioritizedMixin, PrioritizedReplayBufferSamples
from sb3_extra_buffers._sb3.weighted import LOSSES, PrioritizedTraining, names_a_loss
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
        alpha: How much priorities count: 0 draws uniformly, 1 in proportion to TD errors.
        beta: How far importance weights make up for it: a number, a pair of first and last values, or a function of
            ``progress_remaining``, which goes from 1 to 0.
        epsilon: Added to each TD error, so that none is never drawn again.

    Example:
        >>> from gymnasium import spaces
        >>> images = spaces.Box(0, 255, (4, 84, 84), "uint8")
        >>> buffer = CompressedPrioritizedReplayBuffer(100_000, images, spaces.Discrete(6), device="cpu", alpha=0.5)
    """


class CompressedDictPrioritizedReplayBuffer(PrioritizedMixin, DictReplayBuffer):
    """`CompressedPrioritizedReplayBuffer` for Dict observations."""


# one class for each, so that models of it know each other
_made: dict[type[Any], type[Any]] = {}


class _Prioritized(PrioritizedTraining):
    default_buffers = (CompressedPrioritizedReplayBuffer, CompressedDictPrioritizedReplayBuffer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class has no name that pickle could find it by, nor has a subclass of it need of one
        reduced: Any = super().__reduce_ex__(protocol)
        if type(self) not in _made.values():
            return reduced
        return (_blank, (type(self).__bases__[1],), *reduced[2:])


def _blank(algorithm_class: type[Any]) -> Any:
    made = prioritized(algorithm_class)
    return object.__new__(made)


def prioritized(algorithm_class: type[Any]) -> type[Any]:
    """A class that does what ``algorithm_class`` does, with prioritised replay.

    Its ``train()`` runs the code of ``algorithm_class`` as installed, with importance weights on the gradient of the
    loss, and turns the TD errors of each batch into priorities before the next batch is drawn. Works for DQN, SAC, TD3,
    DDPG and sb3-contrib's QRDQN, TQC and CrossQ, and for classes of your own whose ``train()`` calls such a loss.

    Example:
        >>> from stable_baselines3 import DQN
        >>> model = prioritized(DQN)("MlpPolicy", "CartPole-v1", replay_buffer_kwargs={"alpha": 0.5}, device="cpu")
    """
    if issubclass(algorithm_class, PrioritizedTraining):
        return algorithm_class
    if algorithm_class in _made:
        return _made[algorithm_class]
    name = algorithm_class.__name__
    if not issubclass(algorithm_class, OffPolicyAlgorithm):
        raise AlgorithmMismatchError(f"{name} has no replay buffer; pass an off-policy algorithm of SB3, such as DQN")
    if not names_a_loss(algorithm_class.train):
        raise AlgorithmMismatchError(
            f"{name}.train() calls none of {', '.join(sorted(LOSSES))}; if it calls super().train(), make "
            f"{name} a subclass of prioritized({algorithm_class.__bases__[0].__name__}) instead"
        )
    about = {"__module__": __name__, "__doc__": f"`{name}` with prioritised replay."}
    _made[algorithm_class] = type(f"Prioritized{name}", (_Prioritized, algorithm_class), about)
    return _made[algorithm_class]
