"""Runs the installed ``train()`` of an SB3 algorithm with importance weights and priority updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from torch.nn import functional

from sb3_extra_buffers._sb3.prioritized import Priorities, PrioritizedReplayBufferSamples
from sb3_extra_buffers.errors import AlgorithmMismatchError

if TYPE_CHECKING:
    _Base = OffPolicyAlgorithm
else:
    _Base = object

#: Functions of an estimate and its target whose mean over a batch is a loss.
LOSSES = frozenset({"smooth_l1_loss", "huber_loss", "mse_loss", "quantile_huber_loss"})


class PrioritizedTraining(_Base):
    """Runs the ``train()`` of the algorithm it is mixed into with weighted losses.

    The code is that of the installed algorithm, but the names of losses refer to weighted ones, and ``replay_buffer``
    to a `RecordingBuffer`. No module is changed; only the buffer has to be put back.
    """

    #: Buffer classes for Box and for Dict observations, if the user names none.
    default_buffers: tuple[type[Any], type[Any]]

    def _setup_model(self) -> None:
        chosen, kwargs = self.replay_buffer_class, self.replay_buffer_kwargs
        if chosen is None:
            self.replay_buffer_class = self.default_buffers[isinstance(self.observation_space, spaces.Dict)]
        elif not issubclass(chosen, Priorities):
            raise AlgorithmMismatchError(
                f"{type(self).__name__} needs a prioritised buffer, got {chosen.__name__}; leave out "
                "replay_buffer_class or pass CompressedPrioritizedReplayBuffer"
            )
        n_steps = getattr(self, "n_steps", 1)
        if n_steps > 1:
            self.replay_buffer_kwargs = {"n_steps": n_steps, "gamma": self.gamma, **kwargs}
        try:
            with warnings.catch_warnings():
                # they are passed to the buffer, see above
                warnings.filterwarnings("ignore", message="`n_steps=.* is ignored because")
                super()._setup_model()
        finally:
            self.replay_buffer_kwargs = kwargs

    def train(self, *args: Any, **kwargs: Any) -> None:
        buffer: Any = self.replay_buffer
        if not issubclass(type(buffer), Priorities):
            raise AlgorithmMismatchError(
                f"{type(self).__name__} needs a prioritised buffer, but a {type(buffer).__name__} was loaded into it"
            )
        buffer.progress_remaining = self._current_progress_remaining
        recording = RecordingBuffer(buffer)
        train = replace_losses(super().train.__func__, recording.weighted)  # type: ignore[attr-defined]  # a method
        self.replay_buffer = recording  # type: ignore[assignment]  # while train() runs
        try:
            train(self, *args, **kwargs)
        finally:
            self.replay_buffer = buffer
        recording.finish_batch()
        self.logger.record("train/beta", buffer.beta_now())
        if recording.mean_errors:
            self.logger.record("train/td_error", sum(recording.mean_errors) / len(recording.mean_errors))


class RecordingBuffer:
    """Stands for the buffer during ``train()``: records the TD errors of each batch and updates its priorities."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.mean_errors: list[float] = []
        self._batch: PrioritizedReplayBufferSamples | None = None
        self._errors: list[th.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def sample(self, *args: Any, **kwargs: Any) -> PrioritizedReplayBufferSamples:
        self.finish_batch()
        batch: PrioritizedReplayBufferSamples = self.buffer.sample(*args, **kwargs)
        self._batch = batch
        return batch

    def finish_batch(self) -> None:
        """Turn the TD errors of the last batch into priorities."""
        if self._batch is None:
            return
        if not self._errors:
            raise AlgorithmMismatchError(
                f"train() sampled a batch but called none of {', '.join(sorted(LOSSES))} through the names in its "
                "module, so there are no TD errors to compute priorities from; call update_priorities() in your own "
                "train() instead"
            )
        # one tensor for each critic
        errors = th.stack(self._errors).mean(dim=0)
        self.buffer.update_priorities(self._batch.indices, errors)
        self.mean_errors.append(float(errors.mean()))
        self._batch, self._errors = None, []

    def weighted(self, loss: Callable[..., th.Tensor]) -> Callable[..., th.Tensor]:
        """Return ``loss`` with the gradient of each sample scaled by its weight; calling it records the TD errors."""

        def weighted_loss(current: th.Tensor, target: th.Tensor, /, *args: Any, **kwargs: Any) -> th.Tensor:
            if self._batch is None or len(current) != len(self._batch.indices):
                n_samples = 0 if self._batch is None else len(self._batch.indices)
                raise AlgorithmMismatchError(
                    f"{loss.__name__} was called with {len(current)} estimates, but the batch has {n_samples} samples"
                )
            self._errors.append(td_errors(loss, current.detach(), target.detach()))
            weights = self._batch.weights
            return loss(weight_gradient(current, weights), weight_gradient(target, weights), *args, **kwargs)

        return weighted_loss


def td_errors(loss: Callable[..., Any], current: th.Tensor, target: th.Tensor) -> th.Tensor:
    """Return absolute TD errors of shape (batch_size,), from the means of quantiles or averaged over other axes."""
    if loss.__name__ == "quantile_huber_loss":
        current, target = current.mean(dim=-1), target.mean(dim=-1)
    return (target - current).abs().reshape(len(current), -1).mean(dim=1)


def weight_gradient(values: th.Tensor, weights: th.Tensor) -> th.Tensor:
    """Return ``values`` unchanged; their gradient will be multiplied by ``weights``, one for each row.

    For a loss that is a mean over samples, this equals weighting the loss of each sample, whatever the loss computes.
    """
    weighted: th.Tensor = _WeightGradient.apply(values, weights)  # type: ignore[no-untyped-call]  # torch's
    return weighted


class _WeightGradient(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: th.Tensor, weights: th.Tensor) -> th.Tensor:
        ctx.save_for_backward(weights)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: th.Tensor) -> tuple[th.Tensor, None]:
        (weights,) = ctx.saved_tensors
        return gradient * weights.reshape(-1, *[1] * (gradient.ndim - 1)), None


class _Functional:
    """``torch.nn.functional`` with some functions replaced."""

    def __init__(self, replaced: dict[str, Any]) -> None:
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


def replace_losses(train: FunctionType, replace: Callable[[Any], Any]) -> FunctionType:
    """Return a copy of ``train`` whose globals have every loss replaced."""
    names = dict(train.__globals__)
    losses = {name: replace(getattr(functional, name)) for name in LOSSES if hasattr(functional, name)}
    for name, value in train.__globals__.items():
        if value is functional:
            names[name] = _Functional(losses)
        elif isinstance(value, FunctionType) and value.__name__ in LOSSES:
            names[name] = replace(value)
    copied = FunctionType(train.__code__, names, train.__name__, train.__defaults__, train.__closure__)
    copied.__kwdefaults__ = train.__kwdefaults__
    return copied


def calls_a_loss(train: Any) -> bool:
    """Whether the code of ``train`` uses the name of a loss."""
    code = getattr(train, "__code__", None)
    return code is not None and any(LOSSES & set(nested.co_names) for nested in _nested_code(code))


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    """``code`` and what it contains, such as a generator expression over critics."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code(constant)
