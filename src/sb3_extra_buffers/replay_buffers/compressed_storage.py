"""`CompressedStorage`: a drop-in for TorchRL's tensor storages that takes a fraction of the memory."""

from __future__ import annotations

from sb3_extra_buffers.errors import MissingExtraError

try:
    from sb3_extra_buffers._torchrl.portable import PortableStorage
except ImportError as error:
    raise MissingExtraError(
        f"CompressedStorage needs 'torchrl' and 'tensordict': {MissingExtraError.hint('torchrl')}"
    ) from error

__all__ = ["CompressedStorage"]


class CompressedStorage(PortableStorage):
    """A storage for TensorDicts that holds images losslessly in about a hundredth of the memory.

    Replaces `LazyTensorStorage` and `LazyMemmapStorage` in any TorchRL buffer: the same samples at the same seed, with
    every sampler and writer. Large leaves are compressed, and ``("next", key)`` costs almost nothing next to ``key``;
    small leaves (rewards, flags, vectors) stay plain tensors. Items that are read are copies; everything else works as
    with TorchRL's storages.

    Compression depends on which items follow each other in one environment. With ``ndim=2`` every column is one
    environment; with ``ndim=1`` the environment of an item is its position modulo ``n_envs``. Use ``n_envs=1`` for
    whole trajectories, one after the other, and ``n_envs=n`` for steps of ``n`` environments.

    Args:
        max_size: The maximum number of items.
        device: The device of sampled tensors. On CUDA, compressed frames are stored and decoded there too; other
            devices decode on the host.
        ndim: The number of leading axes that count items, as in TorchRL's storages.
        n_envs: The number of environments that take turns; detected from the first items by default.
        compression_method: ``"auto"``, another method for all large leaves, or a mapping of keys to methods.
        compression_kwargs: Options of the method.
        prefer: ``"memory"`` or ``"speed"``: lets ``"auto"`` choose a smaller or a faster method than by default.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> from sb3_extra_buffers.replay_buffers import CompressedStorage
        >>> buffer = TensorDictReplayBuffer(storage=CompressedStorage(100_000), batch_size=32)
        >>> indices = buffer.extend(TensorDict({"pixels": torch.zeros(64, 4, 84, 84, dtype=torch.uint8)}, [64]))
        >>> buffer.sample()["pixels"].shape
        torch.Size([32, 4, 84, 84])
    """
