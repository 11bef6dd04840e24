"""SB3's own training with importance weights and priorities, for algorithms as they are installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from torch.nn import functional

from sb3_extra_buffers._sb3.prioritized import PrioritizedMixin, PrioritizedReplayBufferSamples
from sb3_extra_buffers.errors import AlgorithmMismatchError

if TYPE_CHECKING:
    _Base = OffPolicyAlgorithm
else:
    _Base = object

#: functions of an estimate and its target whose mean over a batch is a loss
LOSSES = frozenset({"smooth_l1_loss", "huber_loss", "mse_loss", "quantile_huber_loss"})


class PrioritizedTraining(_Base):
    """Runs the ``train()`` of the class it is mixed into with the losses it names replaced by weighted ones.

    The code that runs is that of the installed algorithm. It finds other functions under the names of its losses, and
    a buffer that looks on: no module is changed, and nothing has to be undone but the buffer.
    """

    #: for Box and for Dict observations, where no class is asked for
    default_buffers: tuple[type[PrioritizedMixin], type[PrioritizedMixin]]

    def _setup_model(self) -> None:
        chosen, kwargs = self.replay_buffer_class, self.replay_buffer_kwargs
        if chosen is None:
            self.replay_buffer_class = self.default_buffers[isinstance(self.observation_space, spaces.Dict)]
        elif not issubclass(chosen, PrioritizedMixin):
            raise AlgorithmMismatchError(
                f"{type(self).__name__} needs a prioritised buffer, got {chosen.__name__}; leave replay_buffer_class "
                "out, or pass CompressedPrioritizedReplayBuffer"
            )
        n_steps = getattr(self, "n_steps", 1)
        if n_steps > 1:
            self.replay_buffer_kwargs = {"n_steps": n_steps, "gamma": self.gamma, **kwargs}
        try:
            with warnings.catch_warnings():
                # they are not, see above
                warnings.filterwarnings("ignore", message="`n_steps=.* is ignored because")
                super()._setup_model()
        finally:
            self.replay_buffer_kwargs = kwargs

    def train(self, *args: Any, **kwargs: Any) -> None:
        buffer: Any = self.replay_buffer
        if not isinstance(buffer, PrioritizedMixin):
            raise AlgorithmMismatchError(
                f"{type(self).__name__} needs a prioritised buffer, but a {type(buffer).__name__} was loaded into it"
            )
        buffer.progress_remaining = self._current_progress_remaining
        watched = WatchedBuffer(buffer)
        train = with_losses(super().train.__func__, watched.weighted)  # type: ignore[attr-defined]  # a method
        self.replay_buffer = watched  # type: ignore[assignment]  # for as long as train() runs
        try:
            train(self, *args, **kwargs)
        finally:
            self.replay_buffer = buffer
        watched.finish()
        self.logger.record("train/beta", buffer.beta_now())
        if watched.mean_errors:
            self.logger.record("train/td_error", sum(watched.mean_errors) / len(watched.mean_errors))


class WatchedBuffer:
    """The buffer while an algorithm trains: knows which batch a loss belongs to, and passes its errors on."""

    def __init__(self, buffer: PrioritizedMixin) -> None:
        self.buffer = buffer
        self.mean_errors: list[float] = []
        self._batch: PrioritizedReplayBufferSamples | None = None
        self._errors: list[th.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def sample(self, *args: Any, **kwargs: Any) -> PrioritizedReplayBufferSamples:
        self.finish()
        batch: PrioritizedReplayBufferSamples = self.buffer.sample(*args, **kwargs)
        self._batch = batch
        return batch

    def finish(self) -> None:
        """Turn the errors of the last batch into priorities, before the next one is drawn."""
        if self._batch is None:
            return
        if not self._errors:
            raise AlgorithmMismatchError(
                f"train() took a batch and called none of {', '.join(sorted(LOSSES))} by the names its module has for "
                "them, so there are no TD errors to take priorities from; call update_priorities() in a train() of "
                "your own instead"
            )
        # one entry for each critic
        errors = th.stack(self._errors).mean(dim=0)
        self.buffer.update_priorities(self._batch.indices, errors)
        self.mean_errors.append(float(errors.mean()))
        self._batch, self._errors = None, []

    def weighted(self, loss: Callable[..., th.Tensor]) -> Callable[..., th.Tensor]:
        """``loss`` with the gradient of each sample scaled by its weight, which also takes note of its error."""

        def weighted_loss(current: th.Tensor, target: th.Tensor, /, *args: Any, **kwargs: Any) -> th.Tensor:
            if self._batch is None or len(current) != len(self._batch.indices):
                n_samples = 0 if self._batch is None else len(self._batch.indices)
                raise AlgorithmMismatchError(
                    f"{loss.__name__} of {len(current)} estimates, but the batch has {n_samples} samples"
                )
            self._errors.append(td_errors(loss, current.detach(), target.detach()))
            weights = self._batch.weights
            return loss(weigh(current, weights), weigh(target, weights), *args, **kwargs)

        return weighted_loss


def td_errors(loss: Callable[..., Any], current: th.Tensor, target: th.Tensor) -> th.Tensor:
    """Absolute TD errors, (batch_size,): of the mean where there are quantiles, the mean where there are critics."""
    if loss.__name__ == "quantile_huber_loss":
        current, target = current.mean(dim=-1), target.mean(dim=-1)
    return (target - current).abs().reshape(len(current), -1).mean(dim=1)


def weigh(values: th.Tensor, weights: th.Tensor) -> th.Tensor:
    """``values`` as they are, whose gradients will be multiplied by ``weights``, one for each row.

    For a mean over samples that is the same as multiplying each sample's loss, without knowing how it is made.
    """
    weighed: th.Tensor = _Weigh.apply(values, weights)  # type: ignore[no-untyped-call]  # torch's
    return weighed


class _Weigh(th.autograd.Function):
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


def with_losses(train: FunctionType, replace: Callable[[Any], Any]) -> FunctionType:
    """The function ``train`` as it is, but for the losses that it finds in its module."""
    names = dict(train.__globals__)
    losses = {name: replace(getattr(functional, name)) for name in LOSSES if hasattr(functional, name)}
    for name, value in train.__globals__.items():
        if value is functional:
            names[name] = _Functional(losses)
        elif isinstance(value, FunctionType) and value.__name__ in LOSSES:
            names[name] = replace(value)
    again = FunctionType(train.__code__, names, train.__name__, train.__defaults__, train.__closure__)
    again.__kwdefaults__ = train.__kwdefaults__
    return again


def calls_a_loss(train: Any) -> bool:
    """Whether the code of ``train`` calls something by the name of a loss."""
    code = getattr(train, "__code__", None)
    return code is not None and any(LOSSES & set(part.co_names) for part in _codes(code))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        # such as a generator expression over critics
        if isinstance(constant, CodeType):
            yield from _codes(constant)
